"""Scales, rounded to the dtype of a checkpoint or layer."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = torch.finfo(torch.float16)
SMALLEST_HALF = _HALF.tiny * _HALF.eps
"""The smallest positive float16 number, 2^-24."""
FINE_HALF = 64 * SMALLEST_HALF
"""Smallest scale that float16 represents to one part in 64 or better: subnormals have fewer bits."""


def scales_in(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert positive float32 scales to a dtype, never to 0.

    Subnormal float16 scales, which have few bits, are rounded up, so that no value lies outside the range.
    """
    found = scale.to(dtype)
    if dtype != torch.float16:
        return found.clamp_(min=torch.finfo(dtype).tiny)
    up = (found.float() < scale) & (found < _HALF.tiny)
    return (found + up.to(dtype) * SMALLEST_HALF).clamp_(min=SMALLEST_HALF)


def wide_enough(largest: float, dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype for scales with this largest one: `dtype`, unless it is too coarse."""
    return torch.float32 if dtype == torch.float16 and 0 < largest < FINE_HALF else dtype
