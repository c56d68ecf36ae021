"""A way past Python for layers in eager torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from epiloq._library import direct


def serves_directly(x: Tensor, in_features: int, weight: Sequence[Tensor | None], bias: Tensor | None) -> bool:
    """Whether a layer may hand `x` and its buffers to C++ as they are.

    That is where `x` is dense, ``[.., M, in_features]`` and of the bias's dtype, and nothing compiles, traces or
    differentiates. Views, conversions and two operations called from Python take an eager layer some 30 us, its kernels
    a few.
    """
    if not direct((x,), (*weight, bias)) or (bias is not None and bias.dtype != x.dtype):
        return False
    return x.dim() > 1 and x.shape[-1] == in_features and x.is_contiguous()
