"""``model.dequantize()`` of transformers: floating-point layers instead of quantised ones."""

from __future__ import annotations

import torch
from torch import nn

from epiloq.nn import GatedExperts
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.nn.experts.row_experts import Experts


@torch.no_grad()
def dequantize_(model: nn.Module, dtype: torch.dtype, where: str) -> None:
    """Replace the quantised linear layers of `model`, in place, by ``torch.nn.Linear`` with the dequantised weights in
    `dtype`. Activations are not quantised any more.

    Raises NotImplementedError, which names the layer, before anything is replaced, if others are quantised.
    """
    made = dict[int, nn.Linear]()
    quantised = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (GatedExperts, StoredTensors))
    ]
    for name, module in quantised:
        if not isinstance(module, FrozenLinear) or isinstance(module, Experts) or module._own is not None:
            raise NotImplementedError(
                f"{where}: dequantize: {name}: expected whole linear layers, got {type(module).__name__}; open the "
                "model in floating point instead"
            )
    for name, module in quantised:
        assert isinstance(module, FrozenLinear)
        if id(module) not in made:
            made[id(module)] = _linear(module, dtype)
        model.set_submodule(name, made[id(module)])


def _linear(module: FrozenLinear, dtype: torch.dtype) -> nn.Linear:
    weight, bias = module.dequantized_weight(), module.bias
    linear = nn.Linear(module.in_features, module.out_features, bias is not None, device="meta", dtype=dtype)
    linear.weight = nn.Parameter(weight.to(dtype))
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(dtype))
    return linear.train(module.training)
