"""The formats of whole checkpoints, as data: what each says, and how. `readers` has the way back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.layouts import awq, compressed_tensors, compressed_tensors_fp8, gptq
from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.formats.weights import BlockWeight, ModuleWeight, Weight, exact, on_grid
from epiloq.nn.prepared_linear import FP8_BLOCK
from epiloq.weights.grid import QuantizedWeight


@dataclass(frozen=True)
class Written:
    """What became of a model's layers, for the configuration that describes them.

    quantised
        Every quantised layer by name, with its class and its options in epiloq's own format.
    ignored
        Linear layers that stay in floating point.
    act_order
        Whether any layer's groups are in activation order.
    blocks
        The shapes ``[N, K]`` of layers in FP8 blocks.
    """

    quantised: Mapping[str, tuple[str, Mapping[str, Any]]]
    ignored: Sequence[str]
    act_order: bool = False
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """How one format says things. Callables raise FormatError for what it cannot say.

    scale_dtype
        The type to which scales should be rounded, given the model's and how activations are quantised.
    widens
        Whether a layer may have float32 scales instead.
    to_tensors
        A layer's tensors by the last part of their names, given how layers are quantised (None: not as integers on a
        grid) and the model's type.
    conv1d
        Whether readers take GPT-2's ``Conv1D`` for the linear layer that it is.
    """

    name: str
    scale_dtype: Callable[[torch.dtype, str | None], torch.dtype]
    to_tensors: Callable[[Weight, Quantization | None, torch.dtype], dict[str, Tensor]]
    config: Callable[[Quantization | None, Written], dict[str, Any]]
    conv1d: bool = False
    widens: bool = False


def blank(quantization: Quantization, shape: tuple[int, int], ordered: bool = False) -> QuantizedWeight:
    """A weight of ones on a grid, its groups perhaps in activation order."""
    grid, (rows, columns) = quantization.grid, shape
    groups = -(-columns // grid.length(columns))
    zero = None if grid.symmetric else torch.ones(rows, groups, dtype=torch.int32)
    perm = torch.arange(columns) if ordered else None
    return QuantizedWeight(torch.ones(rows, columns, dtype=grid.dtype), torch.ones(rows, groups), zero, grid, perm)


def _half(dtype: torch.dtype, activations: str | None) -> torch.dtype:
    return torch.float16


def _as_model(dtype: torch.dtype, activations: str | None) -> torch.dtype:
    if activations:
        return torch.float32
    # float16 values are float32 values too, and then other formats can hold them.
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _weights_only(name: str, weight: Weight, quantization: Quantization | None) -> QuantizedWeight:
    """A weight that a format can take which knows float16 scales and nothing of activations."""
    if quantization is not None and quantization.activations:
        raise FormatError(f"{name}: quantised activations cannot be said; use compressed-tensors or epiloq")
    value = on_grid(weight, name)
    exact(value.scale, (torch.float16,), name)
    return value


def _gptq_version(quantization: Quantization) -> str:
    # Asymmetric groups of positive weights have the zero point 0.
    return "gptq" if quantization.grid.symmetric else "gptq_v2"


def _to_gptq(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    value = _weights_only("gptq", weight, quantization)
    return gptq.to_tensors(value, _gptq_version(_grid_of(quantization)))


def _gptq_config(quantization: Quantization | None, written: Written) -> dict[str, Any]:
    described = _grid_of(quantization)
    found = gptq.config(described.grid, _gptq_version(described), written.act_order)
    # Readers take every linear layer of the blocks for quantised but those named here.
    lists = {name.split(".0.")[0] for name in written.quantised if ".0." in name}
    beside = [name for name in written.ignored if name.startswith(tuple(f"{each}." for each in lists))]
    return found | ({"dynamic": {f"-:^{re.escape(name)}$": {} for name in beside}} if beside else {})


def _to_awq(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    return awq.to_tensors(_weights_only("awq", weight, quantization))


def _to_compressed(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(weight, BlockWeight) or (
        isinstance(weight, ModuleWeight) and weight.module == compressed_tensors_fp8.ROWS
    ):
        return compressed_tensors_fp8.to_tensors(weight)
    value, described = on_grid(weight, "compressed-tensors"), _grid_of(quantization)
    # Its reader multiplies in the scale's type, then rounds to the model's.
    holds = exact(value.scale, (dtype, torch.float32), "compressed-tensors")
    return compressed_tensors.to_tensors(value, described, holds)


def _compressed_config(quantization: Quantization | None, written: Written) -> dict[str, Any]:
    if quantization is not None:
        return compressed_tensors.config(quantization, written.ignored)
    (group,) = epiloq_modules.groups_of(written.quantised)  # Others were refused.
    return compressed_tensors_fp8.config(group.module, group.options, written.ignored)


def _to_blocks(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(weight, BlockWeight):
        return {"weight": weight.q, deepseek_fp8.SCALE: weight.scale.float()}
    said = weight.described if isinstance(weight, ModuleWeight) else f"integers of {weight.bits} bits"
    raise FormatError(f"deepseek-fp8: cannot say {said}, only FP8 in blocks of {FP8_BLOCK} x {FP8_BLOCK}")


def _blocks_config(quantization: Quantization | None, written: Written) -> dict[str, Any]:
    deepseek_fp8.warn_of(written.blocks)
    return deepseek_fp8.config(written.ignored)


def _to_epiloq(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    return epiloq_modules.state_of(weight, quantization)


def _epiloq_config(quantization: Quantization | None, written: Written) -> dict[str, Any]:
    return epiloq_modules.config(epiloq_modules.groups_of(written.quantised))


def _grid_of(quantization: Quantization | None) -> Quantization:
    assert quantization is not None  # on_grid refused everything else.
    return quantization


# In order of preference.
_TABLE = (
    Format("deepseek-fp8", _as_model, _to_blocks, _blocks_config),
    Format("compressed-tensors", _as_model, _to_compressed, _compressed_config, widens=True),
    Format("gptq", _half, _to_gptq, _gptq_config, conv1d=True),
    Format(
        "awq",
        _half,
        _to_awq,
        lambda quantization, written: awq.config(_grid_of(quantization).grid, written.ignored),
    ),
    Format("epiloq", _as_model, _to_epiloq, _epiloq_config, conv1d=True, widens=True),
)
FORMATS = {layout.name: layout for layout in _TABLE}
# The names that config.json has for them.
METHODS = {name: name for name in FORMATS} | {deepseek_fp8.METHOD: "deepseek-fp8"}
