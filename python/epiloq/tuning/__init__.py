"""Kernel choices measured on a user's own card: `epiloq.tune` times candidates, a file keeps the fastest.

Imports nothing: dispatch calls `store` before a device's first product, when the rest is not needed.
"""
