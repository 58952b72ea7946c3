"""Engines, which apply one client's function to a cohort: in this process, in others, or on a cluster."""
