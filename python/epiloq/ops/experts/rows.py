"""Rows of a mixture of experts, one for each token and each of its experts: sorted by expert, and combined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct
from epiloq._torch.library import register
from epiloq.ops.quantizers.outputs import empty_q, empty_scale, expect_measure
from epiloq.ops.quantizers.quantize_fp8 import quantize_fp8
from epiloq.ops.quantizers.quantize_int8 import quantize_int8

MOST_SORTED_ROWS, MOST_EXPERTS = 16384, 1024
"""Of the kernel that sorts."""
COLUMN_MULTIPLE, MOST_GATHERED_COLUMNS = 8, 8192
"""Of the kernel that gathers."""

Sorted = tuple[Tensor, Tensor, Tensor, Tensor]


def sort_expert_rows(experts: Tensor, count: int) -> Sorted:
    """Sort rows by expert, stably, in one kernel. Rows whose expert is not from 0 to `count` - 1 come last.

    Args:
        experts: int64 ``[T, top_k]``, contiguous, of at most `MOST_SORTED_ROWS` elements: row i is for token
            ``i // top_k`` and expert ``experts.flatten()[i]``.
        count: number of experts, at most `MOST_EXPERTS`.

    Returns:
        order, tokens, places: int64 ``[T top_k]``: sorted row j is row ``order[j]`` and for ``tokens[j]``, and row i
            is sorted row ``places[i]``.
        ends: int32 ``[count]``, the ends of the experts' rows.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if direct((experts,)):
        return run_sort(experts, count)
    found: Sorted = torch.ops.epiloq.sort_expert_rows(experts, count)
    return found


def run_sort(experts: Tensor, count: int) -> Sorted:
    """`sort_expert_rows` for plain tensors."""
    if experts.is_cuda:
        made = _empty_sorted(experts, count)
        _core.sort_expert_rows(*made, experts)
        return made
    _core.check_sort_expert_rows(*_empty_sorted(experts, count), experts)
    flat = experts.flatten()
    expert, order = torch.where((flat >= 0) & (flat < count), flat, count).sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(count), right=True, out_int32=True)
    tokens = order.div(max(experts.shape[1], 1), rounding_mode="floor")
    return order, tokens, torch.empty_like(order).scatter_(0, order, torch.arange(len(order))), ends


def _empty_sorted(experts: Tensor, count: int) -> Sorted:
    rows = experts.numel()
    order, tokens, places = (experts.new_empty(rows) for _ in range(3))
    return order, tokens, places, experts.new_empty(count, dtype=torch.int32)


register(
    "sort_expert_rows",
    "sort_expert_rows(Tensor experts, int count) -> (Tensor, Tensor, Tensor, Tensor)",
    run_sort,
    _empty_sorted,
)


