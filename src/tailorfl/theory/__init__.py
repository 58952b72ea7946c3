"""Calculators of the papers' formulas (numbers in, numbers out), and the advisor, which measures the numbers."""
