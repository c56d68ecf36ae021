"""Matrix multiplication that quantises activations to int8 in blocks within the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, expect_tensors, mark_written
from epiloq._torch.checks import as_operator, bound_arguments, expect_flags, for_operator, is_int32, limits
from epiloq._torch.library import empty_rows, register_product
from epiloq._torch.threads import threads_for
from epiloq.ops.online_quant_weight import online_quant_weight
from epiloq.weights.block_quant_weight import BlockQuantWeight, widen
from epiloq.weights.tensor_checks import refuse

_NAME = "online_quant_mm"
_LIMITS = 7  # position of `lo` and `hi` among the operator's arguments


def online_quant_mm(
    x: Tensor,
    w_q: Tensor | BlockQuantWeight,
    w_scale: Tensor | None = None,
    w_offset: Tensor | None = None,
    *,
    group_size: int | None = None,
    bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    staged: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``clamp(x W^T + bias)`` with ``W = w_scale * w_q + w_offset`` per block, and x quantised in the same blocks.

    x is quantised as by `quantize_blockwise_int8`, with the weight's block size. The int8 products of a block are
    exact; over blocks i, in float32, with scale, offset and sum sA, oA, sumA of x's blocks, sB, oB, sumB of the
    weight's, and g values per block:

        ``y = sum_i  sA (sB sum(q_x q_w) + sumA oB) + oA (sumB sB + g oB)``

    A row of x that contains NaN or an infinity gives NaN.

    Args:
        x: ``[…, K]`` float32, float16 or bfloat16, contiguous rows.
        w_q: a `BlockQuantWeight` from `online_quant_weight`, prepared once; or int8 ``[N, K]``, or int8
            ``[N, ceil(K / 2)]`` with two 4-bit values per byte (value 2i in the low half of byte i), which each call
            prepares.
        w_scale: float32 ``[N, G]`` with G = ceil(K / group_size), or ``[N, 1]`` for one per row, or ``[1, G]`` for one
            per block; None with a prepared weight.
        w_offset: float32 in one of those shapes, or None for weights without offsets.
        group_size: values per block, of x and of the weight; the last block of a row may be shorter. CUDA has fused
            kernels for 32, 64 and 128, and the staged pipeline for others. None with a prepared weight.
        bias: ``[N]`` in x's dtype, added in float32.
        clamp: ``(lo, hi)``: ``(0, inf)`` is ReLU, ``(0, 6)`` ReLU6. NaN is not clamped.
        staged: on CUDA, run the reference pipeline instead of the fused kernel: the same results up to float32
            rounding, many times slower.
        out: ``[…, N]`` in x's dtype, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, N]`` in x's dtype.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: this build has no kernel for the device; or in a backward pass, as there is no derivative.
    """
    weight = _weight_of(x, w_q, w_scale, w_offset, group_size)
    expect_flags(_NAME, staged=staged)
    lo, hi = limits(_NAME, clamp)
    parts = (x, weight.values, weight.parameters)
    arguments = (*parts, bias, weight.in_features, weight.group_size, weight.bits, lo, hi, staged)
    if not direct(parts, (bias, out)):
        required = dict(zip(("x", "w_q", "w_scale"), parts, strict=True))
        return dispatched(_NAME, required, {"bias": bias, "out": out}, for_operator(arguments, _LIMITS))
    return run(*arguments, out=out)


def _weight_of(
    x: Tensor, w_q: Tensor | BlockQuantWeight, w_scale: Tensor | None, w_offset: Tensor | None, group_size: int | None
) -> BlockQuantWeight:
    if isinstance(w_q, BlockQuantWeight):
        for name, value in (("w_scale", w_scale), ("w_offset", w_offset)):
            if value is not None:
                refuse(_NAME, name, "None with a prepared weight", "a tensor")
        if group_size is not None and (not is_int32(group_size) or group_size != w_q.group_size):
            refuse(_NAME, "group_size", f"the weight's, {w_q.group_size}", group_size)
        return w_q
    expect_tensors(_NAME, {"x": x, "w_q": w_q, "w_scale": w_scale}, {"w_offset": w_offset}, writes=False)
    if group_size is None or w_scale is None:
        refuse(_NAME, "group_size", "a number with a weight in tensors", None)
    if x.ndim < 1:
        refuse(_NAME, "x", "at least one dimension", "a scalar")
    k = x.shape[-1]
    packed = w_q.ndim == 2 and w_q.shape[1] != k and w_q.shape[1] == (k + 1) // 2
    return online_quant_weight(w_q, w_scale, w_offset, group_size=group_size, bits=4 if packed else 8, in_features=k)


def run(
    x: Tensor,
    values: Tensor,
    parameters: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    bits: int,
    lo: float,
    hi: float,
    staged: bool,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`online_quant_mm` for plain tensors, with the weight's tensors as separate arguments."""
    result = empty_rows(_NAME, x, values.shape[0]) if out is None else out
    call = (result, x, values, parameters, bias, in_features, group_size, bits, lo, hi)
    if x.is_cuda:
        _launch(call, staged)
    else:
        _core.online_quant_mm_on_host(*call, staged, threads_for(x))
    if out is not None:
        mark_written(out)
    return result


def _launch(call: tuple[Any, ...], staged: bool) -> None:
    """Launch on CUDA, with a workspace if quantiser and product are separate kernels."""
    out, x, values, parameters, bias, in_features, group_size, bits, lo, hi = call
    products = sums = None
    if staged or _core.online_quant_mm_needs_staging(group_size):
        staged = True
        sizes = (x.numel() // in_features, values.shape[0])
        products, sums = (out.new_empty(sizes, dtype=dtype) for dtype in (torch.int32, torch.float32))
        if bits == 4:
            call = (out, x, widen(values), parameters, bias, in_features, group_size, 8, lo, hi)
    call = (*call, staged, products, sums)
    _core.online_quant_mm(*call)


def explain(*args: Any, terms: bool = False, **kwargs: Any) -> str:
    """`epiloq.explain` given the arguments of a call; with `terms`, the terms of the cost model for the chosen kernel
    and the runner-up."""
    call = bound_arguments(online_quant_mm, *args, **kwargs)
    weight = _weight_of(call["x"], call["w_q"], call["w_scale"], call["w_offset"], call["group_size"])
    x, bias, out = call["x"], call["bias"], call["out"]
    expect_tensors(_NAME, {"x": x}, {"bias": bias, "out": out}, writes=False)
    meaning = (weight.in_features, weight.group_size, weight.bits, *limits(_NAME, call["clamp"]), call["staged"])
    result = empty_rows(_NAME, x, weight.values.shape[0]) if out is None else out
    return _core.explain_online_quant_mm(result, x, weight.values, weight.parameters, bias, *meaning, terms=terms)


def _fake(x: Tensor, values: Tensor, parameters: Tensor, bias: Tensor | None, in_features: int, *_: Any) -> Tensor:
    torch._check_value(
        x.ndim > 0 and x.shape[-1] == in_features,
        lambda: f"epiloq.online_quant_mm: x: expected […, {in_features}], got {list(x.shape)}",
    )
    return empty_rows(_NAME, x, values.shape[0])


_ARGUMENTS = (
    "Tensor x, Tensor values, Tensor parameters, Tensor? bias, SymInt in_features, int group_size, int bits, "
    "float? lo, float? hi, bool staged"
)
register_product(_NAME, _ARGUMENTS, as_operator(run, _LIMITS), _fake)
