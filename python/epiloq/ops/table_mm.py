"""Products with weights given as 4-bit indices into a table of 16 numbers: NF4 and FP4 of bitsandbytes."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import (
    DENSE_PRODUCT,
    direct,
    dispatched,
    mark_written,
    refuse_batch_invariant,
)
from epiloq._torch.checks import Arguments, expect_int32, explanation_of
from epiloq._torch.dense import multiply_by_rows, multiply_dense
from epiloq._torch.library import empty_rows, register_product
from epiloq._torch.threads import threads_for

_NAME = "table_mm"
# Weights that a CPU dequantises at once: 4 MiB of float32, which caches hold.
_AT_ONCE = 1 << 20
_OF_WORD = 8  # indices in 32 bits, of which the CPU's blocks are multiples


def table_mm(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int,
    block_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with ``W[row, column] = table[code i] * scale[i // block_size]``, ``i = row * K + column``.

    On CUDA, for at most 64 rows of a 16-bit x, if K is a multiple of block_size and block_size of 64, a kernel reads
    the codes directly: it rounds the table to x's dtype and multiplies sums of 64 by the scale in fp32. So does the CPU
    for at most 8 rows, without rounding the table, if K is a multiple of block_size and block_size of 8. Otherwise W is
    dequantised, rounded once to x's dtype, and multiplied by torch; on the CPU a few rows at a time.

    Args:
        x: ``[…, M, K]`` float16, bfloat16 or float32, contiguous rows.
        codes: uint8 ``[ceil(N K / 2)]``: code ``2 i`` in the high half of byte ``i``, code ``2 i + 1`` in the low half.
        table: float32 ``[16]``.
        scale: float32 ``[ceil(N K / block_size)]``.
        bias: ``[N]`` of x's dtype.
        out_features: N, the rows of W.
        block_size: number of consecutive weights that share a scale, counted across the rows of W.
        out: ``[…, M, N]`` of x's dtype, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]`` of x's dtype.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.
    """
    _expect_sizes(out_features, block_size)
    if direct((x, codes, table, scale), (bias, out)):
        return run(x, codes, table, scale, bias, out_features, block_size, out=out)
    tensors = {"x": x, "codes": codes, "table": table, "scale": scale}
    arguments = (x, codes, table, scale, bias, out_features, block_size)
    return dispatched(_NAME, tensors, {"bias": bias, "out": out}, arguments)


def _expect_sizes(out_features: int, block_size: int) -> None:
    expect_int32(_NAME, out_features=out_features, block_size=block_size)
    if out_features < 0:
        raise ValueError(f"epiloq.{_NAME}: out_features: expected at least 0, got {out_features}")


def run(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    n: int,
    block_size: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`table_mm` for plain tensors."""
    refuse_batch_invariant(f"epiloq.{_NAME}", DENSE_PRODUCT)
    result = empty_rows(_NAME, x, n) if out is None or x.ndim == 0 else out  # which refuses a scalar
    k = x.shape[-1]
    weight = (codes, table, scale)
    if not _core.table_mm(result, x, *weight, bias, n, k, block_size, threads_for(x)):
        if x.is_cuda:
            _dense_product(result, x, weight, bias, n, block_size)
        else:
            multiply_by_rows(result, x, bias, _AT_ONCE, lambda rows: _rows(*weight, k, block_size, rows, x.dtype))
    if out is not None:
        mark_written(out)
    return result


_Weight = tuple[Tensor, Tensor, Tensor]


def dequantized(
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    k: int,
    block_size: int,
    rows: slice,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Some rows of the weight, ``[rows.stop - rows.start, k]``: products in float32, rounded once to ``dtype``."""
    begin, end = rows.start * k, rows.stop * k
    if torch.compiler.is_compiling():
        # inductor (torch 2.13) reads out of bounds in a slice of odd length of the stacked tensor below.
        place = torch.arange(begin, end, device=codes.device)
        byte = codes[place // 2].int()
        values = table[torch.where(place % 2 == 0, byte >> 4, byte & 15)]
    else:
        # A byte's two values at once, as one element of 8 bytes: ten times as fast as one by one.
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1).view(torch.int64).flatten()
        values = pairs.index_select(0, codes[begin // 2 : -(-end // 2)].int()).view(torch.float32)
        values = values[begin % 2 :][: end - begin]
    of_blocks = scale[begin // block_size : -(-end // block_size)]
    if begin % block_size == 0 and end % block_size == 0:
        values = values.view(-1, block_size) * of_blocks[:, None]
    else:
        values = values * of_blocks.repeat_interleave(block_size)[begin % block_size :][: end - begin]
    return values.view(rows.stop - rows.start, k).to(dtype)


def _rows(
    codes: Tensor, table: Tensor, scale: Tensor, k: int, block_size: int, rows: slice, dtype: torch.dtype
) -> Tensor:
    """`dequantized` outside graphs."""
    if k == 0 or k % block_size or block_size % _OF_WORD:
        return dequantized(codes, table, scale, k, block_size, rows, dtype)
    begin, end = rows.start * k, rows.stop * k
    part = torch.empty(rows.stop - rows.start, k, dtype=dtype)
    of_rows = (codes[begin // 2 : end // 2], table, scale[begin // block_size : end // block_size])
    _core.dequantize_table(part, *of_rows, len(part), k, block_size, threads_for(part))
    return part


def _dense_product(out: Tensor, x: Tensor, weight: _Weight, bias: Tensor | None, n: int, block_size: int) -> None:
    """Multiply on CUDA without the decode kernel, with W dequantised to memory in x's dtype."""
    k = x.shape[-1]
    dense = x.new_empty((n, k))
    _core.dequantize_table(dense, *weight, n, k, block_size)
    multiply_dense(out, x, dense, bias)


@explanation_of(table_mm)
def explain(call: Arguments) -> str:
    x, n, block_size = call.x, call.out_features, call.block_size
    _expect_sizes(n, block_size)
    refuse_batch_invariant(f"epiloq.{_NAME}", DENSE_PRODUCT)
    result = empty_rows(_NAME, x, n) if call.out is None else call.out
    operands = call.codes, call.table, call.scale, call.bias
    return _core.explain_table_mm(result, x, *operands, n, x.shape[-1], block_size)


def _fake(
    x: Tensor, codes: Tensor, table: Tensor, scale: Tensor, bias: Tensor | None, n: int, block_size: int
) -> Tensor:
    return empty_rows(_NAME, x, n)


register_product(
    _NAME, "Tensor x, Tensor codes, Tensor table, Tensor scale, Tensor? bias, int n, int block_size", run, _fake
)
