"""`w4a8_mm` at large M on a GPU: the weight unpacked to 8 bits, for `scaled_mm` or `groupwise_mm`.

Unpacking reads 0.5 and writes 1 byte per weight, which is negligible for many tokens, and the product then runs at the
tensor cores' 8-bit rate; few tokens are faster with the packed weight. Integers keep their scales per row or per group
of 128 columns. MXFP4 becomes float8 rows with a scale each: E4M3's exponents hold its scales, powers of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epiloq._torch.devices import runs_kernels_of
from epiloq.ops.checks.w4a8_mm import GROUP
from epiloq.ops.groupwise_mm import groupwise_mm
from epiloq.ops.scaled_mm import scaled_mm
from epiloq.weights.packed_fp4_weight import PackedFp4Weight
from epiloq.weights.packed_layout import parameters_by_group
from epiloq.weights.packed_weight import PackedWeight

# Tokens from which a product of 8 bits gains more than unpacking costs, on an H200; on other GPUs it was not measured.
MANY_TOKENS = 384
MANY_TOKENS_ELSEWHERE = 2048
# For FP4: the alternative multiplies in bfloat16, at half the rate.
MANY_FP4_TOKENS = 257
ALIGNED = 16  # elements: rows that TMA reads
_FLOAT8_ARCHS = ("sm89", "sm90")
_MEASURED_ARCHS = ("sm90",)


def fits(x_q: Tensor, weight: PackedWeight | PackedFp4Weight) -> bool:
    """Whether this path computes the product of ``x_q`` ``[M, K]``."""
    if not x_q.is_cuda:
        return False

    def multiplies_float8(archs: tuple[str, ...]) -> bool:
        return runs_kernels_of(x_q.device, *archs)

    if isinstance(weight, PackedFp4Weight):
        fits_float8 = weight.format == "mxfp4" and x_q.dtype == torch.float8_e4m3fn and weight.k % ALIGNED == 0
        return fits_float8 and len(x_q) >= MANY_FP4_TOKENS and multiplies_float8(_FLOAT8_ARCHS)
    return fits_sizes(len(x_q), weight.k, weight.group_size, x_q.dtype, multiplies_float8)


def fits_sizes(
    m: int, k: int, group_size: int, dtype: torch.dtype, multiplies_float8: Callable[[tuple[str, ...]], bool]
) -> bool:
    """`fits` for integers ``[N, K]``, given whether the GPU multiplies float8 by a kernel of some architectures."""
    if k % ALIGNED != 0 or m < MANY_TOKENS:
        return False
    was_measured = multiplies_float8(_MEASURED_ARCHS)
    if has_whole_rows(group_size, k):
        multiplies = dtype == torch.int8 or multiplies_float8(_FLOAT8_ARCHS)
        return multiplies and (was_measured or m >= MANY_TOKENS_ELSEWHERE)
    return keeps_groups(group_size) and dtype != torch.int8 and was_measured


def explanation(numbers: str) -> str:
    """What `explain` says of a weight of such numbers."""
    return f"the weight's {numbers} unpacked to 8 bits, then a product of 8-bit operands"


def has_whole_rows(group_size: int, k: int) -> bool:
    """Whether a row has one scale."""
    return group_size == -1 or group_size >= k


def keeps_groups(group_size: int) -> bool:
    """Whether `groupwise_mm` multiplies an unpacked weight in groups of so many columns."""
    return group_size > 0 and group_size % GROUP == 0


def multiply(
    out: Tensor, x_q: Tensor, weight: PackedWeight | PackedFp4Weight, scale_a: Tensor, bias: Tensor | None
) -> None:
    """``out`` ``[M, N]``, 16-bit, from ``x_q`` ``[M, K]`` and ``scale_a`` ``[M, 1]``."""
    x_q = x_q if x_q.data_ptr() % ALIGNED == 0 and x_q.stride(0) % ALIGNED == 0 else x_q.clone()
    rows, scale = _unpacked(weight, x_q.dtype)
    if scale.shape[1] == 1:
        scaled_mm(x_q, rows.t(), scale_a.contiguous(), scale, bias, out=out)
    else:
        by_group = scale_a.expand(-1, scale.shape[1])  # for kernels that apply a token's scale at the end
        groupwise_mm(x_q, rows.t(), by_group, scale.t(), bias, recipe=(1, 1, GROUP), out=out)


def _unpacked(weight: PackedWeight | PackedFp4Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers ``[N, K]`` of an 8-bit type, and float32 scales ``[N, 1]`` or, by columns, ``[N, ceil(K / 128)]``."""
    if isinstance(weight, PackedFp4Weight):
        return weight.float8_rows()
    groups = 1 if weight.group_size == -1 else -(-weight.k // weight.group_size)
    scale = parameters_by_group(weight.scale[:, :groups], torch.float32)  # without those of padded columns
    if groups > 1 and weight.group_size > GROUP:
        scale = scale.repeat_interleave(weight.group_size // GROUP, 0)[: -(-weight.k // GROUP)]
    return weight.integers(dtype), scale[:, : weight.n].t()
