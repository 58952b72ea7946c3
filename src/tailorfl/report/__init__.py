"""What an experiment found: tables, plots, the page, live views and trackers."""
