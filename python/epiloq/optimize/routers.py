"""Routers of mixtures of experts: scores, the choice of experts and their weights in one kernel, on a GPU.

Forms are recognised as in `structure`. The logits are the module's own product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epiloq._torch.tracing import is_exporting
from epiloq.ops.experts.select_experts import MOST_EXPERTS, MOST_PER_TOKEN, select_experts
from epiloq.optimize import structure
from epiloq.optimize.guards import wants_gradient

Routed = tuple[Tensor, Tensor, Tensor]

# Qwen3-MoE's and OLMoE's.
SOFTMAX = """\
hidden_states = hidden_states.reshape(-1, self.hidden_dim)
router_logits = F.linear(hidden_states, self.weight)
router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
if self.norm_topk_prob:
    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
router_top_value = router_top_value.to(router_logits.dtype)
router_scores = router_top_value
return (router_logits, router_scores, router_indices)"""

# Qwen3.5-MoE's.
NORMALIZED_SOFTMAX = SOFTMAX.replace("if self.norm_topk_prob:\n    router_top_value /=", "router_top_value /=")

# Mixtral's.
FLOAT_SOFTMAX = NORMALIZED_SOFTMAX.replace(
    "softmax(router_logits, dtype=torch.float, dim", "softmax(router_logits.float(), dim"
).replace("router_top_value = router_top_value.to(router_logits.dtype)\n", "")

# GPT-OSS's.
SOFTMAX_OF_CHOSEN = """\
router_logits = F.linear(hidden_states, self.weight, self.bias)
router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)
router_scores = torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)
return (router_logits, router_scores, router_indices)"""

# DeepSeek-V3's and GLM-4.5's.
SIGMOID_IN_GROUPS = """\
hidden_states = hidden_states.view(-1, self.hidden_dim)
router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
scores = router_logits.sigmoid()
scores_for_choice = scores + self.e_score_correction_bias
group_scores = scores_for_choice.view(-1, self.num_group, self.num_experts // self.num_group)\
.topk(2, dim=-1)[0].sum(dim=-1)
group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
group_mask = torch.zeros_like(group_scores)
group_mask.scatter_(1, group_idx, 1)
score_mask = group_mask.unsqueeze(-1).expand(-1, self.num_group, self.num_experts // self.num_group)\
.reshape(-1, self.num_experts)
scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float('-inf'))
topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
topk_weights = scores.gather(1, topk_indices)
if self.norm_topk_prob:
    denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
    topk_weights /= denominator
topk_weights = topk_weights * self.routed_scaling_factor
return (router_logits, topk_weights, topk_indices)"""


class _Form(NamedTuple):
    logits: Callable[[Any, Tensor], Tensor]
    options: Callable[[Any], dict[str, Any]]
    """Of `select_experts`, for a router."""
    in_float32: bool = False
    """Whether the weights of the experts are float32 for logits of another dtype."""


def _logits(router: Any, hidden_states: Tensor) -> Tensor:
    return nn.functional.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)


def _biased_logits(router: Any, hidden_states: Tensor) -> Tensor:
    return nn.functional.linear(hidden_states, router.weight, router.bias)


def _float_logits(router: Any, hidden_states: Tensor) -> Tensor:
    return nn.functional.linear(hidden_states.reshape(-1, router.hidden_dim).float(), router.weight.float())


def _as_configured(router: Any) -> dict[str, Any]:
    return {"normalize": bool(router.norm_topk_prob)}


def _normalized(_: Any) -> dict[str, Any]:
    return {"normalize": True}


def _of_chosen(_: Any) -> dict[str, Any]:
    return {"score": "softmax_of_chosen"}


def _of_groups(router: Any) -> dict[str, Any]:
    return {
        "score": "sigmoid",
        "bias": router.e_score_correction_bias.float(),
        "normalize": bool(router.norm_topk_prob),
        "epsilon": 1e-20,
        "factor": float(router.routed_scaling_factor),
        "groups": router.num_group,
        "top_groups": router.topk_group,
        "group_scores": 2,
    }


FORMS = {
    SOFTMAX: _Form(_logits, _as_configured),
    NORMALIZED_SOFTMAX: _Form(_logits, _normalized),
    FLOAT_SOFTMAX: _Form(_logits, _normalized, in_float32=True),
    SOFTMAX_OF_CHOSEN: _Form(_biased_logits, _of_chosen),
    SIGMOID_IN_GROUPS: _Form(_float_logits, _of_groups),
}


def fused_router(module: nn.Module) -> partial[Routed] | None:
    """A faster ``forward`` of a router of a known form; None for another module."""
    form = None if "forward" in vars(module) else FORMS.get(structure.body_of(type(module)) or "")
    return None if form is None else partial(route, module, form)


def route(router: Any, form: _Form, hidden_states: Tensor) -> Routed:
    """``forward`` of a router: logits, weights ``[T, top_k]`` and experts ``[T, top_k]``."""
    if not _has_kernel(router, hidden_states) or wants_gradient(hidden_states, router.weight) or is_exporting():
        return type(router).forward(router, hidden_states)  # type: ignore[no-any-return]
    logits = form.logits(router, hidden_states)
    dtype = torch.float32 if form.in_float32 else logits.dtype
    weights, experts = select_experts(logits, router.top_k, **form.options(router), dtype=dtype)
    return logits, weights, experts


def _has_kernel(router: Any, hidden_states: Tensor) -> bool:
    return hidden_states.is_cuda and router.weight.shape[0] <= MOST_EXPERTS and router.top_k <= MOST_PER_TOKEN
