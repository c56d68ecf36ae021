"""Packed weights: checks of their tensors, slices of rows, dequantisation."""
