"""Accounting of sample-level and client-level differential privacy."""
