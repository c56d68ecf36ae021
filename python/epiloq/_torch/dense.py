"""Products with a weight that is dequantised into memory, whole or some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from epiloq._torch.calls import without_autocast


def row_chunks(n: int, k: int, at_once: int) -> Iterator[slice]:
    """Yield ranges of rows with about `at_once` numbers, at least one row each."""
    step = max(1, at_once // max(k, 1))
    return (slice(first, min(first + step, n)) for first in range(0, n, step))


def multiply_by_rows(
    out: Tensor, x: Tensor, bias: Tensor | None, at_once: int, rows_of: Callable[[slice], Tensor]
) -> None:
    """Write ``x @ W.T + bias`` to ``out`` ``[…, N]``, whatever autocast says, with about `at_once` numbers of W at a
    time, which `rows_of` returns in x's type."""
    with without_autocast(x.device.type):
        for rows in row_chunks(out.shape[-1], x.shape[-1], at_once):
            out[..., rows] = nn.functional.linear(x, rows_of(rows), None if bias is None else bias[rows])


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
