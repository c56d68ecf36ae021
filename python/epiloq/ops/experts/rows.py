"""Rows of a mixture of experts, one for each token and each of its experts: sorted by expert, and combined."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.library import direct, register

MOST_SORTED_ROWS, MOST_EXPERTS = 16384, 1024
"""Of the kernel that sorts."""

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
