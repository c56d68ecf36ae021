"""Registers epiloq's attention with transformers, also in another process that unpickles an optimised model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from epiloq.optimize import attention, sinks

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **dict.fromkeys(attention.NAMES, (attention.grouped_sdpa, attention.causal_mask)),
    **dict.fromkeys(sinks.NAMES, (sinks.sink_attention, sinks.sink_mask)),
}
"""By name: attention, and what makes its mask."""

# Attribute of the modules whose configuration names one of the functions.
_REGISTERED = "_epiloq_attention"


class Registered:
    """Kept by a model, so that unpickling the model registers the functions: for an unknown name transformers raises an
    error, or makes no mask."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return registered, ()


def registered() -> Registered:
    """Register the functions."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, (attend, mask) in FUNCTIONS.items():
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)
    return Registered()


def switch_(model: nn.Module, name: str) -> None:
    """Let a transformers model attend by the function of this name.

    Its ``set_attn_implementation`` would also switch models inside that attend in another way, and raise for those that
    do not attend at all.
    """
    config: Any = model.config
    config._attn_implementation_internal = name
    kept = registered()
    for module in model.modules():
        if getattr(module, "config", None) is config:
            vars(module)[_REGISTERED] = kept
