"""Benchmarks: epiloq's operations against their peers and against the floor that memory and arithmetic set.

``epiloq bench`` and ``python -m epiloq.bench`` run it; the second needs PyTorch alone. Cases and operations
are data (:mod:`epiloq.bench.cases`, :mod:`epiloq.bench.operations`): a new operation adds a row there and leaves the
runner as it is.
"""
