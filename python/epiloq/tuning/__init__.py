"""Kernel choices measured on the user's GPU: `epiloq.tune` times candidates, and a file keeps the fastest.

Imports nothing here: dispatch calls `store` before the first product on a device, when the rest is not needed.
"""
