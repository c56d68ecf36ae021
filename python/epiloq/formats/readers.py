"""How the quantised layers of a checkpoint are read, by its ``quantization_config``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts import awq, compressed_tensors, compressed_tensors_fp8, gptq
from epiloq.formats.layouts.base import FormatError, Quantization, require
from epiloq.formats.table import METHODS
from epiloq.formats.weights import BlockWeight, Weight, blocks_of
from epiloq.weights.grid import Grid

BIAS = "bias"
# Of compressed-tensors.
_OF_CACHES = ("k_scale", "k_zero_point", "v_scale", "v_zero_point")
Tensors: TypeAlias = Mapping[str, Tensor]
Shape: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Reader:
    """How the layers of one checkpoint, or some of them, are read.

    quantization
        How they are quantised; None where that is not to integers on a grid.
    marker
        The tensor that only a quantised layer has, by the last part of its name.
    from_tensors
        What a layer's tensors stand for, given its shape ``[N, K]``. Raises FormatError for tensors that disagree.
    parts
        Every tensor that a layer may have, by the last part of its name, beside its bias; None: `from_tensors` knows.
    build
        Of tensors that are a module's state: that module, in the place of a linear layer.
    module
        Without a quantization, the class of the module that runs a layer, and its options, as in epiloq's own format.
    """

    quantization: Quantization | None
    marker: str
    from_tensors: Callable[[Tensors, Shape], Weight]
    parts: frozenset[str] | None
    build: Callable[[nn.Linear, Tensors], nn.Module] | None = None
    module: tuple[str, Mapping[str, Any]] = ("", {})

    def opened(self, linear: nn.Linear, tensors: Tensors) -> nn.Module:
        """The module that runs a layer's tensors, with a "bias" if there is one among them.

        Of the linear layer in whose place it is, the sizes, the mode, and the type and device of the weight count.
        Raises ValueError for tensors that do not fit.
        """
        if self.build is not None:
            return self.build(linear, tensors)
        parts = {name: tensor for name, tensor in tensors.items() if name != BIAS}
        weight = self.from_tensors(parts, (linear.out_features, linear.in_features))
        name, options = epiloq_modules.described(weight, self.quantization)
        state = epiloq_modules.state_of(weight, self.quantization)
        if BIAS in tensors:
            state[BIAS] = tensors[BIAS]
        module: nn.Module = epiloq_modules.KINDS[name].build(linear, options, state, linear.weight.device)
        return module


def reader(config: Mapping[str, Any]) -> Reader:
    """The reader for a ``quantization_config`` of layers that are all alike, integers on a grid or FP8.

    Raises FormatError for one that epiloq does not read.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors" and compressed_tensors_fp8.knows(config):
        module, options = compressed_tensors_fp8.parse(config)
        return Reader(
            None,
            "weight_scale",
            lambda t, shape: compressed_tensors_fp8.from_tensors(t, module, options, shape),
            compressed_tensors_fp8.parts(module, options),
            module=(module, options),
        )
    if method == "compressed-tensors":
        found = compressed_tensors.parse(config)
        return Reader(
            found,
            "weight_scale",
            lambda t, shape: compressed_tensors.from_tensors(t, found, shape),
            compressed_tensors.parts(found),
        )
    if method == "gptq":
        described, version = gptq.parse(config)
        return Reader(
            described,
            "qweight",
            lambda t, shape: gptq.from_tensors(t, described.grid, version, shape),
            frozenset({"qweight", "qzeros", "scales", "g_idx"}),
        )
    if method == "awq":
        return _awq_reader(*awq.parse(config))
    if method == deepseek_fp8.METHOD:
        deepseek_fp8.parse(config)
        parts = frozenset({"weight", deepseek_fp8.SCALE})
        return Reader(None, deepseek_fp8.SCALE, _from_blocks, parts, module=("Fp8BlockLinear", {}))
    raise FormatError(f"quantization_config: quant_method: expected one of {', '.join(METHODS)}, got {method!r}")


def _awq_reader(grid: Grid, version: str) -> Reader:
    with_offsets = version == "gemv_fast"
    options = {"bits": awq.BITS, "group_size": grid.group_size, "zeros": "offset"}
    return Reader(
        None if with_offsets else Quantization(grid),
        "qweight",
        lambda t, shape: awq.from_tensors(t, grid, version, shape),
        frozenset({"qweight", "qzeros", "scales"}),
        module=("WeightOnlyLinear", options) if with_offsets else ("", {}),
    )


def cache_scales(checkpoint: Checkpoint) -> list[str]:
    """Names of tensors that belong to a quantised key-value cache, which epiloq has none of."""
    if (checkpoint.quantization or {}).get("kv_cache_scheme") is None:
        return []
    return [name for name in checkpoint.names() if name.rpartition(".")[2] in _OF_CACHES]


def readers(checkpoint: Checkpoint) -> dict[str, Reader]:
    """How each quantised layer of a checkpoint is read, by name; layers that are alike share theirs.

    Warns of a key-value cache that is quantised too: keys and values stay as they are, and its scales are not used.
    Raises FormatError for a configuration that epiloq does not read, or no quantised layers.
    """
    found = checkpoint.quantization or {}
    try:
        if found.get("quant_method") == epiloq_modules.METHOD:
            return {
                layer: shared
                for group in epiloq_modules.parse(found)
                for shared in [_module_reader(group)]
                for layer in group.layers
            }
        shared = reader(found)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{checkpoint.folder / 'config.json'}: {error}") from error
    if found.get("kv_cache_scheme") is not None:
        warnings.warn(
            f"{checkpoint.folder}: the key-value cache stays in the model's type, and its scales are not used",
            stacklevel=3,
        )
    end = f".{shared.marker}"
    names = [name.removesuffix(end) for name in checkpoint.files if name.endswith(end)]
    layers = {name: _one_layer(shared, name) for name in names}
    if not layers:
        raise FormatError(f"{checkpoint.folder}: expected quantised linear layers, found no {shared.marker}")
    return layers


def _one_layer(shared: Reader, name: str) -> Reader:
    """The reader of a layer among others that are not quite alike."""
    if shared.quantization is None or shared.quantization.activations != "int8-static":
        return shared
    own = shared.quantization.of(name)

    def read(tensors: Tensors, shape: Shape) -> Weight:
        if (own.activations == "int8-static") != ("input_scale" in tensors):
            wanted = "a tensor, found none" if own.activations == "int8-static" else "none with dynamic activations"
            raise FormatError(f"input_scale: expected {wanted}")
        return shared.from_tensors(tensors, shape)

    return replace(shared, quantization=own, from_tensors=read)


def _from_blocks(tensors: Tensors, shape: Shape) -> Weight:
    require(tensors, {"weight": (torch.float8_e4m3fn, shape), deepseek_fp8.SCALE: (None, blocks_of(shape))})
    return BlockWeight(tensors["weight"], tensors[deepseek_fp8.SCALE])


def _from_module(group: epiloq_modules.Group, tensors: Tensors, shape: Shape) -> Weight:
    outline = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=torch.float32)
    module = group.kind.build(outline, group.options, tensors, torch.device("cpu"))
    return group.kind.weight(module, group.options)


def _module_reader(group: epiloq_modules.Group) -> Reader:
    """A module refuses by itself tensors that it does not take, so all are read."""
    kind, options = group.kind, group.options
    return Reader(
        kind.described(options),
        "",
        partial(_from_module, group),
        None,
        lambda linear, tensors: kind.build(linear, options, tensors, linear.weight.device),
        (group.module, options),
    )
