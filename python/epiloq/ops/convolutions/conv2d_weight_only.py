"""Convolutions of floating-point images with low-bit weights, dequantised in the kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, parts_of, refuse_backward, without_autocast
from epiloq._torch.checks import Arguments, as_operator, explanation_of, for_operator, limits
from epiloq._torch.library import register_product
from epiloq._torch.threads import threads_for
from epiloq.ops.convolutions.conv2d import (
    Geometry,
    Padding,
    Pair,
    check_input,
    check_output,
    check_sizes,
    copied,
    geometry,
    is_written_by_copy,
)
from epiloq.ops.weight_only_mm import dense_product
from epiloq.weights.computed import FLOAT_DTYPES
from epiloq.weights.packed_conv2d_weight import PackedConv2dWeight, Parts, Sizes, dense_taps

_NAME = "conv2d_weight_only"
_INFINITY = float("inf")
_LIMITS = 12  # position of `lo` and `hi` among the operator's arguments
# With a kernel of one tap: the pixels are rows of a product.
_EVERY_PIXEL = Geometry((1, 1), (0, 0, 0, 0), (1, 1), 1)


def conv2d_weight_only(
    x: Tensor,
    weight: PackedConv2dWeight,
    bias: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    clamp: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``min(max(conv2d(x, W) + bias, lo), hi)`` with ``W`` as defined by `epiloq.PackedConv2dWeight`, summed in fp32.

    A 1 x 1 kernel with unit strides and no padding is `weight_only_mm` of the pixels, with the same rounding. For the
    others, if `epiloq.explain` says "dequantise", the weight is rounded to x's dtype in memory (float32 on the CPU)
    for torch's convolution, which never uses TF32, whatever torch's settings are.

    Args:
        x: ``[B, Ci, H, W]`` float16, bfloat16 or float32, preferably in ``torch.channels_last`` memory; other memory
            formats are copied to it.
        weight: ``[Co, Kh, Kw, Ci / groups]``.
        bias: ``[Co]`` of x's dtype, added in fp32.
        stride, dilation: one number or (height, width).
        padding: zero padding: one number, (height, width), (top, bottom, left, right), "valid", or with unit strides
            "same".
        groups: divides ``Ci`` and ``Co``; ``groups = Ci`` is a depthwise convolution.
        clamp: ``(lo, hi)``: ``(0, inf)`` is ReLU, ``(0, 6)`` ReLU6.
        out: ``[B, Co, P, Q]`` of x's dtype in channels_last memory; written and returned.

    Returns:
        ``[B, Co, P, Q]`` of x's dtype, in channels_last memory.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor, or ``weight`` no `PackedConv2dWeight`.
        NotImplementedError: in a backward pass; the operation has no derivative.
    """
    w, numbers = _numbers(weight, stride, padding, dilation, groups, clamp)
    if not direct((x, w.q, w.scale), (w.zero, w.offset, bias, out)):
        expect_tensors(_NAME, *_tensors(x, w, bias, out), writes=out is not None)
        arguments = for_operator((x, w.q, w.scale, w.zero, w.offset, bias, *numbers), _LIMITS)
        if out is None or is_written_by_copy(out):
            result = refuse_backward(_NAME, torch.ops.epiloq.conv2d_weight_only(*arguments))
            return result if out is None else copied(_NAME, result, out)
        torch.ops.epiloq.conv2d_weight_only_out(*arguments, out=out)
        return out
    return _run(x, w.q, w.scale, w.zero, w.offset, bias, *numbers, out=out)


def _tensors(
    x: Tensor, w: PackedConv2dWeight, bias: Tensor | None, out: Tensor | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the required and the optional tensors by name."""
    return {"x": x, **parts_of(w, "q", "scale")}, {**parts_of(w, "zero", "offset"), "bias": bias, "out": out}


def _numbers(
    weight: object, stride: Pair, padding: Padding, dilation: Pair, groups: int, clamp: tuple[float, float] | None
) -> tuple[PackedConv2dWeight, tuple[Any, ...]]:
    if not isinstance(weight, PackedConv2dWeight):
        raise TypeError(f"epiloq.{_NAME}: weight: expected a PackedConv2dWeight, got {type(weight).__name__}")
    w = weight
    where = geometry(_NAME, w.kernel, stride, padding, dilation, groups)
    lo, hi = limits(_NAME, clamp)
    return w, (w.bits, w.n, w.kernel, w.channels, w.padded_channels, w.group_size, lo, hi, *where)


def _run(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    bits: int,
    n: int,
    kernel: tuple[int, int],
    channels: int,
    padded_channels: int,
    group_size: int,
    lo: float,
    hi: float,
    *where: Any,
    out: Tensor | None = None,
) -> Tensor:
    place = Geometry(*where)
    pixels = _pixels(x)
    _check_shapes(x, (n, kernel, channels), place, out)
    target = _empty(x, n, kernel, place) if out is None else out
    sizes = (bits, n, kernel, channels, padded_channels, group_size)
    packed = (q, scale, zero, offset)
    rows = target.permute(0, 2, 3, 1)
    arguments: tuple[Any, ...] = (*packed, bias, *sizes, channels == 1, lo, hi, *where, threads_for(x))
    if _core.conv2d_weight_only(rows, pixels, *arguments):
        pass
    # (On the CPU a convolution is the faster of the two.)
    elif x.is_cuda and kernel == (1, 1) and channels > 1 and place == _EVERY_PIXEL:
        dense_product(rows, pixels, packed, bias, (bits, n, channels, group_size), (lo, hi))
    else:
        result = _convolution(pixels, packed, sizes, bias, place, (lo, hi))
        # Usually already what an allocation of ours would be, so that no copy is needed.
        if out is None and result.dtype == x.dtype and result.is_contiguous(memory_format=torch.channels_last):
            return result
        with torch.no_grad():
            target.copy_(result)
    if out is not None:
        mark_written(out)
    return target


@torch.no_grad()
def _convolution(
    pixels: Tensor, packed: Parts, sizes: Sizes, bias: Tensor | None, where: Geometry, clamp: tuple[float, float]
) -> Tensor:
    """torch's convolution with the dequantised weight; on the CPU in float32."""
    dtype = pixels.dtype if pixels.is_cuda else torch.float32
    image = pixels.permute(0, 3, 1, 2).to(dtype)
    top, bottom, left, right = where.padding
    sides: tuple[int, int] = (top, left)
    if (top, left) != (bottom, right):
        image, sides = pad(image, (left, right, top, bottom)), (0, 0)
    offsets = None if bias is None else bias.to(dtype)
    dense = dense_taps(packed, sizes, dtype)
    how = (where.stride, sides, where.dilation, False, (0, 0), where.groups)
    cudnn = torch.backends.cudnn
    # As torch's conv2d, which lets cuDNN round float32 to TF32 by default. Of 16-bit types, the flag decides whether
    # cuDNN may use tensor cores at all.
    flags = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled, dtype is not torch.float32)
    with without_autocast(pixels.device.type):
        sums = torch._convolution(image, dense, offsets, *how, *flags)
    return sums.clamp_(*clamp) if clamp != (-_INFINITY, _INFINITY) else sums


