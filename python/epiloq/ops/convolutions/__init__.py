"""Convolution operations, one file each, and the geometry that they share."""
