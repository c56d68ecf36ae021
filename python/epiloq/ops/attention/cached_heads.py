"""Keys and values in 8 bits, with a scale per token and head."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq.weights.scales import SMALLEST_HALF

# The type of the values, and the largest of them, by the name of a cache's `dtype`.
KINDS: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}


def quantize_heads(states: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Keys or values ``[B, H, T, D]`` as bytes of the same shape, and scales ``[B, H, T, 1]`` of their dtype.

    There is one scale per token and head: the largest magnitude divided by 127 ("int8", rounded half to even) or 448
    ("fp8"). The bytes are int8, or float8_e4m3fn viewed as uint8, which all torch operations can copy.
    """
    dtype, most = KINDS[kind]
    x = states.float()
    # By a tensor: on a GPU torch multiplies by the inverse of a number, which may differ by a bit.
    scale = x.abs().amax(-1, keepdim=True) / x.new_full((), most)
    smallest = torch.finfo(states.dtype).tiny
    if states.dtype == torch.float16:
        # Small scales are subnormal numbers, multiples of 2^-24. Half a step more rounds them up, so that no value lies
        # outside the range.
        scale, smallest = scale + SMALLEST_HALF / 2, SMALLEST_HALF
    # Rounded before the division, so that q is computed with the scale that is stored.
    scale = scale.to(states.dtype).clamp(min=smallest)
    q = (x / scale.float()).clamp(-most, most)
    return q.round().to(dtype) if kind == "int8" else q.to(dtype).view(torch.uint8), scale


def dequantize_heads(q: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Inverse of `quantize_heads`, in the scale's dtype: a product in float32, rounded once."""
    values = q if kind == "int8" else q.view(torch.float8_e4m3fn)
    return (values.float() * scale.float()).to(scale.dtype)
