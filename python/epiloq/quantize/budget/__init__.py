"""A scheme for each layer: the least loss for a number of bytes."""
