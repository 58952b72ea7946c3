"""Reports of an experiment: tables, plots, the page, live views and trackers."""
