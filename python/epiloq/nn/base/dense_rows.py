"""Dense rows, as operations need them."""

from __future__ import annotations

from torch import Tensor


def dense_rows(x: Tensor) -> Tensor:
    """`x` ``[.., R, K]`` with rows that are dense, apart and evenly spaced: itself, or a copy, of a transpose and of
    rows that repeat or overlap."""
    strides, sizes = x.stride(), x.shape
    evenly = all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(x.dim() - 2))
    apart = x.dim() < 2 or strides[-2] >= sizes[-1]
    return x if strides[-1] == 1 and apart and evenly else x.contiguous()
