"""Layers of mixtures of experts on quantised weights."""
