"""The layouts of the compressed-tensors package: ``pack-quantized`` (W4A16, W8A16) and ``int-quantized`` (W8A8).

`compressed_tensors_fp8` has ``float-quantized``.

Its reader multiplies in the scale's type, so scales of weights alone are written in the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.compressed_tensors_layers import from_fp8, from_packed, from_words, to_fp8, to_packed, to_words
from epiloq.formats.layouts.base import Activations, Codes, FormatError, Quantization, divides, require
from epiloq.formats.layouts.words import words_of
from epiloq.weights.grid import Grid, InputGrid, QuantizedWeight

__all__ = [
    "config",
    "document",
    "first_group",
    "from_fp8",
    "from_packed",
    "from_tensors",
    "parse",
    "to_fp8",
    "to_packed",
    "to_tensors",
]

PACKED, INTEGER = "pack-quantized", "int-quantized"
_INT8 = {"num_bits": 8, "type": "int"}
INPUTS: dict[str | None, dict[str, Any] | None] = {
    None: None,
    "int8": {**_INT8, "symmetric": True, "strategy": "token", "dynamic": True},
    "int8-azp": {**_INT8, "symmetric": False, "strategy": "token", "dynamic": True},
    "int8-static": {**_INT8, "symmetric": False, "strategy": "tensor", "dynamic": False},
}


def to_tensors(weight: QuantizedWeight, quantization: Quantization, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's tensors by the last part of their names; scales in `dtype`, or float32 for W8A8.

    Raises FormatError for what it has no words for: a last group that is shorter, groups in activation order.
    """
    columns = weight.q.shape[1]
    divides("in_features", columns, weight.grid.length(columns), "compressed-tensors (gptq has short last groups)")
    if weight.perm is not None:
        raise FormatError("compressed-tensors: groups in activation order cannot be said; use static groups")
    if quantization.activations:
        if weight.zero is not None or weight.bits != 8:
            raise FormatError("compressed-tensors: int-quantized: expected 8 bits and a symmetric grid")
        inputs = weight.inputs
        found = {} if inputs is None else {"input_scale": inputs.scale, "input_zero_point": inputs.zero.to(torch.int8)}
        return {"weight": weight.q, "weight_scale": weight.scale, **found}
    tensors = to_words(Codes.of(weight), weight.zero is None)
    return tensors | {"weight_scale": weight.scale.to(dtype)}


