"""Convolution operations, one per file, and the geometry that they share."""
