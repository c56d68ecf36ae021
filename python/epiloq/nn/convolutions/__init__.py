"""Convolutions on quantised weights."""
