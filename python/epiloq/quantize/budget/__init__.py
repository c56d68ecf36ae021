"""Choosing a scheme for each layer: the smallest loss within a size budget."""
