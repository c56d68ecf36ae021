"""Argument checks of `w4a8_mm` and FP4 products, and of problems given as sizes."""
