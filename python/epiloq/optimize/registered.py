"""Registers epiloq's attention with transformers, also in another process that unpickles an optimised model."""

from __future__ import annotations

from typing import Any

from torch import nn

from epiloq.optimize.attention import NAMES, causal_mask, grouped_sdpa
from epiloq.optimize.sinks import NAME as SINKS
from epiloq.optimize.sinks import sink_attention, sink_mask

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

    for names, attend, mask in ((NAMES, grouped_sdpa, causal_mask), ((SINKS,), sink_attention, sink_mask)):
        for name in names:
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
