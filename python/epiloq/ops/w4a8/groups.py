"""`w4a8_mm` of int8 activations on the CPU: products of integers, one scale group after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import is_batch_invariant
from epiloq._torch.threads import threads_for
from epiloq.weights.packed_layout import parameters_of
from epiloq.weights.packed_weight import PackedWeight

# More tokens than these, for which products of groups are the faster ones; how few and how many columns a group may
# have; rows of the weight and tokens at a time, whose sums, one for each group, stay in the cache.
_FEW_TOKENS, _FEW_COLUMNS, _MOST_COLUMNS, _ROWS, TOKENS = 16, 16, 131071, 256, 64


def summed_by_group(m: int, weight: PackedWeight) -> bool:
    return not is_batch_invariant() and m > _FEW_TOKENS and _FEW_COLUMNS <= _length(weight) <= _MOST_COLUMNS


def _length(weight: PackedWeight) -> int:
    return weight.k if weight.group_size == -1 else min(weight.group_size, weight.k)


def sums_of_groups(x_q: Tensor, weight: PackedWeight) -> Tensor:
    """The sums ``[M, N]`` of int8 activations, in fp32: each group's is an exact int32 before its scale."""
    sums = x_q.new_empty((len(x_q), weight.n), dtype=torch.float32)
    x_q = _on_16_bytes(x_q)
    for first in range(0, weight.n, _ROWS):
        part = weight.row_slice(first, min(first + _ROWS, weight.n))
        integers, scale = part.integers(), parameters_of(part.scale)[: part.n].t().float()
        for begin in range(0, len(x_q), TOKENS):
            rows = slice(begin, begin + TOKENS)
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