Gathered = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def gather_expert_rows(
    x: Tensor,
    experts: Tensor,
    count: int,
    *,
    dtype: torch.dtype | None = None,
    granularity: str = "token",
    group_size: int = 128,
    scale_layout: str = "row",
    pad_to: int = 1,
) -> Gathered:
    """Sort rows by expert as `sort_expert_rows` does, and copy each row's token to its sorted place, quantised if
    `dtype` is given. Up to 1024 rows take one kernel.

    Args:
        x: ``[T, H]`` float16 or bfloat16, contiguous rows, H a multiple of `COLUMN_MULTIPLE` and at most
            `MOST_GATHERED_COLUMNS`.
        experts, count: as for `sort_expert_rows`.
        dtype: torch.int8 (per token) or torch.float8_e4m3fn, or None for rows as they are.
        granularity, group_size, scale_layout, pad_to: as for `quantize_fp8`: "token", or "group" with groups of 32, 64,
            128 or 256.

    Returns:
        rows: ``[T top_k, H']``, the same values as `quantize_int8` (symmetric) or `quantize_fp8` of ``x[tokens]``;
            undefined for rows of no expert.
        scale: float32 ``[T top_k, 1]`` or ``[T top_k, ceil(H / group_size)]``; empty if `dtype` is None.
        tokens, places, ends: as from `sort_expert_rows`.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if dtype is not None:
        expect_measure("gather_expert_rows", dtype, granularity, group_size, False, scale_layout, pad_to)
    measure = (dtype or x.dtype, granularity, group_size, scale_layout, pad_to)
    if direct((x, experts)):
        return run_gather(x, experts, count, *measure)
    found: Gathered = torch.ops.epiloq.gather_expert_rows(x, experts, count, *measure)
    return found


def run_gather(x: Tensor, experts: Tensor, count: int, *measure: Any) -> Gathered:
    """`gather_expert_rows` for plain tensors; `measure` as for `_empty_gathered`."""
    dtype, granularity, group_size, _, pad_to = measure
    made = _empty_gathered(x, experts, count, *measure)
    if x.is_cuda:
        _core.gather_expert_rows(*made, x, experts, granularity, group_size)
        return made
    _core.check_gather_expert_rows(*made, x, experts, granularity, group_size)
    rows, scale = made[:2]
    _, tokens, places, ends = run_sort(experts, count)
    valid = slice(0, int(ends[-1]))
    taken = x[tokens[valid]]
    if dtype == x.dtype:
        rows[valid] = taken
    elif dtype == torch.int8:
        rows[valid], scale[valid], _ = quantize_int8(taken, pad_to=pad_to)
    else:
        q, found = quantize_fp8(taken, granularity=granularity, group_size=group_size, pad_to=pad_to)
        rows[valid].view(torch.uint8).copy_(q.view(torch.uint8))
        scale[valid] = found
    return rows, scale, tokens, places, ends


def _empty_gathered(
    x: Tensor,
    experts: Tensor,
    count: int,
    dtype: torch.dtype,
    granularity: str,
    group_size: int,
    scale_layout: str,
    pad_to: int,
) -> Gathered:
    _, tokens, places, ends = _empty_sorted(experts, count)
    width = x.shape[-1]
    if dtype == x.dtype:
        return x.new_empty(len(tokens), width), x.new_empty(0, dtype=torch.float32), tokens, places, ends
    gathered = x.new_empty_strided((len(tokens), width), (0, 1))  # for its shape
    q = empty_q("gather_expert_rows", gathered, dtype, width, pad_to)
    return q, empty_scale(gathered, width, granularity, group_size, scale_layout), tokens, places, ends


register(
    "gather_expert_rows",
    "gather_expert_rows(Tensor x, Tensor experts, int count, ScalarType dtype, str granularity, int group_size, "
    "str scale_layout, int pad_to) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_gather,
    _empty_gathered,
)


def combine_expert_rows(rows: Tensor, places: Tensor, weights: Tensor, count: Tensor | None = None) -> Tensor:
    """Each token's weighted sum of its rows, in float32 in the order of its experts, rounded once.

    Args:
        rows: ``[T top_k, H]`` float32, float16 or bfloat16, contiguous rows, sorted by expert.
        places: int64 ``[T top_k]``, contiguous, as returned by `sort_expert_rows`.
        weights: ``[T, top_k]`` float32 or of the dtype of `rows`, contiguous.
        count: int32, one element: sorted rows from this on belong to no expert, are not read and count as 0.

    Returns:
        ``[T, H]`` of the dtype of `rows`.

    For inference only: there is no derivative.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if direct((rows, places, weights), (count,)):
        return run_combine(rows, places, weights, count)
    combined: Tensor = torch.ops.epiloq.combine_expert_rows(rows, places, weights, count)
    return combined


def run_combine(rows: Tensor, places: Tensor, weights: Tensor, count: Tensor | None) -> Tensor:
    """`combine_expert_rows` for plain tensors."""
    out = _empty_combined(rows, places, weights, count)
    given = (out, rows, places, weights, count)
    if rows.is_cuda:
        _core.combine_expert_rows(*given)
        return out
    _core.check_combine_expert_rows(*given)
    if count is not None:
        rows = rows.masked_fill(torch.arange(len(rows)).unsqueeze(-1) >= count, 0)
    each = rows[places].view(*weights.shape, rows.shape[-1])
    # 16-bit rows times float32 weights give float32 in one pass.
    return out.copy_((each * weights.float().unsqueeze(-1)).sum(1))


def _empty_combined(rows: Tensor, places: Tensor, weights: Tensor, count: Tensor | None) -> Tensor:
    return rows.new_empty((weights.shape[0], *rows.shape[1:]))


register(
    "combine_expert_rows",
    "combine_expert_rows(Tensor rows, Tensor places, Tensor weights, Tensor? count) -> Tensor",
    run_combine,
    _empty_combined,
)
