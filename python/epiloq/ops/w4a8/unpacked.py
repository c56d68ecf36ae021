"""`w4a8_mm` at large M on a GPU: the weight unpacked to 8 bits with a scale per row, for `scaled_mm`.

Unpacking reads 0.5 and writes 1 byte per weight, which is negligible for many tokens, and the product then runs at the
tensor cores' 8-bit rate. Integers in scale groups, and few tokens, are faster with the packed weight. MXFP4 becomes
float8 rows: its scales are powers of two, which the exponents of E4M3 hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq.ops.scaled_mm import scaled_mm
from epiloq.weights.packed_fp4_weight import PackedFp4Weight
from epiloq.weights.packed_layout import parameters_of
from epiloq.weights.packed_weight import PackedWeight

# Tokens from which a product of 8 bits gains more than unpacking costs.
MANY_TOKENS = 2048
# For FP4: the alternative multiplies in bfloat16, at half the rate.
MANY_FP4_TOKENS = 257
_ALIGNED = 16  # elements: rows that TMA reads
_FLOAT8_ARCHS = ("sm89", "sm90")


def fits(x_q: Tensor, weight: PackedWeight | PackedFp4Weight) -> bool:
    """Whether this path computes the product of ``x_q`` ``[M, K]``."""
    if not x_q.is_cuda or weight.k % _ALIGNED != 0:
        return False
    if isinstance(weight, PackedFp4Weight):
        fits_float8 = weight.format == "mxfp4" and x_q.dtype == torch.float8_e4m3fn
        return fits_float8 and len(x_q) >= MANY_FP4_TOKENS and _multiplies_float8(x_q.device)
    if len(x_q) < MANY_TOKENS:
        return False
    if weight.group_size != -1 and weight.group_size < weight.k:
        return False
    return x_q.dtype == torch.int8 or _multiplies_float8(x_q.device)


def _multiplies_float8(device: torch.device) -> bool:
    forced = _core.forced_arch()
    archs = [arch for arch in _FLOAT8_ARCHS if arch in _core.built_archs() and forced in ("auto", arch)]
    capability = _core.device_properties(device.index or 0)["compute_capability"]
    return any(capability >= int(arch.removeprefix("sm")) for arch in archs)


def multiply(
    out: Tensor, x_q: Tensor, weight: PackedWeight | PackedFp4Weight, scale_a: Tensor, bias: Tensor | None
) -> None:
    """``out`` ``[M, N]``, 16-bit, from ``x_q`` ``[M, K]`` and ``scale_a`` ``[M, 1]``."""
    x_q = x_q if x_q.data_ptr() % _ALIGNED == 0 and x_q.stride(0) % _ALIGNED == 0 else x_q.clone()
    rows, scale = _unpacked(weight, x_q.dtype)
    scaled_mm(x_q, rows.t(), scale_a.contiguous(), scale, bias, out=out)


def _unpacked(weight: PackedWeight | PackedFp4Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers ``[N, K]`` of an 8-bit type, and float32 scales ``[N, 1]``."""
    if isinstance(weight, PackedFp4Weight):
        return weight.float8_rows()
    return weight.integers(dtype), parameters_of(weight.scale)[: weight.n, :1].float().contiguous()
