"""Claims of papers as data, and the verdicts on them."""
