"""Data sets, batches, and groups that carry data."""
