"""Products of 8-bit activations with 4-bit weights."""

from __future__ import annotations

import sys
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, expect_tensors, is_batch_invariant, mark_written, parts_of
from epiloq._torch.checks import Arguments, explanation_of
from epiloq._torch.library import register_product
from epiloq.ops.checks.w4a8_mm import (
    ACTIVATIONS,
    GROUP,
    NAME,
    Call,
    Weight,
    check,
    check_out_dtype,
    check_weight,
    groups_of,
)
from epiloq.ops.packed_fp4_mm import explain as explain_fp4
from epiloq.ops.packed_fp4_mm import run as fp4
from epiloq.ops.w4a8 import unpacked
from epiloq.ops.w4a8.groups import TOKENS, summed_by_group, sums_of_groups
from epiloq.ops.weight_only_mm import explain as explain_weight_only
from epiloq.ops.weight_only_mm import run as weight_only
from epiloq.weights.packed_fp4_weight import PackedFp4Weight
from epiloq.weights.packed_layout import PADDING
from epiloq.weights.packed_weight import PackedWeight

# Elements of activations, or of a result, that are in fp32 at a time.
_AT_ONCE = 1 << 24
# Elements of 16 bits in 16 bytes.
_ALIGNED = 8
# Number of tokens from which the float8 kernel of SM90 is faster on an H200; below, the time is that of reading the
# weight. And from which it is slower again in groups of 32, whose sums it scales four times as often.
FLOAT8_TOKENS = 33
_TOO_MANY_IN_GROUPS_OF_32 = 192


