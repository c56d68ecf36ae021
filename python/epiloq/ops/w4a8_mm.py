"""Products of 8-bit activations with 4-bit weights."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.library import (
    direct,
    expect_tensors,
    is_batch_invariant,
    mark_written,
    parts_of,
    refuse_backward,
    register_product,
)
from epiloq._torch.threads import threads_for
from epiloq.ops import w4a8_unpacked
from epiloq.ops.checks.w4a8_mm import ACTIVATIONS, NAME, Call, check, check_out_dtype, check_weight
from epiloq.ops.weight_only_mm import explain as explain_weight_only
from epiloq.ops.weight_only_mm import run as weight_only
from epiloq.weights.packed_layout import PADDING, parameters_of
from epiloq.weights.packed_weight import PackedWeight

# Elements of activations, or of a result, that are in fp32 at a time.
_AT_ONCE = 1 << 24
# int8 products of groups on the CPU: more tokens than these, for which they are the faster ones; how few and how many
# columns a group may have; rows of the weight and tokens at a time, whose sums, one for each group, stay in the cache.
_FEW_TOKENS, _FEW_COLUMNS, _MOST_COLUMNS, _ROWS, _TOKENS = 16, 16, 131071, 256, 64
# Elements of 16 bits in 16 bytes.
_ALIGNED = 8
# Tokens from which the float8 kernel of SM90 is the faster one: for fewer, reading the weight takes longest.
MANY_TOKENS = 256


def w4a8_mm(
    x_q: Tensor,
    weight: PackedWeight,
    scale_a: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """``scale_a * sum over groups g of scale[n, g] * (x_q @ (q - zero).T)_g + bias``: 8-bit by 4-bit products.

    ``q``, ``zero`` and ``scale`` are the weight's, see `epiloq.PackedWeight`. Every ``x_q`` and ``q - zero`` is
    multiplied without rounding; sums and epilogue are in fp32, with one rounding to the output's type. On CUDA many
    tokens are multiplied in 8 bits: with scales per channel the weight is unpacked for `scaled_mm`, and float8 times a
    symmetric weight in groups has a kernel for SM90. Otherwise, for few tokens (which are limited by reading the
    weight) and with `set_batch_invariant`, activations and their scales are converted to bfloat16 for `weight_only_mm`.
    docs/numerics.md has the bounds.

    Args:
        x_q: float8_e4m3fn or int8 ``[…, M, K]``, as returned by `quantize_fp8` per token or a symmetric
            `quantize_int8`; contiguous rows; leading dimensions must collapse into one.
        weight: ``[N, K]`` with 4 bits, symmetric or with integer zero points; any group size and scale type, including
            scales per channel (groups of whole rows). ``x_q`` is permuted once if the weight is in activation order.
        scale_a: float32, one element or one per token: ``[M]``, ``[M, 1]`` or ``[…, M, 1]``.
        bias: ``[N]`` in the output's dtype, added in fp32.
        out_dtype: float16 or bfloat16, on the CPU also float32; ``out``'s dtype if ``out`` is given.
        out: ``[…, M, N]``, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]``. NaN in a token or its scale affects only that token's outputs, NaN in a weight's scale only that
        column's.

    Raises:
        ValueError: an argument is invalid; the message names it. Weights with other bit widths or with real offsets
            are refused.
        TypeError: an argument is not a tensor, or ``weight`` no `PackedWeight`.
        NotImplementedError: in a backward pass; the operation has no derivative.
    """
    w = _expect(weight)
    numbers = (w.n, w.k, w.group_size)
    if not direct((x_q, w.q, w.scale, scale_a), (w.zero, w.perm, bias, out)):
        required = {"x_q": x_q, "scale_a": scale_a, **parts_of(w, "q", "scale")}
        optional = {**parts_of(w, "zero", "perm"), "bias": bias, "out": out}
        expect_tensors(NAME, required, optional, writes=out is not None)
        arguments = (x_q, w.q, w.scale, w.zero, w.perm, scale_a, bias, *numbers)
        if out is None:
            return refuse_backward(NAME, torch.ops.epiloq.w4a8_mm(*arguments, out_dtype=out_dtype))
        torch.ops.epiloq.w4a8_mm_out(*arguments, out=out)
        return out
    return run(x_q, w.q, w.scale, w.zero, w.perm, scale_a, bias, *numbers, out_dtype=out_dtype, out=out)


def _expect(weight: object) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"epiloq.{NAME}: weight: expected a PackedWeight, got {type(weight).__name__}")
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
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`w4a8_mm` for plain tensors, with the weight's tensors as separate arguments."""
    result = _empty(x_q, n, out_dtype) if out is None else out
    weight = PackedWeight(q, scale, zero, None, perm, 4, n, k, group_size)
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
    if weight.perm is not None:
        # As bytes, for not every backend gathers float8.
        x_q = x_q.view(torch.uint8).index_select(-1, weight.perm).view(x_q.dtype)
    scale_a = call.scale_a.reshape(-1, 1).contiguous()
    scale_a = scale_a if len(scale_a) == m else scale_a.repeat(m, 1)
    if not is_batch_invariant() and w4a8_unpacked.fits(x_q, weight):
        return w4a8_unpacked.multiply(out, x_q, weight, scale_a, call.bias)
    if _may_be_float8(x_q) and _by_float8_kernel(out, x_q, call):
        return
    step = max(_AT_ONCE // max(weight.n, weight.k), _TOKENS)
    for first in range(0, m, step):
        rows = slice(first, first + step)
        _product(out[rows], x_q[rows], weight, scale_a[rows], call.bias)


def _may_be_float8(x_q: Tensor) -> bool:
    return not is_batch_invariant() and x_q.is_cuda and x_q.dtype == torch.float8_e4m3fn and len(x_q) >= MANY_TOKENS


def _by_float8_kernel(out: Tensor, x_q: Tensor, call: Call) -> bool:
    """On SM90, with weights converted to float8 in registers; False if there is no such kernel."""
    weight = call.weight
    padded_k = -(-weight.k // PADDING) * PADDING
    scratch = x_q.new_empty((len(x_q), padded_k), dtype=torch.uint8)
    packed, numbers = (weight.q, weight.scale, weight.zero), (weight.n, weight.k, weight.group_size)
    return _core.w4a8_mm(out, x_q, call.scale_a.reshape(-1), *packed, scratch, call.bias, *numbers)


def _product(out: Tensor, x_q: Tensor, weight: PackedWeight, scale_a: Tensor, bias: Tensor | None) -> None:
    """A slice of the tokens, in the packed order of columns."""
    if not x_q.is_cuda and x_q.dtype == torch.int8 and _summed_by_group(len(x_q), weight):
        _finish(out, _sums_of_groups(x_q, weight), scale_a, bias)
    else:
        _by_weight_only(out, x_q, weight, scale_a, bias, _floating(x_q))


def _finish(out: Tensor, sums: Tensor, scale_a: Tensor, bias: Tensor | None) -> None:
    """The epilogue, applied in place to fp32 sums."""
    sums.mul_(scale_a)
    out.copy_(sums if bias is None else sums.add_(bias.float()))


def _floating(x_q: Tensor) -> torch.dtype:
    """The type that represents activations exactly, and in which no sum of them overflows."""
    return torch.bfloat16 if x_q.is_cuda else torch.float32


def _by_weight_only(
    out: Tensor, x_q: Tensor, weight: PackedWeight, scale_a: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    """`weight_only_mm` with the activations in a floating-point type: float32, which is exact, or `dtype`, to which
    they are rounded with their scales."""
    packed = (weight.q, weight.scale, weight.zero, None, None)
    numbers = (weight.bits, weight.n, weight.k, weight.group_size)
    if dtype == torch.float32:
        return _finish(out, weight_only(x_q.to(dtype), *packed, None, *numbers, -inf, inf), scale_a, bias)
    x = widened(x_q, scale_a, dtype)
    if out.dtype == dtype:
        weight_only(x, *packed, bias, *numbers, -inf, inf, out=out)
        return None
    sums = weight_only(x, *packed, None, *numbers, -inf, inf)
    out.copy_(sums if bias is None else sums + bias.float())
    return None


def widened(x_q: Tensor, scale_a: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit tokens ``[…, K]`` times their scales ``[…, 1]``, rounded once to a type, bfloat16 on CUDA.

    Products are in fp32; rows are aligned to 16 bytes, as kernels require.
    """
    result = aligned_rows(x_q, dtype)
    x, rows, scales = result.flatten(0, -2), x_q.flatten(0, -2), scale_a.flatten(0, -2).contiguous()
    if x.is_cuda:
        _core.widen_tokens(x, rows, scales)
    else:
        x.copy_(rows.float().mul_(scales))
    return result


def aligned_rows(x_q: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for `widened`."""
    k = x_q.shape[-1]
    return x_q.new_empty((*x_q.shape[:-1], -(-k // _ALIGNED) * _ALIGNED), dtype=dtype)[..., :k]


def _summed_by_group(m: int, weight: PackedWeight) -> bool:
    return not is_batch_invariant() and m > _FEW_TOKENS and _FEW_COLUMNS <= _length(weight) <= _MOST_COLUMNS


def _length(weight: PackedWeight) -> int:
    return weight.k if weight.group_size == -1 else min(weight.group_size, weight.k)


def _sums_of_groups(x_q: Tensor, weight: PackedWeight) -> Tensor:
    """The sums ``[M, N]`` of int8 activations, in fp32: each group's is an exact int32 before its scale."""
    sums = x_q.new_empty((len(x_q), weight.n), dtype=torch.float32)
    x_q = _on_16_bytes(x_q)
    for first in range(0, weight.n, _ROWS):
        part = weight.row_slice(first, min(first + _ROWS, weight.n))
        integers, scale = part.integers(), parameters_of(part.scale)[: part.n].t().float()
        for begin in range(0, len(x_q), _TOKENS):
            rows = slice(begin, begin + _TOKENS)
            _add_groups(sums[rows, first : first + _ROWS], x_q[rows], integers, scale, _length(weight))
    return sums


def _add_groups(out: Tensor, x_q: Tensor, integers: Tensor, scale: Tensor, length: int) -> None:
    """A slice of tokens times a slice of rows: whole groups in one batch of products, then a short last one."""
    k = integers.shape[1]
    whole = k // length
    one, threads = scale.new_ones(1), threads_for(x_q)
    groups = scale.new_empty((whole, *out.shape))
    a = x_q[:, : whole * length].unflatten(1, (whole, length)).transpose(0, 1)
    b = integers[:, : whole * length].unflatten(1, (whole, length)).permute(1, 2, 0)
    _core.scaled_bmm_on_host(groups, a, b, one, scale[:whole].unsqueeze(1).contiguous(), None, threads)
    torch.sum(groups, 0, out=out)
    if k % length:
        rest = scale.new_empty(out.shape)
        a, b = (_on_16_bytes(rows[:, whole * length :]) for rows in (x_q, integers))
        _core.scaled_mm_on_host(rest, a, b.t(), one, scale[whole].contiguous(), None, None, None, threads)
        out.add_(rest)


def _on_16_bytes(rows: Tensor) -> Tensor:
    return rows if rows.data_ptr() % 16 == 0 else rows.clone(memory_format=torch.contiguous_format)


def explain(
    x_q: Tensor,
    weight: PackedWeight,
    scale_a: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> str:
    """`epiloq.explain` for `w4a8_mm`, given the arguments of a call."""
    w = _expect(weight)
    expect_tensors(NAME, {"x_q": x_q, "scale_a": scale_a}, {"bias": bias, "out": out}, writes=False)
    result = _empty(x_q, w.n, out_dtype) if out is None else out
    check(Call(result, x_q, w, scale_a, bias), out is not None)
    m = prod(x_q.shape[:-1])
    if result.numel() == 0:
        return "nothing to launch: the output is empty"
    if not x_q.is_cuda and x_q.dtype == torch.int8 and _summed_by_group(m, w):
        return "CPU: int8 products of each group, summed in fp32"
    if not is_batch_invariant() and w4a8_unpacked.fits(x_q.view(m, w.k), w):
        return "the weight's integers unpacked to 8 bits, then a product of 8-bit operands"
    if _may_be_float8(x_q.view(m, w.k)):
        padded_k = -(-w.k // PADDING) * PADDING
        scratch = x_q.new_empty((m, padded_k), dtype=torch.uint8)
        packed, numbers = (w.q, w.scale, w.zero), (w.n, w.k, w.group_size)
        rows = (result.view(m, w.n), x_q.view(m, w.k), scale_a.reshape(-1))
        explanation = _core.explain_w4a8_mm(*rows, *packed, scratch, bias, *numbers)
        if not explanation.startswith("no "):
            return explanation
    dtype = _floating(x_q)
    explanation = explain_weight_only(x_q.new_empty((m, w.k), dtype=dtype), w)
    return f"activations as {str(dtype).removeprefix('torch.')}: {explanation}"


def _fake(x_q: Tensor, *rest: Any, out_dtype: torch.dtype) -> Tensor:
    n, k = rest[6], rest[7]
    if x_q.dtype not in ACTIVATIONS:
        raise ValueError(f"epiloq.{NAME}: x_q: expected int8 or float8_e4m3fn, got {x_q.dtype}")
    if x_q.ndim < 1:
        raise ValueError(f"epiloq.{NAME}: x_q: expected [.., {k}], got a scalar")
    torch._check_value(x_q.shape[-1] == k, lambda: f"epiloq.{NAME}: x_q: expected {k} columns, got {list(x_q.shape)}")
    return _empty(x_q, n, out_dtype)


_TENSORS = "Tensor x_q, Tensor q, Tensor scale, Tensor? zero, Tensor? perm, Tensor scale_a, Tensor? bias"
register_product(NAME, f"{_TENSORS}, int n, int k, int group_size", run, _fake, "ScalarType out_dtype")