def from_tensors(tensors: Mapping[str, Tensor], quantization: Quantization, shape: tuple[int, int]) -> QuantizedWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    (rows, columns), grid = shape, quantization.grid
    groups = -(-columns // grid.length(columns))
    if quantization.activations:
        require(tensors, {"weight": (torch.int8, shape), "weight_scale": (None, (rows, groups))})
        inputs = None
        if "input_scale" in tensors:
            scale = tensors["input_scale"]
            zero = tensors.get("input_zero_point")
            if zero is None:  # Of symmetric ones.
                zero = torch.zeros(1, dtype=torch.int8, device=scale.device)
            said = {"input_scale": scale, "input_zero_point": zero}
            require(said, {"input_scale": (None, (1,)), "input_zero_point": (torch.int8, (1,))})
            inputs = InputGrid(scale.float(), zero.int())
        return QuantizedWeight(tensors["weight"], tensors["weight_scale"].float(), None, grid, inputs=inputs)
    shapes = {
        "weight_packed": (torch.int32, (rows, words_of(columns, grid.bits))),
        "weight_scale": (None, (rows, groups)),
        "weight_shape": (torch.int64, (2,)),
    }
    if not grid.symmetric:
        shapes["weight_zero_point"] = (torch.int32, (words_of(rows, grid.bits), groups))
    require(tensors, shapes)
    if tuple(tensors["weight_shape"].tolist()) != shape:
        raise FormatError(f"weight_shape: expected {list(shape)}, got {tensors['weight_shape'].tolist()}")
    found = {name: tensors[name] for name in shapes}
    return from_words(found, grid.bits, grid.group_size, columns).quantized(grid)


def parts(quantization: Quantization) -> frozenset[str]:
    """Every tensor that a layer may have, by the last part of its name, beside its bias."""
    if quantization.activations:
        inputs = ("input_scale", "input_zero_point") if quantization.activations == "int8-static" else ()
        return frozenset({"weight", "weight_scale", *inputs})
    zeros = () if quantization.grid.symmetric else ("weight_zero_point",)
    return frozenset({"weight_packed", "weight_scale", "weight_shape", *zeros})


def config(quantization: Quantization, ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model whose linear layers are quantised but for those in `ignore`."""
    grid = quantization.grid
    weights: dict[str, Any] = {"num_bits": grid.bits, "type": "int", "symmetric": grid.symmetric, "dynamic": False}
    weights |= (
        {"strategy": "channel"} if grid.group_size == -1 else {"strategy": "group", "group_size": grid.group_size}
    )
    layout = INTEGER if quantization.activations else PACKED
    groups = [{"targets": ["Linear"], "input_activations": INPUTS[quantization.activations], "weights": weights}]
    if quantization.dynamic:
        targets = list(quantization.dynamic)
        groups.append({"targets": targets, "input_activations": INPUTS["int8-azp"], "weights": weights})
    return document(layout, groups, ignore)


def document(layout: str, groups: Sequence[Mapping[str, Any]], ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of layers in groups, all in one layout."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": {**deepcopy(group), "format": layout} for i, group in enumerate(groups)},
        "ignore": list(ignore),
    }


def first_group(found: Mapping[str, Any]) -> dict[str, Any]:
    """The description of all linear layers but for exceptions. Raises FormatError where there is none."""
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    if not isinstance(first, dict) or first.get("targets") != ["Linear"]:
        raise FormatError('compressed-tensors: config_groups: expected one, of targets ["Linear"]')
    for part in ("weights", "input_activations"):
        if not isinstance(first.get(part), (dict, type(None))):
            raise FormatError(f"compressed-tensors: {part}: expected an object or null, got {first[part]!r}")
    return first


def parse(found: Mapping[str, Any]) -> Quantization:
    """The inverse of `config`. Raises FormatError for what epiloq does not read, and says what that is."""
    first, (_, *others) = first_group(found), found["config_groups"].values()
    weights, inputs = first.get("weights") or {}, first.get("input_activations")
    strategy = weights.get("strategy")
    if weights.get("type", "int") != "int" or strategy not in ("channel", "group"):
        raise FormatError("compressed-tensors: weights: expected integers with a scale for each channel or group")
    activations = _activations(inputs)
    layout = first.get("format") or found.get("format")
    if layout != (INTEGER if inputs else PACKED):
        raise FormatError(f"compressed-tensors: format: expected {INTEGER if inputs else PACKED}, got {layout!r}")
    size = weights["group_size"] if strategy == "group" else -1
    grid = Grid(weights.get("num_bits", 8), size, bool(weights.get("symmetric", True)))
    dynamic: list[str] = []
    for group in others:
        alike = isinstance(group, dict) and all(group.get(key) == first.get(key) for key in ("weights", "format"))
        if not alike or activations != "int8-static" or _activations(group.get("input_activations")) != "int8-azp":
            raise FormatError("compressed-tensors: config_groups: expected another only of layers that stay dynamic")
        dynamic += group.get("targets") or []
    return Quantization(grid, activations, tuple(dynamic))


def _activations(inputs: Mapping[str, Any] | None) -> Activations:
    """How a description of activations is called here. Raises FormatError for one that is not known."""
    if inputs is None:
        return None
    if not isinstance(inputs, dict):
        raise FormatError(f"compressed-tensors: input_activations: expected an object or null, got {inputs!r}")
    kind = inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("strategy"), inputs.get("dynamic", False)
    if kind == (8, "int", "token", True):
        return "int8" if inputs.get("symmetric", True) else "int8-azp"
    if kind == (8, "int", "tensor", False):
        return "int8-static"
    raise FormatError(
        "compressed-tensors: input_activations: expected none, or 8 bits a token at run time, or 8 bits with one scale"
    )
