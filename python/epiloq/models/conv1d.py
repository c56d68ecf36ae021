"""GPT-2's ``Conv1D``, a linear layer with its weight transposed, as ``nn.Linear``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from epiloq.weights.computed import refresh


class TransposedConv1D(nn.Linear):
    """A ``Conv1D`` of transformers as a linear layer that shares its memory."""

    before: nn.Module

    @classmethod
    def of(cls, module: Any) -> TransposedConv1D:
        """The layer of a ``Conv1D``, weight ``[K, N]``."""
        refresh("Conv1D", module)
        inputs, outputs = module.weight.shape
        made = cls(inputs, outputs, device="meta", dtype=module.weight.dtype)
        made.weight = nn.Parameter(module.weight.data.t(), requires_grad=module.weight.requires_grad)
        made.bias = module.bias
        # not a child, so that its tensors are not counted twice
        made.__dict__["before"] = module
        return made.train(module.training)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a ``Conv1D`` of transformers (without importing it)."""
    known = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return known is not None and type(module) is known


def as_linear(module: nn.Module) -> nn.Linear | None:
    """The module as a linear layer: itself, or a transposed ``Conv1D``; None for others."""
    if is_conv1d(module):
        return TransposedConv1D.of(module)
    return module if isinstance(module, nn.Linear) else None


def transpose_(model: nn.Module) -> nn.Module:
    """Replace each ``Conv1D``, under all its names, by a ``TransposedConv1D``; returns the model."""
    _replace(model, {module: TransposedConv1D.of(module) for module in model.modules() if is_conv1d(module)})
    return model


@contextmanager
def transposed(model: nn.Module) -> Iterator[None]:
    """Temporarily replace each ``Conv1D`` by a linear layer; those that remain at the end are restored."""
    transpose_(model)
    try:
        yield
    finally:
        _replace(model, {module: module.before for module in model.modules() if isinstance(module, TransposedConv1D)})


def _replace(model: nn.Module, by: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()) if by else []:
        for leaf, child in parent._modules.items():
            if child in by:
                parent._modules[leaf] = by[child]
