"""A way past Python for layers in eager torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from epiloq._library import direct

# Of what crosses into C++.
_MOST_DIMENSIONS = 6


def direct_parts(layer: nn.Module, x: Tensor, in_features: int, names: tuple[str, ...]) -> list[Any] | None:
    """The layer's buffers of these names, the weight first, then "bias", if C++ may take `x` and them as they are; or
    None.

    That is where `x` is dense, ``[.., M, in_features]`` and of the bias's dtype, the tensors are plain buffers, and
    nothing compiles, traces or differentiates. Views, conversions and two operations called from Python take an eager
    layer some 30 us, its kernels a few.
    """
    buffers = layer._buffers
    parts = [buffers[name] for name in names if name in buffers]
    if len(parts) < len(names) or not direct((x,), tuple(parts)):
        return None
    weight, bias = parts[0], parts[1]
    if weight is None or weight.is_meta or (bias is not None and bias.dtype != x.dtype):
        return None
    fits = 1 < x.dim() <= _MOST_DIMENSIONS and x.shape[-1] == in_features and x.is_contiguous()
    return parts if fits else None
