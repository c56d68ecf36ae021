"""Layouts of one layer's tensors: pure functions between a weight and tensors by name."""
