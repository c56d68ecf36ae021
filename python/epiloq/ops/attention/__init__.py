"""Attention and its cache."""
