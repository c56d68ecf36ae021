"""int8 function of ``sgl_kernel``, with its signature and meaning: change the import, nothing else.

Any K and N are taken (sgl_kernel asks for multiples of 16 and 8), and wrong arguments raise ValueError instead of
RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.compat._checks import require_half, require_int8, require_matrix, vector

__all__ = ["int8_scaled_mm"]


def int8_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``D[m, n] = scales_a[m] * scales_b[n] * (mat_a @ mat_b)[m, n] + bias[n]``.

    `mat_a` int8 [M, K] row-major, `mat_b` int8 [K, N] column-major, `scales_a` float32 of exactly M elements and
    `scales_b` of exactly N, `out_dtype` bfloat16 or float16, `bias` of N elements of `out_dtype`; all else raises
    ValueError (FP8: NotImplementedError).
    """
    operation = "int8_scaled_mm"
    require_int8(operation, mat_a=mat_a, mat_b=mat_b)
    require_half(operation, out_dtype)
    require_matrix(operation, mat_a=mat_a, mat_b=mat_b)
    scales_a = vector(operation, "scales_a", scales_a, mat_a.shape[0])
    scales_b = vector(operation, "scales_b", scales_b, mat_b.shape[1])
    if bias is not None:
        bias = vector(operation, "bias", bias, mat_b.shape[1])
    return epiloq.scaled_mm(mat_a, mat_b, scales_a, scales_b, bias, out_dtype=out_dtype)
