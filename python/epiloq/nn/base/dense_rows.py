"""Contiguous rows, as required by operations."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_rows(x: Tensor) -> Tensor:
    """`x` ``[…, R, K]`` with contiguous, evenly spaced rows that do not overlap: itself, or a copy (of a transpose,
    or if rows repeat or overlap)."""
    strides, sizes = x.stride(), x.shape
    evenly = all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(x.dim() - 2))
    apart = x.dim() < 2 or strides[-2] >= sizes[-1]
    if strides[-1] == 1 and apart and evenly:
        return x
    # Not `contiguous`, which returns empty tensors with the strides that they have.
    return x.clone(memory_format=torch.contiguous_format)
