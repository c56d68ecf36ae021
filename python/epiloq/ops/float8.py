"""float8 on the CPU, which has no arithmetic for it: values in float32, and products that widen weights as they go."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._library import without_autocast

# Rows that take the kernel which widens weights in registers; more of them repay a weight in memory.
_FEW = 8
# Elements of a weight that are in memory as float32 at a time: 16 MB.
_AT_ONCE = 1 << 22


def to_float32(x: Tensor, scale: Tensor | None = None, scale_rows: int = 1, scale_columns: int = 128) -> Tensor:
    """The exact values of a float8 matrix, columns staying dense where they are; or ``[R, C]`` times its blocks'
    ``scale [ceil(R / scale_rows), ceil(C / scale_columns)]``, rounded once."""
    if x.stride(1) != 1 and x.stride(0) == 1 and scale is None:
        return to_float32(x.t()).t()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        rows = x if x.stride(1) == 1 else x.contiguous()
        _core.widen_float8(out, rows, scale, scale_rows, scale_columns, torch.get_num_threads())
    return out


def product(x: Tensor, weight: Tensor, scale: Tensor | None = None, scale_rows: int = 1) -> Tensor:
    """float32 ``[M, K]`` times float8 ``weight [N, K]`` transposed, each block of `scale_rows` rows and 128 columns of
    the weight times its ``scale [ceil(N / scale_rows), ceil(K / 128)]``, if there are scales: float32 ``[M, N]``."""
    n, k = weight.shape
    out = x.new_empty((x.shape[0], n))
    if k == 0 or out.numel() == 0:
        return out.zero_()
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
