"""Convolutional networks whose layers exchange int8: batch normalisation folded, edges planned."""
