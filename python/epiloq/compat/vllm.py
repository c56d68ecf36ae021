"""int8, FP8, AWQ and GPTQ functions of vLLM, with the same signatures and semantics: only the import needs to change.

All are from ``vllm._custom_ops``, except `per_token_group_quant_fp8` and `per_token_group_quant_int8` from
``vllm.model_executor.layers.quantization.utils`` (`fp8_utils` and `int8_utils`).

Differences: any K and N (vLLM requires multiples of 16); quantisers divide and round half to even, where some of
vLLM's kernels multiply by a reciprocal (a difference of one step at a tie); a zero row has the scale 2^-126 instead
of 0, and a constant row a valid one; invalid arguments raise ValueError instead of AssertionError or RuntimeError.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import epiloq
from epiloq.compat._checks import FP8, INT8, groups_of, require_dtype, require_half, require_matrix, rows_apart, vector
from epiloq.compat._packed_words import awq_dequantize, awq_gemm, forget_weights, gptq_gemm, gptq_shuffle
from epiloq.ops.quantizers.outputs import empty_scale

__all__ = [
    "awq_dequantize",
    "awq_gemm",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_azp",
    "forget_weights",
    "gptq_gemm",
    "gptq_shuffle",
    "per_token_group_quant_fp8",
    "per_token_group_quant_int8",
    "scaled_fp8_quant",
    "scaled_int8_quant",
]

# vLLM's least scale of a token is 1 / (448 * 512).
_LEAST_TOKEN_AMAX = 1 / 512


def cutlass_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``D = scale_a * scale_b * (a @ b) + bias``, shape ``[…, N]``.

    `a` int8 or float8_e4m3fn […, K], its leading dimensions flattened to M rows; `b` of its dtype [K, N]
    column-major; `scale_a` float32 of 1 or M elements, `scale_b` of 1 or N; `out_dtype` bfloat16 or float16; `bias` of
    N elements of `out_dtype`.

    FP8 with any other number of scales is block-wise: `scale_a` [M, ceil(K / 128)] in any layout, `scale_b` [ceil(K /
    128), ceil(N / 128)] (also with a bias, which vLLM does not support).
    """
    operation = "cutlass_scaled_mm"
    require_dtype(operation, INT8 + FP8, a=a, b=b)
    rows = _checked_rows(operation, a, b, out_dtype)
    m, n = rows.shape[0], b.shape[1]
    if bias is not None:
        bias = vector(operation, "bias", bias, n)
    whole_rows = scale_a.numel() in (1, m) and scale_b.numel() in (1, n)
    if whole_rows or a.dtype == torch.int8:
        d = epiloq.scaled_mm(rows, b, scale_a.reshape(-1), scale_b.reshape(-1), bias, out_dtype=out_dtype)
    else:
        scale_a = scale_a.reshape(-1, scale_a.shape[-1]) if scale_a.dim() > 2 else scale_a
        d = epiloq.groupwise_mm(rows, b, scale_a, scale_b, bias, out_dtype=out_dtype)
    return d.view(*a.shape[:-1], n)


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
    """``D = scale_a * scale_b * (a @ b - azp * azp_adj) + bias``, shape ``[…, N]``.

    As `cutlass_scaled_mm` for int8, with `azp_adj` int32 of N elements (the column sums of `b`) and `azp` int32 of M
    elements. Without `azp` all tokens have the same zero point, which is a factor of `azp_adj`. The correction is
    computed in int32, as in vLLM, which is exact if the sums of ``(a - azp) * b`` fit in int32.
    """
    operation = "cutlass_scaled_mm_azp"
    require_dtype(operation, INT8, a=a, b=b)
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
    """Quantise `input` […, K] to ``(q, scale, azp or None)``, q int8 of the same shape.

    With `scale` (float32, one element) and, if not `symmetric`, `azp` (int32, one element): per tensor, both
    returned as given. Otherwise per token, `azp` ignored: scale float32 [tokens, 1] = max|x| / 127; or, if not
    `symmetric`, scale = (max - min) / 255 and azp int32 [tokens, 1] = round(-128 - min / scale). The range need not
    contain zero, so azp may be outside [-128, 127].
    """
    input = rows_apart("scaled_int8_quant", "input", input)
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


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise `input` […, K], its leading dimensions flattened to M rows, to ``(q, scale)``, q float8_e4m3fn […, K].

    Inputs that are not row-major are copied, as in vLLM.

    Without `scale`: per tensor, scale float32 [1] = max|x| / 448; or, with `use_per_token_if_dynamic`, [rows, 1] =
    max(min(max|x|, scale_ub) / 448, 1 / (448 * 512)).

    A given `scale` is returned unchanged. `group_shape` is the number of rows and columns that share a scale, -1 for
    all; by default it is inferred from a scale with one element or two dimensions. Tensors (-1, -1), tokens (1, -1),
    groups (1, g) and square blocks (g, g) are supported; others raise NotImplementedError.

    The result is written to `output` if given. `num_token_padding` instead allocates at least this number of rows;
    rows past M are not written.
    """
    operation = "scaled_fp8_quant"
    input = rows_apart(operation, "input", input)
    if input.dim() != 2:
        if num_token_padding is not None:
            raise ValueError(f"{operation}: num_token_padding: expected None with {input.dim()} dimensions of input")
        matrix = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
        flat = None if output is None else output.view(matrix.shape)
        q, scale = scaled_fp8_quant(matrix, scale, None, scale_ub, use_per_token_if_dynamic, flat, group_shape)
        return (q.view(input.shape) if output is None else output), scale
    if output is not None and num_token_padding is not None:
        raise ValueError(f"{operation}: num_token_padding: expected None with output, got {num_token_padding}")
    m, k = input.shape
    rows = max(m, num_token_padding or 0)
    q = input.new_empty((rows, k), dtype=torch.float8_e4m3fn) if output is None else output
    require_dtype(operation, FP8, output=q)
    if scale is not None:
        granularity, group_size = _granularity(input, scale, group_shape)
        shaped = scale if granularity in ("group", "block") else scale.reshape(-1)
        epiloq.quantize_fp8(input, granularity=granularity, group_size=group_size, scale=shaped, out=(q[:m], shaped))
        return q, scale
    if use_per_token_if_dynamic:
        scale = input.new_empty((rows, 1), dtype=torch.float32)
        epiloq.quantize_fp8(
            input, granularity="token", scale_ub=scale_ub, eps=_LEAST_TOKEN_AMAX, out=(q[:m], scale[:m])
        )
        return q, scale
    scale = input.new_empty(1, dtype=torch.float32)
    epiloq.quantize_fp8(input, out=(q[:m], scale))
    return q, scale


def _granularity(x: Tensor, scale: Tensor, group_shape: tuple[int, int] | None) -> tuple[str, int]:
    """Granularity of a static scale, in epiloq's terms."""
    m, k = x.shape
    if group_shape is None:
        if scale.numel() == 1:
            group_shape = (-1, -1)
        elif scale.dim() == 2 and m and k and scale.numel() and m % scale.shape[0] == 0 and k % scale.shape[1] == 0:
            group_shape = (m // scale.shape[0], k // scale.shape[1])
        else:  # of groups of which the last are short there may be several sizes
            raise ValueError(
                f"scaled_fp8_quant: group_shape: expected one with a scale of shape {list(scale.shape)} for an input "
                f"of {list(x.shape)}, got None"
            )
    high, wide = (m if group_shape[0] == -1 else group_shape[0]), (k if group_shape[1] == -1 else group_shape[1])
    if scale.numel() == 1 and high >= m and wide >= k:
        return "tensor", 1
    if high == 1:
        return ("token", 1) if wide >= k else ("group", wide)
    if high == wide:
        return "block", wide
    raise NotImplementedError(
        f"scaled_fp8_quant: group_shape: expected (-1, -1), (1, -1), (1, g) or (g, g), got {group_shape}"
    )


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise groups of `group_size` of the rows of `x` […, K] to ``(q, scale)``, scale = max(max|x|, eps) / 448.

    q is float8_e4m3fn like `x`, scale float32 […, ceil(K / group_size)]; with `column_major_scales` the strides of
    two dimensions are (1, M rounded up to 4), `tma_aligned_scales` or not. `use_ue8m0` rounds scales up to powers of
    two; None (vLLM: as configured) means False.
    """
    if dtype not in (None, torch.float8_e4m3fn):
        raise ValueError(f"per_token_group_quant_fp8: dtype: expected torch.float8_e4m3fn or None, got {dtype}")
    layout = "column" if column_major_scales else "row"
    out = None if out_q is None else (out_q, empty_scale(x, x.shape[-1], "group", group_size, layout))
    return epiloq.quantize_fp8(
        x,
        granularity="group",
        group_size=group_size,
        eps=eps,
        ue8m0=bool(use_ue8m0),
        scale_layout=layout,
        out=out,
    )


def per_token_group_quant_int8(
    x: Tensor, group_size: int, eps: float = 1e-10, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """Quantise groups of `group_size` of the rows of `x` […, K] to ``(q, scale)``, scale = max|x| / 127.

    q is int8 like `x`, scale float32 […, K / group_size]; K is a multiple of `group_size`, `x` contiguous. Groups
    below `eps` keep their own scale, so they are not rounded to zero.
    """
    operation = "per_token_group_quant_int8"
    if dtype != torch.int8:
        raise ValueError(f"{operation}: dtype: expected torch.int8, got {dtype}")
    q, scale, _ = epiloq.quantize_int8(groups_of(operation, "x", x, group_size))
    return q.view(x.shape), scale.view(*x.shape[:-1], x.shape[-1] // group_size)


def _checked_rows(operation: str, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`a` as [M, K]; the row stride is kept if the leading dimensions can be viewed as one."""
    require_half(operation, out_dtype)
    require_matrix(operation, b=b)
    if a.dim() == 0:
        raise ValueError(f"{operation}: a: expected shape […, K], got a scalar")
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
