"""A router's choice of experts, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct
from epiloq._torch.library import register

_NAME = "select_experts"
MOST_EXPERTS, MOST_PER_TOKEN = 1024, 32
"""Of the kernel; checked on a CPU, too."""


def select_experts(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    normalize: bool = False,
    epsilon: float = 0.0,
    factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_scores: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest scores for each token, and their weights; computed in float32.

    Args:
        logits: ``[T, E]`` float32, float16 or bfloat16, contiguous rows.
        top_k: experts per token.
        score: "softmax" over all experts, "sigmoid" of each logit, or "softmax_of_chosen": experts are chosen by their
            logits and weighted by softmax over those chosen.
        bias: float32 ``[E]``, added to scores for the choice, not for the weights.
        normalize, epsilon: divide the weights by their sum plus `epsilon`.
        factor: multiplies the weights.
        groups, top_groups, group_scores: choose only experts of the `top_groups` of `groups` equal ranges of experts
            that have the largest sum of their `group_scores` (1 or 2) largest scores.
        dtype: of the weights, that of `logits` (default) or float32.

    Returns:
        Weights ``[T, top_k]`` and experts, int64 ``[T, top_k]``, by descending score, of equal ones the first.

    For inference only: there is no derivative.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    numbers = (score, bias, normalize, epsilon, factor, groups, top_groups, group_scores, dtype or logits.dtype)
    if direct((logits,), (bias,)):
        return run(logits, top_k, *numbers)
    chosen: tuple[Tensor, Tensor] = torch.ops.epiloq.select_experts(logits, top_k, *numbers)
    return chosen


def run(
    logits: Tensor,
    top_k: int,
    score: str,
    bias: Tensor | None,
    normalize: bool,
    epsilon: float,
    factor: float,
    groups: int,
    top_groups: int,
    group_scores: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`select_experts` for plain tensors."""
    weights, experts = _empty(logits, top_k, dtype)
    given = (weights, experts, logits, bias, score, normalize, epsilon, factor, groups, top_groups, group_scores)
    if logits.is_cuda:
        _core.select_experts(*given)
        return weights, experts
    _core.check_select_experts(*given)
    scores = logits.float()
    if score != "softmax_of_chosen":
        scores = scores.softmax(-1) if score == "softmax" else scores.sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > 1:
        of_groups = choice.unflatten(-1, (groups, -1))
        best = of_groups.topk(group_scores, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros(len(logits), groups, dtype=torch.bool).scatter_(1, best[:, :top_groups], True)
        choice = of_groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    experts.copy_(choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k])
    chosen = scores.gather(1, experts)
    if score == "softmax_of_chosen":
        chosen = chosen.softmax(-1)
    if normalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + epsilon)
    weights.copy_(chosen * factor)
    return weights, experts


def _empty(logits: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _fake(logits: Tensor, top_k: int, *others: object) -> tuple[Tensor, Tensor]:
    dtype = others[-1]
    assert isinstance(dtype, torch.dtype)
    return _empty(logits, top_k, dtype)


register(
    _NAME,
    f"{_NAME}(Tensor logits, int top_k, str score, Tensor? bias, bool normalize, float epsilon, float factor, "
    "int groups, int top_groups, int group_scores, ScalarType dtype) -> (Tensor, Tensor)",
    run,
    _fake,
)
