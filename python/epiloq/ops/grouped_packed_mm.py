"""`weight_only_mm` and `w4a8_mm` for a mixture of experts."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, expect_tensors, is_batch_invariant, mark_written, parts_of
from epiloq._torch.checks import Arguments, explanation_of
from epiloq._torch.library import register_product
from epiloq.ops.checks.w4a8_mm import ACTIVATIONS, Weight, check_out_dtype, check_parts, check_weight, groups_of
from epiloq.ops.experts import few_rows, matrices
from epiloq.ops.w4a8_mm import aligned_rows, widened
from epiloq.ops.w4a8_mm import explain as explain_w4a8
from epiloq.ops.w4a8_mm import run as w4a8
from epiloq.ops.weight_only_mm import explain as explain_weight_only
from epiloq.ops.weight_only_mm import on_16_bytes
from epiloq.ops.weight_only_mm import run as weight_only
from epiloq.weights.fp4 import FLOATS
from epiloq.weights.packed_fp4_weight import PackedFp4Weight
from epiloq.weights.packed_weight import PackedWeight
from epiloq.weights.tensor_checks import check_apart, check_memory, check_rows, check_written, described, refuse

_NAME = "grouped_packed_mm"
# Tensors that some kinds of weights have.
_OPTIONAL = ("zero", "offset", "global_scale")


def grouped_packed_mm(
    x: Tensor,
    weight: Weight,
    scale_a: Tensor | None = None,
    *,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`weight_only_mm` (or `w4a8_mm` with ``scale_a``) for a mixture of experts: each row times its expert's matrix.

    On CUDA one kernel multiplies all experts, and reads ``offs`` or ``masked_m`` on the device, for 4 bits in
    groups of 32, 64 or 128 times a power of two, for 8 bits in groups of the latter, without real offsets, and for
    FP4. Quantised rows and their scales are converted to bfloat16. Otherwise, with batch invariance (not for FP4),
    and outside a CUDA graph for more than 64 rows R per expert on average if ``R N K`` exceeds a limit, the experts are
    multiplied one by one with those operations, and their numbers of rows are read on the host, which synchronises
    with the GPU. The limit is 5e9 (FP4: 2.5e10). On SM90, for up to 512 experts and where the scales have x's dtype or
    the weight is FP4, there is none, or with ``scale_a`` 3e10. The bounds are those of the operations, see
    docs/numerics.md.

    Args:
        x: with ``offs`` ``[M, K]``, rows sorted by expert; with ``masked_m`` ``[E, M, K]``. float16, bfloat16 or
            float32, contiguous rows; with ``scale_a`` int8 or float8_e4m3fn.
        weight: ``[E N, K]``, the experts' matrices stacked, N a multiple of 16, not in activation order. Or FP4, with
            none, one or E global scales, which needs ``scale_a`` (`packed_fp4_mm` multiplies floating-point rows).
        scale_a: float32, one per row, ``[M, 1]`` or ``[E, M, 1]``, or one per row and group of 128 columns,
            ``[M, ceil(K / 128)]`` or ``[E, M, ceil(K / 128)]``.
        offs: int32 ``[E]``, the ends of the experts' rows, ascending, as for `grouped_mm`. This is not checked where
            they are read on the device; rows are then unwritten or wrong.
        masked_m: int32 ``[E]``, the number of valid rows of each expert.
        out_dtype: with ``scale_a`` as for `w4a8_mm`, bfloat16 by default; otherwise x's dtype.
        out: ``[M, N]`` or ``[E, M, N]``, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[M, N]`` or ``[E, M, N]``. Rows that belong to no expert are not written.

    Raises:
        ValueError: an argument is invalid, or not exactly one of ``offs`` and ``masked_m`` is given.
        TypeError: an argument is not a tensor, or ``weight`` neither a `PackedWeight` nor a `PackedFp4Weight`.
        NotImplementedError: in a backward pass; the operation has no derivative.
    """
    _expect(weight, scale_a)
    if (offs is None) == (masked_m is None):
        refuse(_NAME, "offs", "either offs or masked_m", "neither" if offs is None else "both")
    if scale_a is not None:
        check_weight(weight, _NAME)
    w, (format, bits) = weight, _kind_of(weight)
    zero, offset, factor = (getattr(w, name, None) for name in _OPTIONAL)
    arguments = (x, w.q, w.scale, zero, offset, scale_a, offs, masked_m, bits, w.n, w.k, w.group_size, format, factor)
    if out_dtype is None:
        dtype = x.dtype if scale_a is None and isinstance(x, Tensor) else torch.bfloat16
    else:
        dtype = out_dtype
    if not direct((x, w.q, w.scale), (zero, offset, factor, scale_a, offs, masked_m, out)):
        optional = {"scale_a": scale_a, "offs": offs, "masked_m": masked_m, "out": out}
        optional |= parts_of(w, *(name for name in _OPTIONAL if hasattr(w, name)))
        return dispatched(_NAME, {"x": x, **parts_of(w, "q", "scale")}, optional, arguments, out_dtype=dtype)
    return run(*arguments, out_dtype=dtype, out=out)


