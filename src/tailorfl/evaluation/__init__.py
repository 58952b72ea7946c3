"""Metrics, statistics over clients and seeds, calibration and generation."""
