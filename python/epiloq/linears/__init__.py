"""What counts as a linear layer of a model: subclasses, transposed ones, and those whose weight other code reads."""
