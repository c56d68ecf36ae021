"""Splitting and joining the experts of a layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from epiloq.nn import ExpertLinears, GatedExperts


@torch.no_grad()
def expert_part(module: GatedExperts | ExpertLinears, part: range) -> None:
    """Reduce a layer with all experts to those of `part`. The module then computes their part of each sum."""
    if module.part is not None:
        raise ValueError("epiloq.parallel: experts: expected all experts of a layer, got a part of them")
    if isinstance(module, GatedExperts):
        layers = dict(module.linears())
        own = [{name: layers[f"{e}.{name}"] for name in module.projections.names} for e in part]
        kept = GatedExperts.from_linears(ExpertLinears(own, module.act_fn))
        assert kept is not None
        module.gate_up, module.down = kept.gate_up, kept.down
        module.gate_up_bias, module.down_bias = kept.gate_up_bias, kept.down_bias
    else:
        children = [module._modules[str(expert)] for expert in part]
        for expert in range(module.experts):
            del module._modules[str(expert)]
        for expert, child in enumerate(children):
            module.add_module(str(expert), child)
    module.part, module.whole, module.experts = part, module.experts, len(part)


def as_linears(module: GatedExperts | ExpertLinears) -> ExpertLinears:
    """Convert experts to one layer per matrix, on the CPU and without hooks, for sending."""
    layers = dict(module.linears()) if isinstance(module, GatedExperts) else None
    experts = []
    for e in range(module.experts):
        found = [layers[f"{e}.{name}"] for name in module.projections.names] if layers else module.layers(e)  # type: ignore[operator]
        experts.append(
            {name: copy.deepcopy(layer).cpu() for name, layer in zip(module.projections.names, found, strict=True)}
        )
    if isinstance(module, ExpertLinears):
        return module.others(experts)
    return ExpertLinears(experts, module.act_fn, identities=module.identities).train(module.training)


def join_experts(parts: Sequence[ExpertLinears]) -> nn.Module:
    """Join parts, in order, to a layer with all experts, computed together if possible."""
    experts = [dict(zip(p.projections.names, p.layers(e), strict=True)) for p in parts for e in range(p.experts)]
    linears = parts[0].others(experts)
    return GatedExperts.from_linears(linears) or linears
