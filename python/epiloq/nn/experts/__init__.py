"""Layers of mixtures of experts with quantised weights."""
