"""Products of floating-point activations with low-bit weights, dequantised in the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, expect_tensors, mark_written, parts_of
from epiloq._torch.checks import Arguments, as_operator, explanation_of, for_operator, limits
from epiloq._torch.dense import multiply_dense
from epiloq._torch.library import empty_rows, register_product
from epiloq._torch.threads import threads_for
from epiloq.weights.packed_weight import PackedWeight
from epiloq.weights.tensor_checks import check_memory, described, refuse

_NAME = "weight_only_mm"
_INFINITY = float("inf")
_LIMITS = 11  # position of `lo` and `hi` among the operator's arguments
# Rows of x that the CUDA kernels read start on 16 bytes.
_ALIGNED = 8


def weight_only_mm(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    clamp: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``min(max(x @ W.T + bias, lo), hi)`` with ``W`` as defined by `epiloq.PackedWeight`, accumulated in fp32.

    The integers are multiplied without rounding, and each group's sum by its scale. On CUDA there are two exceptions,
    in which the weight is rounded to x's dtype: for M > 128, if `epiloq.explain` says "rounded" or "dequantise"; and
    if there is no kernel (groups other than 32, 64, 128 times a power of two and whole rows, with 2 and 3 bits also
    16; float32), so that the weight is dequantised to memory. docs/numerics.md has the bounds. The CPU uses
    `torch.get_num_threads()` of torch's threads (one in a forked child) and releases the GIL.

    Args:
        x: ``[…, M, K]`` float16, bfloat16 or float32, contiguous rows.
        weight: ``[N, K]``. ``x`` is permuted once if the weight is in activation order.
        bias: ``[N]`` of x's dtype, added in fp32.
        clamp: ``(lo, hi)``: ``(0, inf)`` is ReLU, ``(0, 6)`` ReLU6.
        out: ``[…, M, N]`` of x's dtype, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]`` of x's dtype. NaN and infinities in a token, a scale or an offset affect only the outputs that
        depend on them.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor, or ``weight`` no `PackedWeight`.
        NotImplementedError: in a backward pass; the operation has no derivative.
    """
    lo, hi = limits(_NAME, clamp)
    w = _expect(weight)
    if not direct((x, w.q, w.scale), (w.zero, w.offset, w.perm, bias, out)):
        arguments = (x, w.q, w.scale, w.zero, w.offset, w.perm, bias, w.bits, w.n, w.k, w.group_size, lo, hi)
        return dispatched(_NAME, *_tensors(x, w, bias, out), for_operator(arguments, _LIMITS))
    return run(x, w.q, w.scale, w.zero, w.offset, w.perm, bias, w.bits, w.n, w.k, w.group_size, lo, hi, out=out)


def _tensors(
    x: Tensor, w: PackedWeight, bias: Tensor | None, out: Tensor | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the required and the optional tensors by name."""
    return {"x": x, **parts_of(w, "q", "scale")}, {**parts_of(w, "zero", "offset", "perm"), "bias": bias, "out": out}


def _expect(weight: object) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"epiloq.{_NAME}: weight: expected a PackedWeight, got {type(weight).__name__}")
    return weight


def run(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    lo: float,
    hi: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`weight_only_mm` for plain tensors, with the weight's tensors as separate arguments."""
    result = empty_rows(_NAME, x, n) if out is None else out
    packed = (q, scale, zero, offset)
    numbers = (bits, n, k, group_size)
    x = on_16_bytes(_in_order(x, perm, k))
    if not _core.weight_only_mm(result, x, *packed, bias, *numbers, lo, hi, None, threads_for(x)):
        dense_product(result, x, packed, bias, numbers, (lo, hi))
    if out is not None:
        mark_written(out)
    return result


_Packed = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_Numbers = tuple[int, int, int, int]


def _in_order(x: Tensor, perm: Tensor | None, k: int) -> Tensor:
    if perm is None:
        return x
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"epiloq.{_NAME}: x: expected {k} columns, got {list(x.shape)}")
    check_memory("weight.perm", perm, x.device, _NAME)  # torch selects anything by an index on the meta device
    if perm.shape != (k,) or perm.dtype not in (torch.int32, torch.int64):
        refuse(_NAME, "weight.perm", f"int64 [{k}]", described(perm))
    if x.is_quantized:
        refuse(_NAME, "x", "a floating-point tensor", f"one of {x.dtype}, which torch quantised")
    return x.index_select(-1, perm)


def on_16_bytes(x: Tensor) -> Tensor:
    """x or, on CUDA with contiguous rows, a copy whose rows are 16-byte aligned."""
    if not x.is_cuda or x.ndim == 0 or x.stride(-1) != 1:
        return x
    if x.data_ptr() % 16 == 0 and all(stride % _ALIGNED == 0 for stride in x.stride()[:-1]):
        return x
    k = x.shape[-1]
    return x.new_empty((*x.shape[:-1], -(-k // _ALIGNED) * _ALIGNED))[..., :k].copy_(x)


@torch.no_grad()
def dense_product(
    out: Tensor, x: Tensor, packed: _Packed, bias: Tensor | None, numbers: _Numbers, clamp: tuple[float, float]
) -> None:
    """Multiply on CUDA without a kernel for packed weights: the weight is dequantised to memory in x's dtype."""
    _, n, k, _ = numbers
    weight = x.new_empty((n, k))
    _core.dequantize_weight(weight, *packed, *numbers)
    product = multiply_dense(out, x, weight, bias)
    if clamp != (-_INFINITY, _INFINITY):
        product.clamp_(*clamp)


@explanation_of(weight_only_mm)
def explain(call: Arguments, *, terms: bool = False) -> str:
    x, bias, out = call.x, call.bias, call.out
    w = _expect(call.weight)
    expect_tensors(_NAME, *_tensors(x, w, bias, out), writes=False)
    out = empty_rows(_NAME, x, w.n) if out is None else out
    numbers = (w.bits, w.n, w.k, w.group_size, *limits(_NAME, call.clamp))
    ask = _core.explain_weight_only_mm_terms if terms else _core.explain_weight_only_mm
    return ask(out, on_16_bytes(x), w.q, w.scale, w.zero, w.offset, bias, *numbers)


def _fake(x: Tensor, q: Tensor, *rest: Any) -> Tensor:
    n, k = rest[6], rest[7]
    if x.ndim < 1:
        raise ValueError(f"epiloq.{_NAME}: x: expected […, {k}], got a scalar")
    torch._check_value(x.shape[-1] == k, lambda: f"epiloq.{_NAME}: x: expected {k} columns, got {list(x.shape)}")
    return empty_rows(_NAME, x, n)


_TENSORS = "Tensor x, Tensor q, Tensor scale, Tensor? zero, Tensor? offset, Tensor? perm, Tensor? bias"
_ARGUMENTS = f"{_TENSORS}, int bits, int n, int k, int group_size, float? lo, float? hi"
register_product(_NAME, _ARGUMENTS, as_operator(run, _LIMITS), _fake)
