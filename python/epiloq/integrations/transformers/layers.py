"""The tensors that stand for a quantised layer's module in the format of the directory that was opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats import epiloq_modules
from epiloq.formats.layouts import awq, gptq
from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.formats.readers import Reader
from epiloq.formats.table import FORMATS, METHODS
from epiloq.formats.weights import BlockWeight, ModuleWeight, Weight
from epiloq.weights.grid import QuantizedWeight

Say = Callable[[Weight, Quantization | None, torch.dtype], dict[str, Tensor]]

_Parse = Callable[[Mapping[str, Any]], tuple[object, str]]
_VERSIONED: dict[str, tuple[_Parse, Callable[[Weight, str], dict[str, Tensor]]]] = {
    "awq": (awq.parse, awq.to_tensors),
    "gptq": (gptq.parse, gptq.to_tensors),
}


def in_format(config: Mapping[str, Any]) -> Say:
    """How the format that a ``quantization_config`` names says a weight, in the version that it names."""
    method = config["quant_method"]
    if method not in _VERSIONED:
        return FORMATS[METHODS[method]].to_tensors
    parse, to_tensors = _VERSIONED[method]
    _, version = parse(config)

    def say(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
        return to_tensors(weight, version)

    return say


def tensors_of(module: nn.Module, reader: Reader, say: Say, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's tensors but for a bias, as the directory had them that it was opened from; `dtype` is the model's.

    Raises FormatError where the format cannot say it: what is written was read back and compared.
    """
    kind = epiloq_modules.KINDS[type(module).__name__]
    weight = kind.weight(module, {name: value(module) for name, value in kind.options.items()})
    tensors = say(weight, reader.quantization, dtype)
    rows, columns = module.out_features, module.in_features
    again = reader.from_tensors(tensors, (int(rows), int(columns)))  # type: ignore[arg-type]
    if not _same(again, weight):
        raise FormatError("the format of the directory that was opened cannot say this weight")
    return tensors


def _same(one: Weight, other: Weight) -> bool:
    if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight):
        pairs = [(one.q, other.q), (one.scale, other.scale), (one.zero, other.zero), (one.perm, other.perm)]
        if one.inputs is not None and other.inputs is not None:
            pairs += [(one.inputs.scale, other.inputs.scale), (one.inputs.zero, other.inputs.zero)]
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
    if isinstance(one, BlockWeight) and isinstance(other, BlockWeight):
        return _equal(one.q, other.q) and torch.equal(one.scale, other.scale)
    if isinstance(one, ModuleWeight) and isinstance(other, ModuleWeight):
        alike = (one.module, one.options, one.state.keys()) == (other.module, other.options, other.state.keys())
        return alike and all(_equal(tensor, other.state[name]) for name, tensor in one.state.items())
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether tensors have the same type, shape and bytes."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
