"""float8 on the CPU, which has no arithmetic for it: values in float32, and products that widen weights as they go, or
both operands to bfloat16 where that is multiplied."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epiloq import _core
from epiloq._library import without_autocast

# Rows that take the kernel which widens weights in registers; more of them repay a weight in memory.
_FEW = 8
# Elements of a weight that are in memory as float32 at a time: 16 MB.
_AT_ONCE = 1 << 22


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def to_float32(x: Tensor, scale: Tensor | None = None, scale_rows: int = 1, scale_columns: int = 128) -> Tensor:
    """The exact values of a float8 matrix, columns staying dense where they are; or ``[R, C]`` times its blocks'
    ``scale [ceil(R / scale_rows), ceil(C / scale_columns)]``, rounded once."""
    if x.stride(1) != 1 and x.stride(0) == 1 and scale is None:
        return to_float32(x.t()).t()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        _core.widen_float8(out, _in_rows(x), scale, scale_rows, scale_columns, torch.get_num_threads())
    return out


class Scales(NamedTuple):
    """Of float8 ``[R, K]``: one for each `rows` rows and 128 columns, ``[ceil(R / rows), ceil(K / 128)]``."""

    values: Tensor
    rows: int


def products_in_words(rows: int) -> str:
    """Which of its products `product` takes for so many rows."""
    if rows <= _FEW:
        return "float8 widened to float32 in registers"
    if _core.multiplies_float8():
        return "float8 as pairs of bfloat16, AVX-512 BF16 or AMX"
    return "float32 products, float8 widened on the way"


def product(x: Tensor, weight: Tensor, scales_x: Scales | None = None, scales: Scales | None = None) -> Tensor:
    """float8 ``x [M, K]`` times float8 ``weight [N, K]`` transposed, each with the scales of its blocks, if there are
    any: float32 ``[M, N]``."""
    n, k = weight.shape
    out = torch.empty((x.shape[0], n), dtype=torch.float32, device=x.device)
    if k == 0 or out.numel() == 0:
        return out.zero_()
    scale_x, scale_rows_x = scales_x or (None, 1)
    scale, scale_rows = scales or (None, 1)
    if x.shape[0] > _FEW and _core.multiplies_float8():
        operands = (_in_rows(x), scale_x, scale_rows_x, _in_rows(weight), scale, scale_rows)
        _core.multiply_float8_by_float8(out, *operands, torch.get_num_threads())
        return out
    x = to_float32(x, scale_x, scale_rows_x)
    if x.shape[0] <= _FEW:
        _core.multiply_float8(out, x, weight, scale, scale_rows, 128, torch.get_num_threads())
        return out
    rows = max(1, _AT_ONCE // (k * scale_rows)) * scale_rows
    with without_autocast("cpu"):
        for first in range(0, n, rows):
            part = slice(first, first + rows)
            blocks = None if scale is None else scale[first // scale_rows : -(-(first + rows) // scale_rows)]
            torch.mm(x, to_float32(weight[part], blocks, scale_rows).t(), out=out[:, part])
    return out
