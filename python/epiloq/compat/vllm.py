"""int8 functions of ``vllm._custom_ops``, with its signatures and meaning: change the import, nothing else.

Differences, all on the permissive or the defined side: any K and N (vLLM asks for multiples of 16); quantisers
divide and round half to even, where vLLM's kernels multiply by a reciprocal in places (one step apart at a tie); a
zero row has the scale 2^-126 instead of 0 and a constant row a valid one; wrong arguments raise ValueError instead
of AssertionError or RuntimeError.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import epiloq
from epiloq.compat._checks import require_half, require_int8, require_matrix, vector

__all__ = ["cutlass_scaled_mm", "cutlass_scaled_mm_azp", "scaled_int8_quant"]


def cutlass_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``D = scale_a * scale_b * (a @ b) + bias``, shape ``[.., N]``.

    `a` int8 [.., K], its leading dimensions flattened to M rows; `b` int8 [K, N] column-major; `scale_a` float32 of
    1 or M elements, `scale_b` of 1 or N; `out_dtype` bfloat16 or float16; `bias` of N elements of `out_dtype`.

    Raises NotImplementedError for FP8 operands (and so for block-wise scales, which vLLM defines for FP8),
    ValueError otherwise.
    """
    operation = "cutlass_scaled_mm"
    rows = _checked_rows(operation, a, b, out_dtype)
    if bias is not None:
        bias = vector(operation, "bias", bias, b.shape[1])
    d = epiloq.scaled_mm(rows, b, scale_a.reshape(-1), scale_b.reshape(-1), bias, out_dtype=out_dtype)
    return d.view(*a.shape[:-1], b.shape[1])


def cutlass_scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``D = scale_a * scale_b * (a @ b - azp * azp_adj) + bias``, shape ``[.., N]``.

    As `cutlass_scaled_mm`, with `azp_adj` int32 of N elements (the column sums of `b`) and `azp` int32 of M
    elements. Without `azp` the zero point is one for all tokens and `azp_adj` contains it as a factor. The
    correction is computed in int32, as in vLLM, which is exact while the sums of ``(a - azp) * b`` fit in int32.
    """
    operation = "cutlass_scaled_mm_azp"
    rows = _checked_rows(operation, a, b, out_dtype)
    azp_adj = vector(operation, "azp_adj", azp_adj, b.shape[1])
    if azp is not None:
        azp = vector(operation, "azp", azp, rows.shape[0])
    if bias is not None:
        bias = vector(operation, "bias", bias, b.shape[1])
    d = epiloq.scaled_mm_azp(rows, b, scale_a.reshape(-1), scale_b.reshape(-1), azp_adj, azp, bias, out_dtype=out_dtype)
    return d.view(*a.shape[:-1], b.shape[1])


def scaled_int8_quant(
    input: Tensor, scale: Tensor | None = None, azp: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise `input` [.., K] to ``(q, scale, azp or None)``, q int8 of the same shape.

    With `scale` (float32, one element) and, if not `symmetric`, `azp` (int32, one element): per tensor, both
    returned as given. Otherwise per token, `azp` ignored: scale float32 [tokens, 1] = max|x| / 127; or, if not
    `symmetric`, scale = (max - min) / 255 and azp int32 [tokens, 1] = round(-128 - min / scale). That range need
    not contain zero, so that azp may leave [-128, 127].
    """
    if scale is None:
        q, scale, azp = epiloq.quantize_int8(input, symmetric=symmetric, range_includes_zero=False)
        return q, scale.reshape(-1, 1), None if azp is None else azp.reshape(-1, 1)
    if symmetric != (azp is None):
        given = "none" if azp is None else "one"
        raise ValueError(
            f"scaled_int8_quant: azp: expected one for a static asymmetric scale and none for a symmetric one, "
            f"got {given} with symmetric={symmetric}"
        )
    q, _, _ = epiloq.quantize_int8(
        input,
        scale=vector("scaled_int8_quant", "scale", scale, 1),
        azp=None if azp is None else vector("scaled_int8_quant", "azp", azp, 1),
        symmetric=symmetric,
    )
    return q, scale, azp


def _checked_rows(operation: str, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`a` as [M, K]; its own row stride is kept where its leading dimensions can be viewed as one."""
    require_int8(operation, a=a, b=b)
    require_half(operation, out_dtype)
    require_matrix(operation, b=b)
    if a.dim() == 0:
        raise ValueError(f"{operation}: a: expected shape [.., K], got a scalar")
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