def w4a8_mm(
    x_q: Tensor,
    weight: Weight,
    scale_a: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """``scale_a * sum over groups g of scale[n, g] * (x_q @ (q - zero).T)_g + bias``: 8-bit by 4-bit products.

    ``q``, ``zero`` and ``scale`` are the weight's, see `epiloq.PackedWeight`; of a `PackedFp4Weight` the E2M1 number
    means ``q - zero``, and ``scale`` includes the global scale. Every ``x_q`` and ``q - zero`` is multiplied
    without rounding; sums and epilogue are in fp32, with one rounding to the output's type. On CUDA many tokens are
    multiplied in 8 bits: with scales per channel, and for float8 times MXFP4, the weight is unpacked for `scaled_mm`,
    with float8 and groups of a multiple of 128 for `groupwise_mm`; float8 times a symmetric weight in groups has a
    kernel for SM90. Otherwise, for few tokens (which are limited by reading the weight), for NVFP4, for scales per
    group of activations and with `set_batch_invariant`, activations and their scales are converted to bfloat16 for
    `weight_only_mm` or `packed_fp4_mm`. docs/numerics.md has the bounds.

    Args:
        x_q: float8_e4m3fn or int8 ``[…, M, K]``, as returned by `quantize_fp8` per token or a symmetric
            `quantize_int8`; contiguous rows; leading dimensions must collapse into one.
        weight: ``[N, K]`` with 4 bits, symmetric or with integer zero points; any group size and scale type, including
            scales per channel (groups of whole rows). ``x_q`` is permuted once if the weight is in activation order. Or
            FP4 with at most one global scale.
        scale_a: float32, one element or one per token: ``[M]``, ``[M, 1]`` or ``[…, M, 1]``. Or one per token and group
            of 128 columns, ``[M, ceil(K / 128)]`` or ``[…, M, ceil(K / 128)]`` of any strides, which is then inside the
            sum.
        bias: ``[N]`` in the output's dtype, added in fp32.
        out_dtype: float16 or bfloat16, on the CPU also float32; ``out``'s dtype if ``out`` is given.
        out: ``[…, M, N]``, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]``. NaN in a token or its scale affects only that token's outputs, NaN in a weight's scale only that
        column's.

    Raises:
        ValueError: an argument is invalid; the message names it. Weights with other bit widths or with real offsets
            are refused.
        TypeError: an argument is not a tensor, or ``weight`` neither a `PackedWeight` nor a `PackedFp4Weight`.
        NotImplementedError: in a backward pass; the operation has no derivative.
    """
    w = _expect(weight)
    names = ("zero", "perm") if isinstance(w, PackedWeight) else ("global_scale",)
    zero, perm, factor = (getattr(w, name, None) for name in ("zero", "perm", "global_scale"))
    format = "int" if isinstance(w, PackedWeight) else w.format
    arguments = (x_q, w.q, w.scale, zero, perm, scale_a, bias, w.n, w.k, w.group_size, format, factor)
    if not direct((x_q, w.q, w.scale, scale_a), (zero, perm, factor, bias, out)):
        required = {"x_q": x_q, "scale_a": scale_a, **parts_of(w, "q", "scale")}
        optional = {**parts_of(w, *names), "bias": bias, "out": out}
        return dispatched(NAME, required, optional, arguments, out_dtype=out_dtype)
    return run(*arguments, out_dtype=out_dtype, out=out)


def _expect(weight: object) -> Weight:
    if not isinstance(weight, Weight):
        got = type(weight).__name__
        raise TypeError(f"epiloq.{NAME}: weight: expected a PackedWeight or a PackedFp4Weight, got {got}")
    check_weight(weight)
    return weight


@torch.no_grad()
def run(
    x_q: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    perm: Tensor | None,
    scale_a: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    format: str = "int",
    global_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`w4a8_mm` for plain tensors, with the weight's tensors as separate arguments."""
    result = _empty(x_q, n, out_dtype) if out is None else out
    weight: Weight = PackedWeight(q, scale, zero, None, perm, 4, n, k, group_size)
    if format != "int":
        weight = PackedFp4Weight(q, scale, global_scale, format, n, k)
    call = Call(result, x_q, weight, scale_a, bias)
    check(call, out is not None)
    if result.numel() > 0:
        multiply(call)
    if out is not None:
        mark_written(out)
    return result


def _empty(x_q: Tensor, n: int, out_dtype: torch.dtype) -> Tensor:
    if x_q.ndim == 0:
        raise ValueError(f"epiloq.{NAME}: x_q: expected at least one dimension, got a scalar")
    check_out_dtype(x_q, out_dtype)
    return x_q.new_empty((*x_q.shape[:-1], n), dtype=out_dtype)


def multiply(call: Call) -> None:
    """The product of checked arguments, with at least one output."""
    weight, m = call.weight, prod(call.x_q.shape[:-1])
    x_q, out = call.x_q.view(m, weight.k), call.out.view(m, weight.n)
    if _has_groups(call):
        return _by_groups(out, x_q, weight, call.scale_a.reshape(m, -1), call.bias)
    if isinstance(weight, PackedWeight) and weight.perm is not None:
        # As bytes, because some backends cannot gather float8.
        x_q = x_q.view(torch.uint8).index_select(-1, weight.perm).view(x_q.dtype)
    scale_a = call.scale_a.reshape(-1, 1).contiguous()
    scale_a = scale_a if len(scale_a) == m else scale_a.repeat(m, 1)
    if not is_batch_invariant() and unpacked.fits(x_q, weight):
        return unpacked.multiply(out, x_q, weight, scale_a, call.bias)
    if isinstance(weight, PackedWeight) and _may_be_float8(x_q, weight) and _by_float8_kernel(out, x_q, weight, call):
        return
    step = max(_AT_ONCE // max(weight.n, weight.k), TOKENS)
    for first in range(0, m, step):
        rows = slice(first, first + step)
        _product(out[rows], x_q[rows], weight, scale_a[rows], call.bias)


def _has_groups(call: Call) -> bool:
    """Whether `scale_a` has several scales for each token."""
    groups = groups_of(call.weight.k)
    return groups > 1 and call.scale_a.numel() == prod(call.x_q.shape[:-1]) * groups


def _by_groups(out: Tensor, x_q: Tensor, weight: Weight, scale_a: Tensor, bias: Tensor | None) -> None:
    """The product of activations that are multiplied by their scales first, ``scale_a`` ``[M, groups]``."""
    dtype, perm = _floating(x_q), getattr(weight, "perm", None)
    step = max(_AT_ONCE // max(weight.n, weight.k), TOKENS)
    for first in range(0, len(x_q), step):
        rows = slice(first, first + step)
        x = widened(x_q[rows], scale_a[rows], dtype)
        _write_product(out[rows], x if perm is None else x.index_select(-1, perm), weight, bias)


def float8_tokens(group_size: int) -> range:
    """The numbers of tokens for which SM90 converts the weight to float8 in registers."""
    return range(FLOAT8_TOKENS, _TOO_MANY_IN_GROUPS_OF_32 if group_size == 32 else sys.maxsize)


def _may_be_float8(x_q: Tensor, weight: PackedWeight) -> bool:
    may = not is_batch_invariant() and x_q.is_cuda and x_q.dtype == torch.float8_e4m3fn
    return may and len(x_q) in float8_tokens(weight.group_size)


def _by_float8_kernel(out: Tensor, x_q: Tensor, weight: PackedWeight, call: Call) -> bool:
    """Multiply on SM90, with weights converted to float8 in registers. Returns False if there is no such kernel."""
    padded_k = -(-weight.k // PADDING) * PADDING
    scratch = x_q.new_empty((len(x_q), padded_k), dtype=torch.uint8)
    packed, numbers = (weight.q, weight.scale, weight.zero), (weight.n, weight.k, weight.group_size)
    return _core.w4a8_mm(out, x_q, call.scale_a.reshape(-1), *packed, scratch, call.bias, *numbers)


def _product(out: Tensor, x_q: Tensor, weight: Weight, scale_a: Tensor, bias: Tensor | None) -> None:
    """A slice of the tokens, in the packed order of columns."""
    if isinstance(weight, PackedWeight) and _multiplies_integers(x_q, weight):
        _finish(out, sums_of_groups(x_q, weight), scale_a, bias)
    else:
        _by_weight_only(out, x_q, weight, scale_a, bias, _floating(x_q))


def _multiplies_integers(x_q: Tensor, weight: PackedWeight) -> bool:
    return not x_q.is_cuda and x_q.dtype == torch.int8 and summed_by_group(prod(x_q.shape[:-1]), weight)


def _finish(out: Tensor, sums: Tensor, scale_a: Tensor, bias: Tensor | None) -> None:
    """The epilogue, applied in place to fp32 sums."""
    sums.mul_(scale_a)
    out.copy_(sums if bias is None else sums.add_(bias.float()))


def _floating(x_q: Tensor) -> torch.dtype:
    """The type that represents activations exactly, and in which no sum of them overflows."""
    return torch.bfloat16 if x_q.is_cuda else torch.float32


def _by_weight_only(
    out: Tensor, x_q: Tensor, weight: Weight, scale_a: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    """`weight_only_mm` or `packed_fp4_mm` with the activations in a floating-point type: float32, which is exact, or
    `dtype`, to which they are rounded with their scales."""
    if dtype == torch.float32:
        return _finish(out, _floating_product(x_q.to(dtype), weight, None), scale_a, bias)
    return _write_product(out, widened(x_q, scale_a, dtype), weight, bias)


def _write_product(out: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """`weight_only_mm` or `packed_fp4_mm`, rounded to the type of ``out``."""
    if out.dtype == x.dtype:
        _floating_product(x, weight, bias, out)
        return
    sums = _floating_product(x, weight, None)
    out.copy_(sums if bias is None else sums + bias.float())


def _floating_product(x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if isinstance(weight, PackedFp4Weight):
        parts = (weight.q, weight.scale, weight.global_scale, bias, None, None)
        return fp4(x, *parts, weight.format, weight.n, weight.k, out=out)
    packed = (weight.q, weight.scale, weight.zero, None, None, bias)
    return weight_only(x, *packed, weight.bits, weight.n, weight.k, weight.group_size, -inf, inf, out=out)


def widened(x_q: Tensor, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit tokens ``[…, K]`` times their scales, ``[…, 1]`` or one per group of 128 columns, rounded once to a type,
    bfloat16 on CUDA.

    Products are in fp32; rows are aligned to 16 bytes, as kernels require.
    """
    result = aligned_rows(x_q, dtype)
    x, rows, scales = result.flatten(0, -2), x_q.flatten(0, -2), scale_a.flatten(0, -2).contiguous()
    if scales.shape[-1] > 1:
        x.copy_(rows.float().mul_(scales.repeat_interleave(GROUP, -1)[:, : rows.shape[-1]]))
    elif x.is_cuda:
        _core.widen_tokens(x, rows, scales)
    else:
        x.copy_(rows.float().mul_(scales))
    return result


def aligned_rows(x_q: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for `widened`."""
    k = x_q.shape[-1]
    return x_q.new_empty((*x_q.shape[:-1], -(-k // _ALIGNED) * _ALIGNED), dtype=dtype)[..., :k]


@explanation_of(w4a8_mm)
def explain(given: Arguments, *, terms: bool = False) -> str:
    x_q, scale_a, bias, out = given.x_q, given.scale_a, given.bias, given.out
    w = _expect(given.weight)
    expect_tensors(NAME, {"x_q": x_q, "scale_a": scale_a}, {"bias": bias, "out": out}, writes=False)
    result = _empty(x_q, w.n, given.out_dtype) if out is None else out
    call = Call(result, x_q, w, scale_a, bias)
    check(call, out is not None)
    m = prod(x_q.shape[:-1])
    if result.numel() == 0:
        return "nothing to launch: the output is empty"
    dtype = _floating(x_q)
    x, how = x_q.new_empty((m, w.k), dtype=dtype), f"activations as {str(dtype).removeprefix('torch.')}"
    if _has_groups(call):
        by_weight = explain_fp4(x, w) if isinstance(w, PackedFp4Weight) else explain_weight_only(x, w, terms=terms)
        return f"{how}, times their scales per group: {by_weight}"
    if not is_batch_invariant() and unpacked.fits(x_q.view(m, w.k), w):
        return unpacked.explanation("integers" if isinstance(w, PackedWeight) else "FP4 numbers")
    if isinstance(w, PackedFp4Weight):
        return f"{how}: {explain_fp4(x, w)}"
    if _multiplies_integers(x_q, w):
        return "CPU: int8 products of each group, summed in fp32"
    if _may_be_float8(x_q.view(m, w.k), w):
        padded_k = -(-w.k // PADDING) * PADDING
        scratch = x_q.new_empty((m, padded_k), dtype=torch.uint8)
        packed, numbers = (w.q, w.scale, w.zero), (w.n, w.k, w.group_size)
        rows = (result.view(m, w.n), x_q.view(m, w.k), scale_a.reshape(-1))
        ask = _core.explain_w4a8_mm_terms if terms else _core.explain_w4a8_mm
        explanation = ask(*rows, *packed, scratch, bias, *numbers)
        if not explanation.startswith("no "):
            return explanation
    return f"{how}: {explain_weight_only(x, w, terms=terms)}"


def _fake(x_q: Tensor, *rest: Any, out_dtype: torch.dtype) -> Tensor:
    n, k = rest[6], rest[7]
    if x_q.dtype not in ACTIVATIONS:
        raise ValueError(f"epiloq.{NAME}: x_q: expected int8 or float8_e4m3fn, got {x_q.dtype}")
    if x_q.ndim < 1:
        raise ValueError(f"epiloq.{NAME}: x_q: expected […, {k}], got a scalar")
    torch._check_value(x_q.shape[-1] == k, lambda: f"epiloq.{NAME}: x_q: expected {k} columns, got {list(x_q.shape)}")
    return _empty(x_q, n, out_dtype)


_TENSORS = "Tensor x_q, Tensor q, Tensor scale, Tensor? zero, Tensor? perm, Tensor scale_a, Tensor? bias"
_NUMBERS = "int n, int k, int group_size, str format='int', Tensor? global_scale=None"
register_product(NAME, f"{_TENSORS}, {_NUMBERS}", run, _fake, "ScalarType out_dtype")
