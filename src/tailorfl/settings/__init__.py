"""Every setting, declared once: type, range, default and meaning; torch is not needed."""
