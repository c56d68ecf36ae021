"""Products with a weight that is dequantised into memory, whole or some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from epiloq._torch.calls import without_autocast


def row_chunks(n: int, k: int, at_once: int) -> Iterator[slice]:
    """Yield ranges of rows with about `at_once` numbers, at least one row each."""
    step = max(1, at_once // max(k, 1))
    return (slice(first, min(first + step, n)) for first in range(0, n, step))


def multiply_dense(out: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
    """Write ``x @ dense.T + bias`` of x ``[…, M, K]`` and dense ``[N, K]`` to ``out`` ``[…, M, N]``, all of one type,
    whatever autocast says; the result as a matrix, a view of `out`."""
    n, k = dense.shape
    m = out.numel() // n
    rows, product = x.reshape(m, k), out.view(m, n)
    with without_autocast(x.device.type):
        if bias is None:
            return torch.mm(rows, dense.t(), out=product)
        return torch.addmm(bias.view(n), rows, dense.t(), out=product)
