"""Rows as the operations want them."""

from __future__ import annotations

from torch import Tensor


def dense_rows(x: Tensor) -> Tensor:
    """`x` with rows that are dense and apart: itself, or a copy of a transpose, or of what repeats or overlaps."""
    columns = x.shape[-1]
    return x if x.stride(-1) == 1 and all(stride >= columns for stride in x.stride()[:-1]) else x.contiguous()
