"""Contiguous rows, as required by operations."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_rows(x: Tensor) -> Tensor:
    """Return `x` ``[…, R, K]`` itself if its rows are contiguous, evenly spaced and do not overlap, else a copy."""
    strides, sizes = x.stride(), x.shape
    evenly = all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(x.dim() - 2))
    apart = x.dim() < 2 or strides[-2] >= sizes[-1]
    if strides[-1] == 1 and apart and evenly:
        return x
    # `contiguous` would not change the strides of empty tensors.
    return x.clone(memory_format=torch.contiguous_format)
