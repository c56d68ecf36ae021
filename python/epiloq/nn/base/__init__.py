"""Base classes of the quantised layers: stored tensors, prepared weights, gradients of frozen weights."""
