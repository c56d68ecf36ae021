"""Direct C++ calls for layers in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from epiloq._torch.library import direct

# Limit for tensors passed to C++.
_MOST_DIMENSIONS = 6


def takes_directly(x: Tensor, in_features: int, parts: Sequence[Any]) -> bool:
    """Whether `x` and a layer's tensors (the weight first, then the bias) can be passed directly to C++.

    This requires that `x` ``[…, M, in_features]`` is contiguous and has the bias's dtype, that the tensors are plain,
    and that nothing is compiled, traced or differentiated. Views, conversions and two operations called from Python
    would take about 30 us, the kernels only a few.
    """
    if not direct((x,), tuple(parts)):
        return False
    bias = parts[1]
    if parts[0].is_meta or (bias is not None and bias.dtype != x.dtype):
        return False
    # Empty tensors count as contiguous with any strides.
    is_matrix = 1 < x.ndim <= _MOST_DIMENSIONS and x.shape[-1] == in_features
    return is_matrix and x.is_contiguous() and x.stride(-1) == 1
