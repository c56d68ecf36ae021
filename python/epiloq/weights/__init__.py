"""Quantised weights: packed for the kernels, prepared for int8 products, or on a grid that a format stores."""
