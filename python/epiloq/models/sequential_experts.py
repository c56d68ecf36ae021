"""Stacked experts that transformers replaces by lists of modules for files of some formats (so far Llama 4's)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def unstack_(
    model: Any, method: str | None, takes: Callable[[str], bool] = lambda name: True, *, copied: bool = True
) -> list[str]:
    """Replace the stacked experts by lists of modules that transformers replaces for a quantisation method.

    The stacks ``[E, K, 2 N]`` and ``[E, N, K]`` become one linear layer per matrix. Only experts for which
    ``takes(name)`` are replaced; returns their names. Without a method, those of any method are. Unless `copied`, the
    weights are views of the stacks.
    """
    found = {name: kind for name, module in model.named_modules() if (kind := _kind(module, method)) and takes(name)}
    for name, kind in found.items():
        before: Any = model.get_submodule(name)
        with torch.device("meta"):
            made = kind(model.config.get_text_config())
        for expert, gate_up, down in zip(made, before.gate_up_proj.data, before.down_proj.data, strict=True):
            gate, up = gate_up.t().chunk(2)
            for layer, weight in ((expert.gate_proj, gate), (expert.up_proj, up), (expert.down_proj, down.t())):
                # Without values it remains a view, so that the stack can be found from it.
                weight = weight.contiguous() if copied and not weight.is_meta else weight
                layer.weight = nn.Parameter(weight, requires_grad=False)
        model.set_submodule(name, made.train(before.training))
    return list(found)


@contextmanager
def unstacked(model: nn.Module) -> Iterator[None]:
    """A model with lists instead of such stacks; a stack of which no layer was quantised is restored, and of others the
    matrices left in floating point become tensors of their own."""
    before = {name: module for name, module in model.named_modules() if _kind(module, None)}
    unstack_(model, None, copied=False)
    try:
        yield
    finally:
        for name, module in before.items():
            made: Any = model.get_submodule(name)
            layers = [layer for each in made for layer in _layers(each)]
            left = [layer for layer in layers if type(layer) is nn.Linear]
            if len(left) == len(layers):
                model.set_submodule(name, module)
                continue
            for layer in left:
                layer.weight = nn.Parameter(layer.weight.data.contiguous().clone(), requires_grad=False)


def is_replaced(module: nn.Module, method: str) -> bool:
    """Whether `unstack_` replaces a module for a quantisation method."""
    return _kind(module, method) is not None


def _layers(expert: Any) -> tuple[nn.Module, ...]:
    return expert.gate_proj, expert.up_proj, expert.down_proj


def splitter(model: nn.Module, method: str) -> Callable[[str, Tensor], dict[str, Tensor]]:
    """Returns a function that splits a tensor, given by name, as stored in files of a method: stacks that transformers
    replaces become one matrix per expert, other tensors are unchanged."""
    names = {name for name, module in model.named_modules() if _kind(module, method)}

    def split(name: str, tensor: Tensor) -> dict[str, Tensor]:
        parent, _, leaf = name.rpartition(".")
        if parent not in names:
            return {name: tensor}
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        parts = zip(leaves, tensor.mT.chunk(len(leaves), 1), strict=True)
        return {
            f"{parent}.{expert}.{part}.weight": matrix.contiguous()
            for part, matrices in parts
            for expert, matrix in enumerate(matrices)
        }

    return split


def _kind(module: nn.Module, method: str | None) -> Any:
    """The list class that replaces a module, if there is one."""
    if not type(module).__module__.startswith("transformers."):
        return None
    from transformers.quantizers import base

    table: dict[str, Any] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    entry = table.get(type(module).__name__)
    stacked = {name for name, _ in module.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}
    methods = [None, *(getattr(m, "value", m) for m in entry["quantization_methods"])] if entry and stacked else []
    return entry["module_name"] if entry is not None and method in methods else None
