"""Attention: batched products, and one decode step over a cache."""
