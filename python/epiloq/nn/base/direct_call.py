"""Direct C++ calls for layers in eager torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from epiloq._torch.library import direct

# Of what crosses into C++.
_MOST_DIMENSIONS = 6


def takes_directly(x: Tensor, in_features: int, parts: Sequence[Any]) -> bool:
    """Whether C++ may take `x` and a layer's tensors, the weight first, then the bias, as they are.

    That is where `x` is dense, ``[.., M, in_features]`` and of the bias's dtype, the tensors are plain, and nothing
    compiles, traces or differentiates. Views, conversions and two operations called from Python take an eager
    layer some 30 us, its kernels a few.
    """
    if not direct((x,), tuple(parts)):
        return False
    weight, bias = parts[0], parts[1]
    if weight.is_meta or (bias is not None and bias.dtype != x.dtype):
        return False
    return 1 < x.dim() <= _MOST_DIMENSIONS and x.shape[-1] == in_features and x.is_contiguous()
