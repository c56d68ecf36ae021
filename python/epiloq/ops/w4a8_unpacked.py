"""`w4a8_mm` for many tokens on a GPU: the weight's integers in 8 bits, and a product of 8-bit operands.

Unpacking reads 0.5 and writes 1 byte a weight, which a product of many tokens hides; it then runs at the tensor cores'
8-bit rate, with group scales in its promotion. Few tokens read the packed weight itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq.ops.groupwise_mm import groupwise_mm
from epiloq.ops.scaled_mm import scaled_mm
from epiloq.weights.packed_layout import parameters_of
from epiloq.weights.packed_weight import PackedWeight

# Tokens from which unpacking pays, on an H100: a 4096 x 14336 weight takes 40 us to unpack.
MANY_TOKENS = 384
_GROUP = 128  # of `groupwise_mm`
_ALIGNED = 16  # elements: rows that TMA reads
_FLOAT8_ARCHS = ("sm89", "sm90")


def fits(x_q: Tensor, weight: PackedWeight) -> bool:
    """Whether a product of ``x_q`` ``[M, K]`` goes this way."""
    if not x_q.is_cuda or len(x_q) < MANY_TOKENS or weight.k % _ALIGNED != 0:
        return False
    whole_rows = weight.group_size == -1 or weight.group_size >= weight.k
    if x_q.dtype == torch.int8:
        return whole_rows
    return (whole_rows or weight.group_size == _GROUP) and _multiplies_float8(x_q.device)


def _multiplies_float8(device: torch.device) -> bool:
    forced = _core.forced_arch()
    archs = [arch for arch in _FLOAT8_ARCHS if arch in _core.built_archs() and forced in ("auto", arch)]
    capability = _core.device_properties(device.index or 0)["compute_capability"]
    return any(capability >= int(arch.removeprefix("sm")) for arch in archs)


def multiply(out: Tensor, x_q: Tensor, weight: PackedWeight, scale_a: Tensor, bias: Tensor | None) -> None:
    """``out`` ``[M, N]``, 16-bit, from ``x_q`` ``[M, K]`` and ``scale_a`` ``[M, 1]``."""
    x_q = x_q if x_q.data_ptr() % _ALIGNED == 0 and x_q.stride(0) % _ALIGNED == 0 else x_q.clone()
    b = weight.integers(x_q.dtype).t()
    scale = parameters_of(weight.scale)[: weight.n].float()
    if weight.group_size == _GROUP and weight.k > _GROUP:
        groups = -(-weight.k // _GROUP)
        rows = scale_a.expand(-1, groups)
        groupwise_mm(x_q, b, rows, scale[:, :groups].t(), bias, recipe=(1, 1, _GROUP), out=out)
    else:
        scaled_mm(x_q, b, scale_a.contiguous(), scale[:, :1].contiguous(), bias, out=out)
