"""Whether a subclass of ``nn.Linear`` computes what ``nn.Linear`` does, told by running it, not by its name."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize

from epiloq.models.conv1d import TransposedConv1D

_IN, _OUT, _ROWS = 3, 5, 2


def is_plain(module: nn.Module) -> bool:
    """Whether a module is ``nn.Linear``, or a subclass that computes the same of its weight and bias alone.

    Of torch's own subclasses none is, for each of them exists since other code handles it differently; but one whose
    weight or bias torch.nn.utils.parametrize computes is what it was before.
    """
    if parametrize.is_parametrized(module):
        computed = set(module.parametrizations)  # type: ignore[arg-type]
        return parametrize.type_before_parametrizations(module) is nn.Linear and computed <= {"weight", "bias"}
    if type(module) in (nn.Linear, TransposedConv1D):
        return True
    if not isinstance(module, nn.Linear) or type(module).__module__.startswith("torch."):
        return False
    parameters = dict(module.named_parameters())
    has_bias = module.bias is not None
    alone = not list(module.children()) and not list(module.buffers())
    return alone and parameters.keys() == {"weight", *(["bias"] if has_bias else [])} and _computes_linear(module)


@torch.no_grad()
def _computes_linear(module: nn.Linear) -> bool:
    """Whether a copy of the layer of other sizes, with other values, gives ``x W^T + b``."""
    small = copy.copy(module)
    small.in_features, small.out_features = _IN, _OUT
    weight = torch.arange(1.0, _IN * _OUT + 1).view(_OUT, _IN).sqrt()
    bias = None if module.bias is None else torch.arange(1.0, _OUT + 1).sqrt()
    values = {"weight": weight, "bias": bias}
    # Dictionaries of its own, for the copy shares those of the layer.
    small._parameters = {n: None if v is None else nn.Parameter(v, requires_grad=False) for n, v in values.items()}
    x = torch.linspace(-1, 1, _ROWS * _IN).view(1, _ROWS, _IN)
    try:
        y = type(module).forward(small, x)
    except Exception:  # Whatever a subclass raises on a plain input, it is no plain layer.
        return False
    expected = nn.functional.linear(x, weight, bias)
    return isinstance(y, torch.Tensor) and y.shape == expected.shape and torch.allclose(y, expected)
