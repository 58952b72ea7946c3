"""Calculators of the papers' formulas: numbers in, numbers out; no training and no torch."""
