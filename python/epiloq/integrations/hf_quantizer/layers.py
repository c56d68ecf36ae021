"""The tensors of a quantised layer's module in the format of the directory that was opened."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from epiloq.formats import epiloq_modules
from epiloq.formats.layer_reader import Reader
from epiloq.formats.layout_table import LAYOUTS
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.weights import BlockWeight, ModuleWeight, ScaledWeight, Weight
from epiloq.nn.base.quantized_layer import QuantizedLayer
from epiloq.nn.base.scaled_input import SCALE
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
