"""Weights that hooks compute before each call (torch.nn.utils' older reparametrisations, pruning)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# What each kind of hook sets, and how, without an input and without a change to its own state.
_KINDS: dict[type, Callable[[Any, nn.Module], None]] = {
    WeightNorm: lambda hook, module: setattr(module, hook.name, hook.compute_weight(module)),
    SpectralNorm: lambda hook, module: setattr(module, hook.name, hook.compute_weight(module, False)),
    BasePruningMethod: lambda hook, module: setattr(module, hook._tensor_name, hook.apply_mask(module)),
}


def refresh(name: str, module: nn.Module) -> None:
    """Compute what hooks compute before each call of `module`, which may be stale after loading.

    Raises ValueError, from the class `name`, where a hook of another kind computes the weight or the bias.
    """
    computed = [part for part in ("weight", "bias") if part in module.__dict__]
    if not computed:
        return
    unknown = []
    for hook in module._forward_pre_hooks.values():
        kind = next((kind for kind in _KINDS if isinstance(hook, kind)), None)
        if kind is None:
            unknown.append(getattr(hook, "__qualname__", type(hook).__qualname__))
            continue
        with torch.no_grad():
            _KINDS[kind](hook, module)
    if unknown or not module._forward_pre_hooks:
        by = f"the forward pre-hook {', '.join(unknown)}" if unknown else "other code"
        raise ValueError(
            f"{name}: {computed[0]}: expected a parameter, got a tensor that {by} may compute; make it a parameter"
            " first, as torch.nn.utils.remove_weight_norm and its like do"
        )
