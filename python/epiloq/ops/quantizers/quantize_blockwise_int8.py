"""int8 quantisation in blocks along the last dimension, with one scale and offset per block."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, expect_flags, expect_positive, explanation_of
from epiloq._torch.library import fake_out, register
from epiloq.weights.tensor_checks import refuse

_NAME = "quantize_blockwise_int8"
Quantised: TypeAlias = tuple[Tensor, Tensor, "Tensor | None", Tensor]


def quantize_blockwise_int8(
    x: Tensor, group_size: int, *, symmetric: bool = False, out: Quantised | None = None
) -> Quantised:
    """``x ≈ scale * q + offset`` in blocks of ``group_size`` along K; the same bits on CPU and GPU.

    A block with values in [lo, hi] has ``scale = (hi - lo) / 255`` and ``offset = hi - 127 scale``, and

        ``q = clamp(round((x - offset) / scale), -128, 127)``,

    with one float32 rounding per operation, a true division, ties to even. With ``symmetric`` there is no offset, and
    ``scale = amax / 127``. A constant block (symmetric: zeros) has scale 1 and ``offset = hi``, and is restored
    exactly. The scale is at least 2^-126. A block with NaN or an infinity, or with a range beyond float32, has NaN
    parameters and ``q = 0``, so that everything computed from it is NaN.

    Args:
        x: ``[…, K]`` float32, float16 or bfloat16, contiguous rows.
        group_size: values per block; the last block of a row may be shorter.
        symmetric: no offset, for weights around 0.
        out: ``(q, scale, offset, sum)`` to write into and return; offset None when symmetric.

    Returns:
        ``q`` int8 ``[…, K]``; with G = ceil(K / group_size): ``scale`` and ``offset`` float32 ``[…, G]`` (offset
        None when symmetric) and ``sum`` int32 ``[…, G]``, the sum of each block's ``q``.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass through a scale or an offset, which have no derivative.
    """
    expect_positive(_NAME, group_size=group_size)
    expect_flags(_NAME, symmetric=symmetric)
    if out is None:
        if direct((x,)):
            if not symmetric:
                return _quantise(x, group_size)
            q, scale, total = _quantise_symmetric(x, group_size)
            return q, scale, None, total
        expect_tensors(_NAME, {"x": x}, {}, writes=False)
        if symmetric:
            q, scale, total = torch.ops.epiloq.quantize_blockwise_int8_symmetric(x, group_size)
            return q, refuse_backward(_NAME, scale), None, total
        q, scale, offset, total = torch.ops.epiloq.quantize_blockwise_int8(x, group_size)
        scale, offset = (refuse_backward(_NAME, part) for part in (scale, offset))
        return q, scale, offset, total
    q, scale, maybe_offset, total = _expect_out(out, symmetric)
    if direct((x, q, scale, total), (maybe_offset,)):
        _quantise_out(x, group_size, q, scale, maybe_offset, total)
    else:
        required = {"x": x, "out": q, "scale": scale, "sum": total}
        expect_tensors(_NAME, required, {"offset": maybe_offset}, writes=True)
        torch.ops.epiloq.quantize_blockwise_int8_out(x, group_size, q, scale, maybe_offset, total)
    return out


def _expect_out(out: Quantised, symmetric: bool) -> Quantised:
    if len(out) != 4:
        refuse(_NAME, "out", "(q, scale, offset, sum)", f"{len(out)} elements")
    if (out[2] is None) != symmetric:
        wanted, got = ("None", "a tensor") if symmetric else ("a tensor", "None")
        refuse(_NAME, "offset", f"{wanted} with symmetric={symmetric}", got)
    return out


def _empty(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, a float parameter and the sums."""
    if x.ndim == 0:
        refuse(_NAME, "x", "at least one dimension", "a scalar")
    expect_positive(_NAME, group_size=group_size)
    parameters = (*x.shape[:-1], (x.shape[-1] + group_size - 1) // group_size)
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(parameters, dtype=torch.float32),
        x.new_empty(parameters, dtype=torch.int32),
    )


def _quantise(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, scale, total = _empty(x, group_size)
    offset = torch.empty_like(scale)
    _core.quantize_blockwise_int8(q, x, scale, offset, total, group_size)
    return q, scale, offset, total


def _quantise_symmetric(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, total = _empty(x, group_size)
    _core.quantize_blockwise_int8(q, x, scale, None, total, group_size)
    return q, scale, total


def _quantise_out(x: Tensor, group_size: int, q: Tensor, scale: Tensor, offset: Tensor | None, total: Tensor) -> None:
    _core.quantize_blockwise_int8(q, x, scale, offset, total, group_size)
    mark_written(q, scale, offset, total)


@explanation_of(quantize_blockwise_int8)
def explain(call: Arguments) -> str:
    x, group_size, out = call.x, call.group_size, call.out
    expect_tensors(_NAME, {"x": x}, {}, writes=False)
    if out is None:
        q, scale, total = _empty(x, group_size)
        out = q, scale, None if call.symmetric else torch.empty_like(scale), total
    q, scale, offset, total = _expect_out(out, call.symmetric)
    _core.check_quantize_blockwise_int8(q, x, scale, offset, total, group_size)
    if not x.is_cuda:
        return "cpu, vectorised blocks"
    size, stride = x.element_size(), x.stride(-2) if x.ndim > 1 else 0
    whole = x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0 and stride * size % 16 == 0 and q.data_ptr() % 8 == 0
    return f"cuda, {_lanes(group_size, whole)} threads a block of {group_size}"


def _lanes(group_size: int, whole: bool) -> int:
    """Threads that share a block in the kernel: few for the usual sizes, where rows are whole vectors of eight values;
    16 values each where that divides a warp (or 32 of many), else a warp."""
    if whole and group_size in (64, 128):
        return 4
    lanes, rest = divmod(group_size, 16)
    return lanes if rest == 0 and lanes in (1, 2, 4, 8, 16, 32) else 32


def _fake(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, scale, total = _empty(x, group_size)
    return q, scale, torch.empty_like(scale), total


for _schema, _function, _shapes in (
    ("(Tensor x, int group_size) -> (Tensor, Tensor, Tensor, Tensor)", _quantise, _fake),
    ("_symmetric(Tensor x, int group_size) -> (Tensor, Tensor, Tensor)", _quantise_symmetric, _empty),
    (
        "_out(Tensor x, int group_size, Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? offset, Tensor(d!) sum) -> ()",
        _quantise_out,
        fake_out,
    ),
):
    register(_NAME, f"{_NAME}{_schema}", _function, _shapes)
