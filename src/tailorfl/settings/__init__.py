"""All settings, each declared once with type, range, default and meaning; torch is not needed."""
