"""A quantised layer's module as tensors in the format of the directory that was opened, or in floating point."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from epiloq.formats import epiloq_modules
from epiloq.formats.layer_reader import Reader
from epiloq.formats.layout_table import LAYOUTS
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.weights import BlockWeight, ModuleWeight, ScaledWeight, Weight
from epiloq.nn import GatedExperts
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.quantized_layer import QuantizedLayer
from epiloq.nn.base.scaled_input import SCALE
from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.nn.experts.row_experts import Experts
from epiloq.weights.grid import QuantizedWeight


def tensors_of(module: nn.Module, reader: Reader, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's tensors without bias, in the format of the directory from which it was opened; `dtype` is the model's.

    Raises FormatError if the format cannot represent it exactly, which is checked by reading the tensors back.
    """
    if reader.described is None:
        raise FormatError("expected a layer that the configuration describes")
    kind = epiloq_modules.KINDS[type(module).__name__]
    weight = kind.weight(module, kind.options_of(module))
    inner, scale = (weight.inner, {SCALE: weight.scale}) if isinstance(weight, ScaledWeight) else (weight, {})
    tensors = LAYOUTS[reader.described.layout].to_tensors(inner, reader.described, dtype) | scale
    rows, columns = cast(QuantizedLayer, module).weight_shape
    again = reader.from_tensors(tensors, (rows, columns))
    if not _same(again, weight):
        raise FormatError("the format of the directory that was opened cannot represent this weight")
    return tensors


def _same(one: Weight, other: Weight) -> bool:
    if isinstance(one, ScaledWeight) and isinstance(other, ScaledWeight):
        return _same(one.inner, other.inner) and _equal(one.scale, other.scale)
    if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight):
        pairs = [(one.q, other.q), (one.scale, other.scale), (one.zero, other.zero), (one.perm, other.perm)]
        if one.inputs is not None and other.inputs is not None:
            pairs += [(one.inputs.scale, other.inputs.scale), (one.inputs.zero, other.inputs.zero)]
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
    if isinstance(one, BlockWeight) and isinstance(other, BlockWeight):
        return one.rows == other.rows and _equal(one.q, other.q) and torch.equal(one.scale, other.scale)
    if isinstance(one, ModuleWeight) and isinstance(other, ModuleWeight) and type(one) is type(other):
        alike = (one.module, dict(one.options), one.state.keys()) == (
            other.module,
            dict(other.options),
            other.state.keys(),
        )
        return alike and all(_equal(tensor, other.state[name]) for name, tensor in one.state.items())
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether tensors have the same type, shape and bytes."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@torch.no_grad()
def dequantize_(model: nn.Module, dtype: torch.dtype, where: str) -> None:
    """``model.dequantize()`` of transformers: replace the quantised linear layers of `model`, in place, by
    ``torch.nn.Linear`` with the dequantised weights in `dtype`. Activations are not quantised any more.

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
