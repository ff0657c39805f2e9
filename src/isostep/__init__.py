"""isostep: one update, any layout."""