def _pixels(x: Tensor) -> Tensor:
    """x as ``[B, H, W, Ci]`` with contiguous channels; copied if necessary."""
    check_input(_NAME, "x", x, FLOAT_DTYPES)
    return x.permute(0, 2, 3, 1).contiguous()


def _check_shapes(x: Tensor, weight: tuple[int, tuple[int, int], int], where: Geometry, out: Tensor | None) -> None:
    """`weight` is its number of outputs, kernel and channels."""
    n, kernel, channels = weight
    if where.groups > 0 and n % where.groups == 0:  # C++ refuses other groups
        check_sizes(_NAME, "x", x, channels * where.groups)
    if out is not None:
        check_output(_NAME, out, (x.shape[0], n, *where.output_size(x.shape[2:], kernel)))
        if out.dtype != x.dtype:
            raise ValueError(f"epiloq.{_NAME}: out: expected {x.dtype}, got {out.dtype} {list(out.shape)}")


def _empty(x: Tensor, n: int, kernel: tuple[int, int], where: Geometry) -> Tensor:
    p, q = where.output_size(x.shape[2:], kernel)
    # Sizes are checked with everything else, once, in C++; here they only must not break the allocation.
    return x.new_empty((x.shape[0], max(p, 0), max(q, 0), n)).permute(0, 3, 1, 2)


@explanation_of(conv2d_weight_only)
def explain(call: Arguments) -> str:
    x, bias, out = call.x, call.bias, call.out
    w, numbers = _numbers(call.weight, call.stride, call.padding, call.dilation, call.groups, call.clamp)
    expect_tensors(_NAME, *_tensors(x, w, bias, out), writes=False)
    where = Geometry(*numbers[8:])
    pixels = _pixels(x)
    _check_shapes(x, (w.n, w.kernel, w.channels), where, out)
    out = _empty(x, w.n, w.kernel, where) if out is None else out
    packed = (w.q, w.scale, w.zero, w.offset, bias)
    arguments: tuple[Any, ...] = (*packed, *numbers[:6], w.depthwise, *numbers[6:])
    return _core.explain_conv2d_weight_only(out.permute(0, 2, 3, 1), pixels, *arguments)


def _run_lists(*arguments: Any, out: Tensor | None = None) -> Tensor:
    """`_run` with the dispatcher's lists converted to tuples."""
    given: Any = (tuple(value) if isinstance(value, list) else value for value in arguments)
    return _run(*given, out=out)


def _fake(x: Tensor, q: Tensor, *rest: Any) -> Tensor:
    n, kernel, channels = rest[5:8]
    where = Geometry(*rest[-4:])
    if x.ndim != 4:
        raise ValueError(f"epiloq.{_NAME}: x: expected 4 dimensions [B, Ci, H, W], got {list(x.shape)}")
    torch._check_value(
        x.shape[1] == channels * where.groups,
        lambda: f"epiloq.{_NAME}: x: expected {channels * where.groups} channels, got {list(x.shape)}",
    )
    return _empty(x, n, kernel, where)


_ARGUMENTS = (
    "Tensor x, Tensor q, Tensor scale, Tensor? zero, Tensor? offset, Tensor? bias, int bits, int n, int[] kernel, "
    "int channels, int padded_channels, int group_size, float? lo, float? hi, "
    "int[] stride, int[] padding, int[] dilation, int groups"
)
register_product(
    _NAME,
    _ARGUMENTS,
    as_operator(_run_lists, _LIMITS),
    _fake,
    depth=lambda *arguments: math.prod(arguments[8]) * arguments[9],  # kernel, channels
)
