"""Fair tuning: every method of an experiment gets the same budget over its own search space."""
