"""One layer with the rows of several: what can be merged, and the layer that holds it.

The layers' ``weight_q`` become views of the merged layer's, so that nothing is stored twice; scales are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from epiloq._torch.parameters import FrozenParameter
from epiloq.nn import (
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    Fp8WeightOnlyLinear,
    Int8Linear,
    OnlineQuantLinear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from epiloq.nn.base.prepared_linear import FP8_BLOCK, N_MULTIPLE
from epiloq.weights.packed_layout import PANEL_ROWS

# Granularity of the rows of stored tensors: all layers but the last must have a multiple of it.
ROWS: dict[type[nn.Module], int] = {
    Int8Linear: N_MULTIPLE,
    Fp8Linear: N_MULTIPLE,
    Fp8BlockLinear: FP8_BLOCK,
    WeightOnlyLinear: PANEL_ROWS,
    W4A8Linear: PANEL_ROWS,
    OnlineQuantLinear: 4,
    Fp4Linear: PANEL_ROWS,
    W4A8Fp4Linear: PANEL_ROWS,
    Fp8WeightOnlyLinear: N_MULTIPLE,
}
# The dimension of rows of a stored tensor, by default the first; and the tensors that must be equal in all layers.
ROW_DIMENSION = {"weight_parameters": -1}
SHARED = ("input_scale", "input_zero_point", "weight_perm", "weight_global_scale", "pre_quant_scale")
# Layers whose kernels read tensors without padding rows.
_NOT_PADDED = (Fp4Linear, Fp8WeightOnlyLinear, W4A8Fp4Linear)


def reason_against_layers(layers: Sequence[Any]) -> str | None:
    """Return why layers whose ``forward`` is their class's cannot be merged, or None if they can."""
    first = layers[0]
    if any(type(layer) is not type(first) for layer in layers):
        return "not layers of one quantised kind: " + ", ".join(type(layer).__name__ for layer in layers)
    if type(first) not in ROWS:
        return f"{type(first).__name__} has no merged form"
    if any(_options(layer) != _options(first) for layer in layers):
        return "layers of different options"
    if len({id(layer) for layer in layers}) != len(layers):
        return "one layer under several names"
    rows = _multiple(first)
    uneven = [layer.out_features for layer in layers[:-1] if layer.out_features % rows]
    if uneven:
        return f"{uneven[0]} output features, not a multiple of {rows}"
    return reason_against_tensors(layers)


def reason_against_tensors(layers: Sequence[Any]) -> str | None:
    """Return why the present tensors of layers, whose kinds and options fit, cannot be merged, or None if they can."""
    for name in layers[0]._parameters:
        held = [layer._parameters.get(name) for layer in layers]
        if any((tensor is None) != (held[0] is None) for tensor in held):
            return f"{name} in some layers only"
        tensors = [tensor for tensor in held if tensor is not None]
        if any(t.dtype != tensors[0].dtype or t.device != tensors[0].device for t in tensors):
            return f"{name} of different types or devices"
        if any(t.is_meta for t in tensors):
            return "no values yet (meta device)"
        if name in SHARED and any(not torch.equal(t, tensors[0]) for t in tensors):
            return f"different {name}"
    return None


def _multiple(layer: Any) -> int:
    """Return the number of which every layer's rows, except the last one's, must be a multiple."""
    rows = ROWS[type(layer)]
    return lcm(rows, layer.block[0]) if isinstance(layer, Fp8WeightOnlyLinear) and layer.block[0] > 1 else rows


def _options(layer: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(layer).items() if not k.startswith("_") and k not in ("out_features", "training")}


def _rows_of(layer: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A stored tensor by rows; a single scale of a weight is repeated for each output feature."""
    if isinstance(layer, Fp8Linear) and name == "weight_scale" and layer.weight_scales == "tensor":
        return tensor.expand(layer.out_features)
    if isinstance(layer, Fp8WeightOnlyLinear) and name == "weight_scale" and layer.block[0] == -1:
        return tensor.expand(layer.out_features, -1)
    return tensor


def _whole(layers: Sequence[Any], name: str) -> Tensor | None:
    """The rows of a stored tensor of all layers, concatenated; None if they have none."""
    tensors = [_rows_of(layer, name, t) for layer in layers if (t := layer._parameters[name]) is not None]
    if not tensors:
        return None
    whole = torch.cat(
        [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors], ROW_DIMENSION.get(name, 0)
    )
    return whole.view(tensors[0].dtype) if whole.dtype != tensors[0].dtype else whole


@torch.no_grad()
def refresh(merged: Any, layers: Sequence[Any]) -> bool:
    """Copy the layers' tensors into `merged`, of whose ``weight_q`` theirs are views; False if they no longer are."""
    rows = merged.weight_q.split([layer.weight_q.shape[0] for layer in layers])
    if not all(
        _alike(layer.weight_q, part) and layer.weight_q.data_ptr() == part.data_ptr()
        for layer, part in zip(layers, rows, strict=True)
    ):
        return False
    wholes = {name: _whole(layers, name) for name in layers[0]._parameters if name not in (*SHARED, "weight_q")}
    held = merged._parameters
    if not all(
        (held[name] is None) == (whole is None) and (whole is None or _alike(held[name], whole))
        for name, whole in wholes.items()
    ):
        return False
    for name, whole in wholes.items():
        if whole is not None:
            held[name].copy_(whole)
    held.update({name: layers[0]._parameters[name] for name in SHARED if name in held})
    merged._settle()
    return True


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())


@torch.no_grad()
def concatenated(layers: Sequence[Any]) -> Any:
    """A layer with the rows of all layers, checked by `reason_against`; their ``weight_q`` become views of it."""
    first = layers[0]
    kind: Any = type(first)
    merged = kind.__new__(kind)
    vars(merged).update({name: value for name, value in vars(first).items() if name != "forward"})
    merged._parameters, merged._held, merged._reader = {}, None, None
    merged.out_features = sum(layer.out_features for layer in layers)
    if isinstance(first, Fp8Linear):
        merged.weight_scales = "channel"
    if isinstance(first, Fp8WeightOnlyLinear) and first.block[0] == -1:
        merged.block = (1, first.block[1])
    for name in first._parameters:
        if name in SHARED:
            merged._parameters[name] = first._parameters[name]
        else:
            merged._store(name, _whole(layers, name))
    if hasattr(first, "_padded_shapes"):
        merged._stored_shapes = {
            name: shape if (held := merged._parameters[name]) is None else tuple(held.shape)
            for name, shape in first._stored_shapes.items()
        }
        multiples = {"weight_scale_inv": 1} | (dict.fromkeys(first._parameters, 1) if kind in _NOT_PADDED else {})
        merged._padded_shapes = {
            name: (-(-held.shape[0] // (m := multiples.get(name, N_MULTIPLE))) * m, *first._padded_shapes[name][1:])
            if name not in SHARED
            else shape
            for name, shape in first._padded_shapes.items()
            if (held := merged._parameters[name]) is not None or name in SHARED
        }
    for layer, rows in zip(layers, merged.weight_q.split([layer.weight_q.shape[0] for layer in layers]), strict=True):
        layer._parameters["weight_q"] = FrozenParameter(rows)
        layer._settle()
    merged._settle()
    return merged
