"""Scales, rounded to the dtype of a checkpoint or layer."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = torch.finfo(torch.float16)
SMALLEST_HALF = _HALF.tiny * _HALF.eps
"""2^-24, the smallest float16 number above zero."""
FINE_HALF = 64 * SMALLEST_HALF
"""From here on float16 holds a scale to one part in 64 or better, though below 2^-14 to fewer bits than elsewhere."""


def scales_in(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive float32 scales in a type, never 0.

    float16 numbers below the normal ones have few bits: those are rounded up, so that no value lies beyond a range.
    """
    found = scale.to(dtype)
    if dtype != torch.float16:
        return found.clamp_(min=torch.finfo(dtype).tiny)
    up = (found.float() < scale) & (found < _HALF.tiny)
    return (found + up.to(dtype) * SMALLEST_HALF).clamp_(min=SMALLEST_HALF)


def wide_enough(largest: float, dtype: torch.dtype) -> torch.dtype:
    """The type for scales of a layer with this largest one: the weight's own, unless that is too coarse."""
    return torch.float32 if dtype == torch.float16 and 0 < largest < FINE_HALF else dtype
