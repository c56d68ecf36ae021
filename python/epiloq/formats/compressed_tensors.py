"""The layouts of the compressed-tensors package: ``pack-quantized`` (W4A16, W8A16) and ``int-quantized`` (W8A8).

Its reader multiplies in the scale's type, so scales of weights alone are written in the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.layouts import FormatError, Quantization, divides, from_unsigned, require, unsigned
from epiloq.formats.words import pack, per_word, unpack
from epiloq.quantize.grid import Grid, QuantizedWeight

PACKED, INTEGER = "pack-quantized", "int-quantized"


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
        return {"weight": weight.q, "weight_scale": weight.scale}
    q, zero = unsigned(weight)
    tensors = {
        "weight_packed": pack(q, weight.bits),
        "weight_scale": weight.scale.to(dtype),
        "weight_shape": torch.tensor(weight.q.shape, dtype=torch.int64),
    }
    if weight.zero is not None:
        tensors["weight_zero_point"] = pack(zero.t(), weight.bits).t().contiguous()
    return tensors


def from_tensors(tensors: Mapping[str, Tensor], quantization: Quantization, shape: tuple[int, int]) -> QuantizedWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    (rows, columns), grid = shape, quantization.grid
    groups = -(-columns // grid.length(columns))
    if quantization.activations:
        require(tensors, {"weight": (torch.int8, shape), "weight_scale": (None, (rows, groups))})
        return QuantizedWeight(tensors["weight"], tensors["weight_scale"].float(), None, grid)
    count = per_word(grid.bits)
    shapes = {
        "weight_packed": (torch.int32, (rows, -(-columns // count))),
        "weight_scale": (None, (rows, groups)),
        "weight_shape": (torch.int64, (2,)),
    }
    if not grid.symmetric:
        shapes["weight_zero_point"] = (torch.int32, (-(-rows // count), groups))
    require(tensors, shapes)
    if tuple(tensors["weight_shape"].tolist()) != shape:
        raise FormatError(f"weight_shape: expected {list(shape)}, got {tensors['weight_shape'].tolist()}")
    q = unpack(tensors["weight_packed"], grid.bits, columns)
    if grid.symmetric:
        zero = torch.full((rows, groups), 1 << (grid.bits - 1), dtype=torch.uint8)
    else:
        zero = unpack(tensors["weight_zero_point"].t(), grid.bits, rows).t()
    return from_unsigned(q, tensors["weight_scale"], zero, grid)


def parts(quantization: Quantization) -> frozenset[str]:
    """Every tensor that a layer may have, by the last part of its name, beside its bias."""
    if quantization.activations:
        return frozenset({"weight", "weight_scale"})
    zeros = () if quantization.grid.symmetric else ("weight_zero_point",)
    return frozenset({"weight_packed", "weight_scale", "weight_shape", *zeros})


def config(quantization: Quantization, ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model whose linear layers are quantised but for those in `ignore`."""
    grid = quantization.grid
    weights: dict[str, Any] = {"num_bits": grid.bits, "type": "int", "symmetric": grid.symmetric, "dynamic": False}
    weights |= (
        {"strategy": "channel"} if grid.group_size == -1 else {"strategy": "group", "group_size": grid.group_size}
    )
    inputs = None
    if quantization.activations:
        symmetric = quantization.activations == "int8"
        inputs = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "token", "dynamic": True}
    layout = INTEGER if quantization.activations else PACKED
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def parse(found: Mapping[str, Any]) -> Quantization:
    """The inverse of `config`. Raises FormatError for what epiloq does not read, and says what that is."""
    groups = list((found.get("config_groups") or {}).values())
    if len(groups) != 1 or not isinstance(groups[0], dict) or groups[0].get("targets") != ["Linear"]:
        raise FormatError('compressed-tensors: config_groups: expected one, of targets ["Linear"]')
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    strategy = weights.get("strategy")
    if weights.get("type", "int") != "int" or strategy not in ("channel", "group"):
        raise FormatError("compressed-tensors: weights: expected integers with a scale for each channel or group")
    if inputs is not None and not (
        inputs.get("num_bits") == 8 and inputs.get("strategy") == "token" and inputs.get("dynamic") is True
    ):
        raise FormatError("compressed-tensors: input_activations: expected none, or 8 bits a token at run time")
    layout = groups[0].get("format") or found.get("format")
    if layout != (INTEGER if inputs else PACKED):
        raise FormatError(f"compressed-tensors: format: expected {INTEGER if inputs else PACKED}, got {layout!r}")
    size = weights["group_size"] if strategy == "group" else -1
    grid = Grid(weights.get("num_bits", 8), size, bool(weights.get("symmetric", True)))
    if not inputs:
        return Quantization(grid)
    return Quantization(grid, "int8" if inputs.get("symmetric", True) else "int8-azp")
