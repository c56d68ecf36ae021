"""Convolutions with quantised weights."""
