"""int8 convolutions whose output is requantised to int8 or dequantised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, as_operator, bound_arguments, for_operator
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
from epiloq.ops.convolutions.conv2d_host import blocks_of_sums, describe_int_mm
from epiloq.weights.prepared_int8_weight import Int8Parameters, PreparedInt8Weight
from epiloq.weights.tensor_checks import refuse

_NAME = "conv2d_int8"
_LIMITS = 7  # position of `lo` and `hi` among the operator's arguments
_OUT_DTYPES = (torch.int8, torch.float16, torch.bfloat16, torch.float32)
# Products of 8-bit integers, one of them less a zero point, whose sums int32 holds (src/api/conv2d_int8.cpp).
_MOST_TERMS = (2**31 - 1) // (255 * 128)


def conv2d_int8(
    x_q: Tensor,
    weight: Tensor | PreparedInt8Weight,
    bias: Tensor | None = None,
    *,
    input_scale: float | None = None,
    input_zero: int | None = None,
    weight_scale: Tensor | None = None,
    output_scale: float | None = None,
    output_zero: int | None = None,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    clamp: tuple[float, float] | None = None,
    out_dtype: torch.dtype = torch.int8,
    out: Tensor | None = None,
) -> Tensor:
    """A convolution of quantised activations, ``x = input_scale (x_q - input_zero)``.

    With the exact sum ``acc = sum (x_q - input_zero) weight`` over the pixels inside the image (padding is
    ``input_zero``, which represents 0), and ``y = input_scale weight_scale acc + bias`` clamped to ``clamp``::

        int8:            out = clamp(round(y / output_scale) + output_zero, -128, 127), ties to even
        floating point:  out = y

    ``input_scale weight_scale / output_scale`` and ``bias / output_scale`` are computed in float64 and rounded once to
    float32; given these, int8 outputs are those of float64 arithmetic. docs/numerics.md has the bounds.

    Args:
        x_q: int8 ``[B, Ci, H, W]``, preferably in ``torch.channels_last`` memory; other memory formats are copied to
            it.
        weight: int8 ``[Co, Kh, Kw, Ci / groups]`` with its parameters in the keywords below, or a
            `PreparedInt8Weight`, which contains all of them (``bias`` and those keywords are then None).
        bias: float32 ``[Co]``, not quantised.
        input_scale, output_scale: positive and finite. ``output_scale`` is for int8 output only.
        input_zero, output_zero: -128 to 127, 0 unless given.
        weight_scale: float32, one element or ``[Co]``.
        stride, dilation: one number or (height, width).
        padding: one number, (height, width), (top, bottom, left, right), "valid", or with unit strides "same".
        groups: divides ``Ci`` and ``Co``; ``groups = Ci`` is a depthwise convolution.
        clamp: ``(lo, hi)``, not quantised: ``(0, inf)`` is ReLU, ``(0, 6)`` ReLU6.
        out_dtype: int8, float16, bfloat16 or float32.
        out: ``[B, Co, P, Q]`` of one of those dtypes, which determines ``out_dtype``, in channels_last memory;
            written and returned.

    Returns:
        ``[B, Co, P, Q]`` in channels_last memory. NaN (of a scale or the bias) counts as ``y = 0`` in int8 output.

    Raises:
        ValueError: an argument is invalid; the message names it. Sums of more than 65793 products are refused,
            because int32 might overflow.
        TypeError: an argument is not a tensor, or a parameter is missing.
        NotImplementedError: this build has no kernel for the GPU.
    """
    if isinstance(weight, Tensor):
        expect_tensors(_NAME, {"weight": weight}, {}, writes=False)
    if isinstance(weight, Tensor) and weight.ndim != 4:
        raise ValueError(f"epiloq.{_NAME}: weight: expected [Co, Kh, Kw, Ci / groups], got {list(weight.shape)}")
    w = prepared(_NAME, weight, bias, weight_scale, (input_scale, input_zero), (output_scale, output_zero))
    where = geometry(_NAME, w.q.shape[1:3], stride, padding, dilation, groups)
    return run_checked(_NAME, x_q, w, clamp, where, out_dtype, out)


def prepared(
    operation: str,
    weight: Tensor | PreparedInt8Weight,
    bias: Tensor | None,
    weight_scale: Tensor | None,
    into: tuple[float | None, int | None],
    onto: tuple[float | None, int | None],
) -> PreparedInt8Weight:
    """The weight with all its parameters: already prepared, or prepared here."""
    if isinstance(weight, PreparedInt8Weight):
        given = {"bias": bias, "weight_scale": weight_scale, "input_scale": into[0], "input_zero": into[1]}
        for name, value in {**given, "output_scale": onto[0], "output_zero": onto[1]}.items():
            if value is not None:
                refuse(operation, name, "None with a prepared weight (its updated() changes scales)", "one")
        return weight
    if weight_scale is None or into[0] is None:
        missing = "weight_scale" if weight_scale is None else "input_scale"
        raise TypeError(f"epiloq.{operation}: {missing}: expected one with a plain weight, got None")
    expect_tensors(operation, {"weight_scale": weight_scale}, {"bias": bias}, writes=False)
    if onto[0] is None and onto[1] is not None:
        raise ValueError(f"epiloq.{operation}: output_zero: expected None without output_scale, got {onto[1]}")
    output = None if onto[0] is None else (onto[0], 0 if onto[1] is None else onto[1])
    zero = 0 if into[1] is None else into[1]
    return PreparedInt8Weight.for_call(operation, weight, weight_scale, bias, (into[0], zero), output)


def run_checked(
    operation: str,
    x: Tensor,
    w: PreparedInt8Weight,
    clamp: tuple[float, float] | None,
    where: Geometry,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """The convolution with a prepared weight, after the checks whose messages name `operation`."""
    expect_tensors(operation, {"x_q": x}, {"out": out}, writes=False)
    dtype = out_dtype if out is None else out.dtype
    if dtype not in _OUT_DTYPES:
        name = "out_dtype" if out is None else "out"
        raise ValueError(f"epiloq.{operation}: {name}: expected torch.int8, float16, bfloat16 or float32, got {dtype}")
    # C++ checks these too, and says conv2d_int8 and x.
    if x.device != w.q.device:
        raise ValueError(f"epiloq.{operation}: weight: expected a tensor on {x.device}, got one on {w.q.device}")
    if (terms := math.prod(w.q.shape[1:])) > _MOST_TERMS:
        wanted = f"at most {_MOST_TERMS} values an output channel, where int32 sums are exact"
        refuse(operation, "weight", wanted, terms)
    return convolve(
        operation, x, w.q, w.parameters(operation, to_int8=dtype == torch.int8, clamp=clamp), where, dtype, out
    )


def convolve(
    operation: str,
    x: Tensor,
    q: Tensor,
    p: Int8Parameters,
    where: Geometry,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """The operation with prepared parameters."""
    arguments: tuple[Any, ...] = (x, q, p.scale, p.bias, p.correction)
    arguments += (p.input_zero, p.output_zero, p.lo, p.hi, *where)
    if not direct((x, q, p.scale), (p.bias, p.correction, out)):
        tensors = {"x_q": x, "weight": q, "weight_scale": p.scale}
        optional = {"bias": p.bias, "correction": p.correction, "out": out}
        expect_tensors(operation, tensors, optional, writes=out is not None)
        arguments = for_operator(arguments, _LIMITS)
        if out is None or is_written_by_copy(out):
            result = refuse_backward(operation, torch.ops.epiloq.conv2d_int8(*arguments, out_dtype=dtype))
            return result if out is None else copied(operation, result, out)
        torch.ops.epiloq.conv2d_int8_out(*arguments, out=out)
        return out
    return _run(*arguments, out_dtype=dtype, out=out)


def _run(
    x: Tensor, weight: Tensor, *rest: Any, out_dtype: torch.dtype = torch.int8, out: Tensor | None = None
) -> Tensor:
    check_input(_NAME, "x_q", x, (torch.int8,))
    where = Geometry(*rest[7:])
    if where.groups > 0 and weight.shape[0] % where.groups == 0:  # C++ refuses other groups
        check_sizes(_NAME, "x_q", x, _channels(weight, where))
    if out is not None:
        check_output(_NAME, out, (x.shape[0], weight.shape[0], *where.output_size(x.shape[2:], weight.shape[1:3])))
    result = _empty(x, weight, where, out_dtype) if out is None else out
    (_core.conv2d_int8 if x.is_cuda else _run_on_cpu)(_pixels(result), _dense_pixels(x), weight, *rest)
    if out is not None:
        mark_written(out)
    return result


def _pixels(image: Tensor) -> Tensor:
    """A view ``[B, H, W, C]``, as the kernels take images; unchanged if it is not an image, for the checks in C++."""
    return image.permute(0, 2, 3, 1) if image.ndim == 4 else image


def _dense_pixels(x: Tensor) -> Tensor:
    """x as ``[B, H, W, Ci]`` with contiguous channels; copied if necessary."""
    pixels = _pixels(x)
    return pixels if pixels.ndim != 4 or pixels.shape[3] < 2 or pixels.stride(3) == 1 else pixels.contiguous()


@torch.no_grad()
def _run_on_cpu(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    input_zero: int,
    output_zero: int,
    lo: float,
    hi: float,
    *where: Any,
) -> None:
    arguments = (out, x, weight, scale, bias, correction, input_zero, output_zero, lo, hi, *where)
    if _core.check_conv2d_int8(*arguments):
        _core.conv2d_int8_on_host(*(*arguments, threads_for(x)))
        return
    if out.numel() == 0:
        return
    rows_of_out = out.flatten(0, 1)
    size = (out.shape[1], out.shape[2])
    for rows, acc in blocks_of_sums(x, weight, input_zero, Geometry(*where), size):
        _core.finish_conv2d_int8(rows_of_out[rows], acc, scale, bias, correction, output_zero, lo, hi)


def _empty(x: Tensor, weight: Tensor, where: Geometry, dtype: torch.dtype) -> Tensor:
    if x.ndim != 4 or weight.ndim != 4:  # fake tensors come here first
        shapes = f"{list(x.shape)} and {list(weight.shape)}"
        raise ValueError(f"epiloq.{_NAME}: x_q: expected [B, Ci, H, W] and a weight [Co, Kh, Kw, C], got {shapes}")
    (batch, _, *image), (outputs, *kernel, _) = x.shape, weight.shape
    p, q = where.output_size(image, kernel)
    # Sizes are checked with everything else, once, in C++; here they only must not break the allocation.
    return x.new_empty((batch, max(p, 0), max(q, 0), outputs), dtype=dtype).permute(0, 3, 1, 2)


def _fake(x: Tensor, weight: Tensor, *rest: Any, out_dtype: torch.dtype) -> Tensor:
    where = Geometry(*rest[7:])
    result = _empty(x, weight, where, out_dtype)
    channels = _channels(weight, where)
    torch._check_value(x.shape[1] == channels, lambda: _wrong_channels(x, channels))
    return result


def _channels(weight: Tensor, where: Geometry) -> int:
    """Number of channels of an input."""
    return weight.shape[-1] * where.groups


def _wrong_channels(x: Tensor, channels: int) -> str:
    return (
        f"epiloq.{_NAME}: x_q: expected {channels} channels (those of the weight in every group), got {list(x.shape)}"
    )


def explain(*args: Any, **kwargs: Any) -> str:
    """`epiloq.explain` for `conv2d_int8`, given the arguments of a call."""
    call = Arguments(**bound_arguments(conv2d_int8, *args, **kwargs))
    expect_tensors(_NAME, {"x_q": call.x_q}, {"out": call.out}, writes=False)
    scales = (call.input_scale, call.input_zero), (call.output_scale, call.output_zero)
    w = prepared(_NAME, call.weight, call.bias, call.weight_scale, *scales)
    where = geometry(_NAME, w.q.shape[1:3], call.stride, call.padding, call.dilation, call.groups)
    return explain_checked(_NAME, call.x_q, w, call.clamp, where, call.out_dtype, call.out)


def explain_checked(
    operation: str,
    image: Tensor,
    w: PreparedInt8Weight,
    clamp: tuple[float, float] | None,
    where: Geometry,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> str:
    """The kernel that `run_checked` would use."""
    dtype = out_dtype if out is None else out.dtype
    p = w.parameters(operation, to_int8=dtype == torch.int8, clamp=clamp)
    x, pixels = _dense_pixels(image), _pixels(_empty(image, w.q, where, dtype) if out is None else out)
    if x.is_cuda or _core.forced_arch() != "auto":
        return _core.explain_conv2d_int8(pixels, x, w.q, *p, *where)
    if _core.check_conv2d_int8(pixels, x, w.q, *p, *where):
        return "cpu, one pass over the image" + (", depthwise" if where.groups > 1 else ", few input channels")
    if where.groups > 1:
        return "cpu, torch's float convolution of integers, exact"
    return "cpu, patches of the image, then " + describe_int_mm()


_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? correction, int input_zero, int output_zero, "
    "float? lo, float? hi, int[] stride, int[] padding, int[] dilation, int groups"
)
register_product(
    _NAME,
    _ARGUMENTS,
    as_operator(_run, _LIMITS),
    _fake,
    allocating="ScalarType out_dtype",
    depth=lambda x, weight, *_: math.prod(weight.shape[1:]),
)
