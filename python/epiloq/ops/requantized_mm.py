"""Products of int8 matrices whose output is requantised to int8 or dequantised: 1 x 1 convolutions of rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epiloq._torch.calls import expect_tensors
from epiloq._torch.checks import Arguments, bound_arguments
from epiloq.ops.convolutions.conv2d import geometry
from epiloq.ops.convolutions.conv2d_int8 import explain_checked, prepared, run_checked
from epiloq.weights.prepared_int8_weight import PreparedInt8Weight
from epiloq.weights.tensor_checks import refuse

_NAME = "requantized_mm"
_ONE_BY_ONE = (1, 0, 1, 1)  # stride, padding, dilation, groups


def requantized_mm(
    x_q: Tensor,
    weight: Tensor | PreparedInt8Weight,
    bias: Tensor | None = None,
    *,
    input_scale: float | None = None,
    input_zero: int | None = None,
    weight_scale: Tensor | None = None,
    output_scale: float | None = None,
    output_zero: int | None = None,
    clamp: tuple[float, float] | None = None,
    out_dtype: torch.dtype = torch.int8,
    out: Tensor | None = None,
) -> Tensor:
    """`conv2d_int8` with a 1 x 1 kernel: ``x_q`` int8 ``[…, K]``, ``weight`` int8 ``[N, K]``, result ``[…, N]``.

    Otherwise identical. A `PreparedInt8Weight` has the shape ``[N, K]`` or ``[N, 1, 1, K]``. The rows of ``out`` may be
    further apart than ``N``.
    """
    expect_tensors(_NAME, {"x_q": x_q}, {"out": out}, writes=out is not None)
    scales = (input_scale, input_zero), (output_scale, output_zero)
    w = prepared(_NAME, _as_kernel(weight), bias, weight_scale, *scales)
    n, kh, kw, k = w.q.shape
    if (kh, kw) != (1, 1):
        refuse(_NAME, "weight", "a 1 x 1 kernel", f"{kh} x {kw}")
    if x_q.ndim < 1 or x_q.shape[-1] != k:
        refuse(_NAME, "x_q", f"[…, {k}]", list(x_q.shape))
    if x_q.dtype != torch.int8:
        refuse(_NAME, "x_q", "int8", f"{str(x_q.dtype).removeprefix('torch.')} {list(x_q.shape)}")
    tokens = x_q.reshape(1, math.prod(x_q.shape[:-1]), 1, k)
    written = None if out is None else _pixels_of_rows(out, (*x_q.shape[:-1], n))
    is_empty = tokens.shape[1] == 0  # convolutions do not support it: one token instead, for their checks
    if is_empty:
        tokens, written = x_q.new_zeros((1, 1, 1, k)), None
        out_dtype = out_dtype if out is None else out.dtype
    where = geometry(_NAME, (1, 1), *_ONE_BY_ONE)
    try:
        y = run_checked(_NAME, tokens.permute(0, 3, 1, 2), w, clamp, where, out_dtype, written)
    except ValueError as error:  # of an output's memory, by the name of the operation that is called
        raise ValueError(str(error).replace("epiloq.conv2d_int8: ", f"epiloq.{_NAME}: ", 1)) from None
    if out is not None:
        return out
    rows = y.permute(0, 2, 3, 1)
    return (rows[:, :0] if is_empty else rows).view(*x_q.shape[:-1], n)


def _pixels_of_rows(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An output ``[…, N]`` as an image of one column, ``[1, N, tokens, 1]``. Raises ValueError for another shape, or
    for memory that is not rows at one distance."""
    if out.shape != torch.Size(shape):
        refuse(_NAME, "out", list(shape), list(out.shape))
    if shape[-1] > 1 and out.stride(-1) != 1:
        got = f"{list(shape)} with strides {list(out.stride())}; take .contiguous()"
        refuse(_NAME, "out", "rows with stride 1", got)
    try:
        rows = out.view(math.prod(shape[:-1]), shape[-1])
    except RuntimeError:
        got = f"strides {list(out.stride())}; take .contiguous()"
        raise ValueError(
            f"epiloq.{_NAME}: out: expected leading dimensions that collapse into one, got {got}"
        ) from None
    return rows[None, :, None].permute(0, 3, 1, 2)


def _as_kernel(weight: Tensor | PreparedInt8Weight) -> Tensor | PreparedInt8Weight:
    """The weight as a convolution's: a plain one is ``[N, K]``."""
    if not isinstance(weight, Tensor):
        return weight
    expect_tensors(_NAME, {"weight": weight}, {}, writes=False)
    if weight.ndim != 2:
        refuse(_NAME, "weight", "2 dimensions [N, K]", list(weight.shape))
    return weight[:, None, None, :]


def explain(*args: Any, **kwargs: Any) -> str:
    """`epiloq.explain` for `requantized_mm`, given the arguments of a call."""
    call = Arguments(**bound_arguments(requantized_mm, *args, **kwargs))
    x, out, dtype = call.x_q, call.out, call.out_dtype
    expect_tensors(_NAME, {"x_q": x}, {"out": out}, writes=False)
    scales = (call.input_scale, call.input_zero), (call.output_scale, call.output_zero)
    w = prepared(_NAME, _as_kernel(call.weight), call.bias, call.weight_scale, *scales)
    if out is not None:
        out, dtype = _pixels_of_rows(out, (*x.shape[:-1], w.q.shape[0])), out.dtype
    where = geometry(_NAME, w.q.shape[1:3], *_ONE_BY_ONE)
    is_empty = 0 in x.shape[:-1]  # one token instead, for the checks
    k = x.shape[-1]
    rows = x.new_zeros((1, k)) if is_empty else x.reshape(math.prod(x.shape[:-1]), k)
    image, out = rows[None, :, None].permute(0, 3, 1, 2), None if is_empty else out
    kernel = explain_checked(_NAME, image, w, call.clamp, where, dtype, out)
    return "nothing to launch: the output is empty" if is_empty else kernel
