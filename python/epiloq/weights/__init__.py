"""Quantised weights: packed for the kernels, prepared for int8 products, or on a grid for storage."""