@torch.no_grad()
def run(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    scale_a: Tensor | None,
    offs: Tensor | None,
    masked_m: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    format: str = "int",
    global_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`grouped_packed_mm` for plain tensors, with the weight's tensors as separate arguments."""
    counts = masked_m if offs is None else offs
    assert counts is not None
    read = {"x": x, "scale_a": scale_a, "masked_m" if offs is None else "offs": counts}
    read |= {"weight.q": q, "weight.scale": scale, "weight.zero": zero, "weight.offset": offset}
    read |= {"weight.global_scale": global_scale}
    for name, tensor in (*read.items(), ("out", out)):
        if tensor is not None:
            check_memory(name, tensor, x.device, _NAME)
    experts = _checked_experts(counts, n, x, masked_m is not None, k)
    if out is not None:
        _check_out(out, (*x.shape[:-1], n // experts))
    dtype = out_dtype if out is None else out.dtype
    _check_types(x, scale_a, dtype, "out_dtype" if out is None else "out")
    if out is not None:
        check_apart(out, read, _NAME)
    result = _empty(x, n // experts, dtype) if out is None else out
    whole: Weight = PackedWeight(q, scale, zero, offset, None, bits, n, k, group_size)
    if format != "int":
        whole = PackedFp4Weight(q, scale, global_scale, format, n, k)
    check_parts(whole, x.device, experts, _NAME)
    if not (_has_kernel(x, whole, scale_a, experts) and _by_kernel(result, x, whole, scale_a, counts)):
        _one_by_one(result, x, whole, scale_a, counts)
    if out is not None:
        mark_written(out)
    return result


def _checked_experts(counts: Tensor, n: int, x: Tensor, masked: bool, k: int) -> int:
    """Number of experts."""
    experts = matrices.number_of(_NAME, x, n, k, counts, masked)
    check_rows("x", x[0] if masked else x, _NAME)  # experts' rows may lie apart
    return experts


def _check_types(x: Tensor, scale_a: Tensor | None, dtype: torch.dtype, argument: str) -> None:
    """Raise ValueError unless rows, their scales, and the output's type, which an argument gives, match."""
    if scale_a is not None:
        if x.dtype not in ACTIVATIONS:
            refuse(_NAME, "x", "int8 or float8_e4m3fn with scale_a", x.dtype)
        shapes = [[*x.shape[:-1], scales] for scales in sorted({1, groups_of(x.shape[-1])})]
        if list(scale_a.shape) not in shapes or scale_a.dtype != torch.float32:
            wanted = " or ".join(map(str, shapes))
            refuse(_NAME, "scale_a", f"float32 {wanted}", f"{scale_a.dtype} {list(scale_a.shape)}")
        check_out_dtype(x, dtype, _NAME, argument)
    elif x.dtype not in FLOATS:
        refuse(_NAME, "x", "float32, float16 or bfloat16 without scale_a", described(x))
    elif dtype != x.dtype:
        refuse(_NAME, argument, f"x's {x.dtype} without scale_a", dtype)


def _check_out(out: Tensor, shape: tuple[int, ...]) -> None:
    if out.shape != shape:
        refuse(_NAME, "out", list(shape), list(out.shape))
    check_written(out if out.ndim == 2 else out[0], shape[-2:], _NAME)


def _expect(weight: object, scale_a: Tensor | None) -> None:
    """Raise TypeError or ValueError for a weight that is not supported."""
    if isinstance(weight, PackedFp4Weight):
        if scale_a is None:
            refuse(_NAME, "scale_a", "the rows' scales with FP4 (packed_fp4_mm multiplies floating-point rows)", "None")
    elif not isinstance(weight, PackedWeight):
        got = type(weight).__name__
        raise TypeError(f"epiloq.{_NAME}: weight: expected a PackedWeight or a PackedFp4Weight, got {got}")
    elif weight.perm is not None:
        refuse(_NAME, "weight.perm", "None: no activation order", "a permutation")


def _kind_of(weight: Weight) -> tuple[str, int]:
    """Format and bits, as kernels and the operator take them."""
    return (weight.format, 4) if isinstance(weight, PackedFp4Weight) else ("int", weight.bits)


def _has_kernel(x: Tensor, weight: Weight, scale_a: Tensor | None, experts: int) -> bool:
    """Whether one kernel multiplies all experts, if it supports their format."""
    if not x.is_cuda:
        return False
    if isinstance(weight, PackedFp4Weight):
        if is_batch_invariant():  # the kernel is batch-invariant for any number of rows
            return True
    elif weight.bits not in (4, 8) or weight.offset is not None or is_batch_invariant():
        return False
    format, bits = _kind_of(weight)
    same_type = weight.scale.dtype == (x.dtype if scale_a is None else torch.bfloat16)
    kind: dict[str, Any] = {"format": format, "bits": bits, "group_size": weight.group_size, "same_type": same_type}
    return few_rows.takes_one_kernel(x, weight.n // experts, experts, scale_a is not None, **kind)


def _by_kernel(
    out: Tensor, x: Tensor, weight: Weight, scale_a: Tensor | None, counts: Tensor, explained: bool = False
) -> Any:
    """Whether a kernel computed the product or, for `explain`, which one would."""
    if explained:
        # Nothing is launched, so the values of the rows do not matter.
        x = x if scale_a is None else aligned_rows(x, torch.bfloat16)
    else:
        x = on_16_bytes(x) if scale_a is None else widened(x, scale_a, torch.bfloat16)
    result = out if out.dtype == x.dtype else torch.empty_like(out, dtype=x.dtype)
    zero, offset, factor = (getattr(weight, name, None) for name in _OPTIONAL)
    factor = matrices.each(factor, counts.numel())
    tensors = (result, x, weight.q, weight.scale, zero, offset, None, factor, counts, x.ndim == 3)
    numbers = (*_kind_of(weight), weight.n, weight.k, weight.group_size)
    if explained:
        return _core.explain_grouped_packed_mm(*tensors, *numbers)
    taken = _core.grouped_packed_mm(*tensors, *numbers)
    if taken and result is not out:
        # Rows without an expert keep their contents.
        places = torch.arange(out.shape[-2], device=out.device)
        written = places < counts[-1] if out.ndim == 2 else places < counts[:, None]
        torch.where(written.unsqueeze(-1), result.to(out.dtype), out, out=out)
    return taken


def _one_by_one(out: Tensor, x: Tensor, weight: Weight, scale_a: Tensor | None, counts: Tensor) -> None:
    rows = weight.n // counts.numel()
    for expert, place in matrices.places(_NAME, counts, x):
        part = weight.row_slice(expert * rows, (expert + 1) * rows)
        _product(out[place], x[place], part, None if scale_a is None else scale_a[place])


def _product(out: Tensor, x: Tensor, weight: Weight, scale_a: Tensor | None) -> None:
    w, numbers = weight, (weight.n, weight.k, weight.group_size)
    if isinstance(w, PackedFp4Weight):
        assert scale_a is not None  # checked before, for FP4 weights
        w4a8(x, w.q, w.scale, None, None, scale_a, None, *numbers, w.format, w.global_scale, out=out)
    elif scale_a is None:
        weight_only(x, w.q, w.scale, w.zero, w.offset, None, None, w.bits, *numbers, -inf, inf, out=out)
    else:
        w4a8(x, w.q, w.scale, w.zero, None, scale_a, None, *numbers, out=out)


def _empty(x: Tensor, n: int, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


@explanation_of(grouped_packed_mm)
def explain(call: Arguments) -> str:
    """Of an expert that has all rows, if experts are multiplied one after the other."""
    x, weight, scale_a, offs, masked_m = call.x, call.weight, call.scale_a, call.offs, call.masked_m
    out_dtype, out = call.out_dtype, call.out
    _expect(weight, scale_a)
    counts = offs if masked_m is None else masked_m
    expect_tensors(_NAME, {"x": x, "offs or masked_m": counts}, {"scale_a": scale_a, "out": out}, writes=False)
    assert counts is not None
    experts = _checked_experts(counts, weight.n, x, masked_m is not None, weight.k)
    if _has_kernel(x, weight, scale_a, experts):
        result = _empty(x, weight.n // experts, out_dtype or torch.bfloat16)
        text = str(_by_kernel(result, x, weight, scale_a, counts, explained=True))
        if not text.startswith("no kernel"):
            return text if scale_a is None else f"activations as bfloat16: {text}{_converted(out_dtype, out)}"
    part, rows = weight.row_slice(0, weight.n // experts), x.flatten(0, -2)
    scales = None if scale_a is None else scale_a.flatten(0, -2)
    if scales is not None:
        text = explain_w4a8(rows, part, scales)
    else:
        assert isinstance(part, PackedWeight)
        text = explain_weight_only(rows, part)
    return f"one expert after the other: {text}"


def _converted(out_dtype: torch.dtype | None, out: Tensor | None) -> str:
    """Describe, for `explain`, the conversion that follows a product in bfloat16."""
    dtype = out.dtype if out is not None else out_dtype or torch.bfloat16
    return "" if dtype == torch.bfloat16 else f", then rounded to {str(dtype).removeprefix('torch.')}"


def _fake(x: Tensor, *rest: Any, out_dtype: torch.dtype) -> Tensor:
    counts = rest[6] if rest[5] is None else rest[5]
    return _empty(x, rest[8] // counts.shape[0], out_dtype)


_TENSORS = "Tensor x, Tensor q, Tensor scale, Tensor? zero, Tensor? offset, Tensor? scale_a, Tensor? offs, "
_NUMBERS = "int bits, int n, int k, int group_size, str format='int', Tensor? global_scale=None"
_ARGUMENTS = f"{_TENSORS}Tensor? masked_m, {_NUMBERS}"
register_product(_NAME, _ARGUMENTS, run, _fake, "ScalarType out_dtype")
