"""int8 and FP8 functions of ``sgl_kernel``, with the same signatures and semantics: only the import needs to change.

Any K and N are supported (sgl_kernel requires multiples of 16 and 8), quantisers divide and round half to even, a
zero group has the scale ``max(eps, 448 * 2^-126) / 448``, and invalid arguments raise ValueError instead of
RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.compat._checks import FP8, INT8, groups_of, require_dtype, require_half, require_matrix, rows_apart, vector

__all__ = [
    "fp8_blockwise_scaled_mm",
    "fp8_scaled_mm",
    "int8_scaled_mm",
    "sgl_per_token_group_quant_8bit",
    "sgl_per_token_quant_fp8",
]

_LIMITS = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-448.0, 448.0)}


def int8_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``D[m, n] = scales_a[m] * scales_b[n] * (mat_a @ mat_b)[m, n] + bias[n]``.

    `mat_a` int8 [M, K] row-major, `mat_b` int8 [K, N] column-major, `scales_a` float32 of exactly M elements and
    `scales_b` of exactly N, `out_dtype` bfloat16 or float16, `bias` of N elements of `out_dtype`; anything else
    raises ValueError.
    """
    return _scaled_mm("int8_scaled_mm", INT8, mat_a, mat_b, scales_a, scales_b, out_dtype, bias)


def fp8_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """`int8_scaled_mm` for float8_e4m3fn."""
    return _scaled_mm("fp8_scaled_mm", FP8, mat_a, mat_b, scales_a, scales_b, out_dtype, bias)


def _scaled_mm(
    operation: str,
    dtypes: tuple[torch.dtype, ...],
    mat_a: Tensor,
    mat_b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    require_dtype(operation, dtypes, mat_a=mat_a, mat_b=mat_b)
    require_half(operation, out_dtype)
    require_matrix(operation, mat_a=mat_a, mat_b=mat_b)
    scales_a = vector(operation, "scales_a", scales_a, mat_a.shape[0])
    scales_b = vector(operation, "scales_b", scales_b, mat_b.shape[1])
    if bias is not None:
        bias = vector(operation, "bias", bias, mat_b.shape[1])
    return epiloq.scaled_mm(mat_a, mat_b, scales_a, scales_b, bias, out_dtype=out_dtype)


def fp8_blockwise_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``mat_a @ mat_b``, each 128 of K scaled by ``scales_a[m, k / 128] * scales_b[k / 128, n / 128]``.

    `mat_a` float8_e4m3fn [M, K] row-major, `mat_b` [K, N] column-major, `scales_a` float32 [M, ceil(K / 128)] and
    `scales_b` [ceil(K / 128), ceil(N / 128)] in any layout (sgl_kernel requires M-major and K-major ones),
    `out_dtype` bfloat16 or float16.
    """
    operation = "fp8_blockwise_scaled_mm"
    require_dtype(operation, FP8, mat_a=mat_a, mat_b=mat_b)
    require_half(operation, out_dtype)
    require_matrix(operation, mat_a=mat_a, mat_b=mat_b, scales_a=scales_a, scales_b=scales_b)
    return epiloq.groupwise_mm(mat_a, mat_b, scales_a, scales_b, out_dtype=out_dtype)


def sgl_per_token_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor) -> None:
    """Quantise the rows of `input` [M, K] into `output_q` float8_e4m3fn, `output_s` float32 [M, 1] = max|x| / 448."""
    operation = "sgl_per_token_quant_fp8"
    require_dtype(operation, FP8, output_q=output_q)
    rows = rows_apart(operation, "input", input)
    epiloq.quantize_fp8(rows, granularity="token", out=(output_q, output_s))


def sgl_per_token_group_quant_8bit(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: Tensor | None = None,
    enable_v2: bool | None = None,
) -> None:
    """Quantise groups of `group_size` of the rows of `input` […, K] into `output_q`, int8 or float8_e4m3fn.

    `output_s` float32 […, K / group_size], in any layout, is written with max(max|x|, eps) / `fp8_max`, rounded up to
    powers of two where `scale_ue8m0`. `fp8_min` and `fp8_max` are the type's own limits. With `fuse_silu_and_mul`,
    `input` is […, 2 K] and ``silu(input[…, :K]) * input[…, K:]`` is quantised, ignoring `eps`. int8 groups below
    `eps` keep their own scale. `enable_v2` selects one of sgl_kernel's kernels and is ignored.

    Raises NotImplementedError for `masked_m`, for int8 with `scale_ue8m0` or `fuse_silu_and_mul`, and for scales that
    are packed into integers.
    """
    operation = "sgl_per_token_group_quant_8bit"
    require_dtype(operation, tuple(_LIMITS), output_q=output_q)
    if (fp8_min, fp8_max) != _LIMITS[output_q.dtype]:
        raise ValueError(
            f"{operation}: fp8_min, fp8_max: expected {_LIMITS[output_q.dtype]} of {output_q.dtype}, "
            f"got {(fp8_min, fp8_max)}"
        )
    of_int8 = output_q.dtype == torch.int8
    unsupported = {
        "masked_m": masked_m is not None,
        "scale_ue8m0 of int8": of_int8 and scale_ue8m0,
        "fuse_silu_and_mul of int8": of_int8 and fuse_silu_and_mul,
        "packed output_s": not output_s.is_floating_point(),
    }
    for what in (name for name, asked in unsupported.items() if asked):
        raise NotImplementedError(f"{operation}: {what}: expected none; it is not implemented")
    out = (output_q, output_s)
    if of_int8:
        _quantize_int8_groups(operation, input, output_q, output_s, group_size)
    elif fuse_silu_and_mul:
        epiloq.silu_and_mul_quant(
            input, dtype=output_q.dtype, granularity="group", group_size=group_size, ue8m0=scale_ue8m0, out=out
        )
    else:
        epiloq.quantize_fp8(input, granularity="group", group_size=group_size, eps=eps, ue8m0=scale_ue8m0, out=out)


def _quantize_int8_groups(operation: str, x: Tensor, q: Tensor, scale: Tensor, group_size: int) -> None:
    groups = groups_of(operation, "input", x, group_size)
    if q.shape != x.shape:
        raise ValueError(f"{operation}: output_q: expected {list(x.shape)} like input, got {list(q.shape)}")
    wanted = [*x.shape[:-1], x.shape[-1] // group_size]
    if scale.dtype != torch.float32 or list(scale.shape) != wanted:
        raise ValueError(
            f"{operation}: output_s: expected torch.float32 {wanted}, got {scale.dtype} {list(scale.shape)}"
        )
    rows = groups_of(operation, "output_q", q, group_size)
    measured = groups.new_empty((groups.shape[0], 1), dtype=torch.float32)
    epiloq.quantize_int8(groups, out=(rows, measured, None))
    scale.copy_(measured.view(*x.shape[:-1], x.shape[-1] // group_size))
