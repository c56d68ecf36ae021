"""Benchmarks: epiloq's operations, compared with other libraries and with the memory and arithmetic floors.

``epiloq bench`` and ``python -m epiloq.bench`` run them; the second needs only PyTorch. Cases and operations are data
(:mod:`epiloq.bench.cases`, :mod:`epiloq.bench.operations`): a new operation adds a row there, the runner stays.
"""
