"""Elementwise functions of int8, as lookup tables."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, mark_written
from epiloq._torch.checks import Arguments, explanation_of
from epiloq._torch.library import register_product
from epiloq.weights.tensor_checks import refuse


def lookup_int8(x: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``table[x + 128]``: any function of an int8 tensor, such as an activation between two grids, exactly.

    Args:
        x: int8, with one dimension or more. Copied unless its memory is dense, in any order of dimensions.
        table: int8 ``[256]``, the values at -128 to 127.
        out: int8 of x's shape, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        int8 of x's shape, in its memory format if that is dense.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
    """
    if direct((x, table), (out,)):
        return _run(x, table, out=out)
    return dispatched("lookup_int8", {"x": x, "table": table}, {"out": out}, (x, table))


def _run(x: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    result = torch.empty_like(x) if out is None else out
    order = sorted(range(result.ndim), key=result.stride, reverse=True)
    to, rows = result.permute(order), x.permute(order).contiguous() if x.ndim == result.ndim else x
    if x.is_cuda:
        _expect(x, table, result)
        to.copy_(table.index_select(0, rows.flatten().int() + 128).view(to.shape))
    else:
        _core.lookup_int8(to, rows, table)
    if out is not None:
        mark_written(out)
    return result


def _expect(x: Tensor, table: Tensor, out: Tensor) -> None:
    """Check the arguments on CUDA, where torch computes."""
    for name, tensor, shape in (("x", x, x.shape), ("table", table, (256,)), ("out", out, x.shape)):
        if tensor.dtype != torch.int8 or tensor.shape != shape or tensor.device != x.device:
            got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            refuse("lookup_int8", name, f"torch.int8 {list(shape)} on {x.device}", got)


@explanation_of(lookup_int8)
def explain(call: Arguments) -> str:
    _run(call.x[:0], call.table, out=None if call.out is None else call.out[:0])
    return "torch.index_select" if call.x.is_cuda else "cpu, one pass"


register_product("lookup_int8", "Tensor x, Tensor table", _run, lambda x, table: torch.empty_like(x), depth=None)
