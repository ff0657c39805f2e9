"""The check before a campaign: one update over a grid of layouts, against an independent reference."""
