"""The layout ``float-quantized`` of the compressed-tensors package: FP8 weights and activations.

With a scale for each channel or tensor a layer is `nn.Fp8Linear`, and has its options, "activation" and "weight"; with
one for each block of 128 x 128, beside activations in groups of 128, it is `nn.Fp8BlockLinear`, which has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from epiloq.formats.compressed_tensors_layers import FP8
from epiloq.formats.layouts.base import Expected, FormatError, divides, require
from epiloq.formats.layouts.compressed_tensors import document, first_group
from epiloq.formats.weights import BlockWeight, ModuleWeight, blocks_of
from epiloq.nn.prepared_linear import FP8_BLOCK

LAYOUT, ROWS, BLOCKS = "float-quantized", "Fp8Linear", "Fp8BlockLinear"
# What the package called it before, with the same tensors.
_FORMER = "naive-quantized"
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "channel": {**_FLOAT8, "strategy": "channel", "dynamic": False},
    "tensor": {**_FLOAT8, "strategy": "tensor", "dynamic": False},
    "block": {**_FLOAT8, "strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK], "dynamic": False},
}
_INPUTS: dict[str, dict[str, Any]] = {
    "token": {**_FLOAT8, "strategy": "token", "dynamic": True},
    "tensor": {**_FLOAT8, "strategy": "tensor", "dynamic": True},
    "static": {**_FLOAT8, "strategy": "tensor", "dynamic": False},
}
_GROUPS: dict[str, dict[str, Any]] = {
    "group": {**_FLOAT8, "strategy": "group", "group_size": FP8_BLOCK, "dynamic": True}
}
# What the package takes where a description leaves something out; of "type", integers.
_USUAL = {"num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"}


def knows(found: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` is of weights in floating point, which `parse` reads or refuses."""
    return (first_group(found).get("weights") or {}).get("type") == "float"


def config(module: str, options: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model whose linear layers are alike but for those in `ignore`."""
    if module == BLOCKS:
        inputs, weights = _GROUPS["group"], _WEIGHTS["block"]
    else:
        inputs, weights = _INPUTS[options["activation"]], _WEIGHTS[options["weight"]]
    return document(LAYOUT, [{"targets": ["Linear"], "input_activations": inputs, "weights": weights}], ignore)


def parse(found: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Every layer's class and options. Raises FormatError for what no class of ours does, and says what that is."""
    group = first_group(found)
    if len(found["config_groups"]) > 1:
        raise FormatError("compressed-tensors: config_groups: expected one of FP8 weights")
    layout = group.get("format") or found.get("format")
    if layout not in (LAYOUT, _FORMER):
        raise FormatError(f"compressed-tensors: format: expected {LAYOUT}, got {layout!r}")
    weight = _kind("weights", group.get("weights"), _WEIGHTS)
    inputs = _GROUPS if weight == "block" else _INPUTS
    activation = _kind("input_activations", group.get("input_activations"), inputs)
    return (BLOCKS, {}) if weight == "block" else (ROWS, {"activation": activation, "weight": weight})


def _kind(part: str, said: Mapping[str, Any] | None, known: Mapping[str, Mapping[str, Any]]) -> str:
    """Which of some descriptions this is."""
    for kind, description in known.items():
        if said is not None and all(_value(said, key) == value for key, value in description.items()):
            return kind
    keys = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic")
    got = None if said is None else {key: said[key] for key in keys if said.get(key) is not None}
    raise FormatError(f"compressed-tensors: {part}: expected symmetric FP8 ({' or '.join(known)}), got {got}")


def _value(said: Mapping[str, Any], key: str) -> Any:
    value = said.get(key, _USUAL.get(key))
    # Earlier versions of the package wrote "128x128".
    return [int(size) for size in value.split("x")] if key == "block_structure" and isinstance(value, str) else value


def parts(module: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Every tensor that a layer has, by the last part of its name, beside its bias."""
    return frozenset(_expected(module, options, (0, 0)))


def to_tensors(weight: ModuleWeight | BlockWeight) -> dict[str, Tensor]:
    """The tensors of a weight of either class by the last part of their names.

    Raises FormatError for blocks of a layer whose inputs no groups of 128 fill, which its reader does not run.
    """
    if isinstance(weight, BlockWeight):
        divides("in_features", weight.q.shape[1], FP8_BLOCK, "compressed-tensors")
        return {"weight": weight.q, "weight_scale": weight.scale.float()}
    scale = weight.state["weight_scale"]
    return {**weight.state, "weight_scale": scale if weight.options["weight"] == "tensor" else scale.unsqueeze(1)}


def from_tensors(
    tensors: Mapping[str, Tensor], module: str, options: Mapping[str, Any], shape: tuple[int, int]
) -> ModuleWeight | BlockWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    require(tensors, _expected(module, options, shape))
    if module == BLOCKS:
        return BlockWeight(tensors["weight"], tensors["weight_scale"].float())
    scales = {name: tensor.float().flatten() for name, tensor in tensors.items() if name != "weight"}
    state = {"weight": tensors["weight"], **scales}
    return ModuleWeight(ROWS, options, state, lambda: state["weight"].float() * state["weight_scale"].view(-1, 1))


def _expected(module: str, options: Mapping[str, Any], shape: tuple[int, int]) -> Expected:
    if module == BLOCKS:
        return {"weight": (FP8, shape), "weight_scale": (None, blocks_of(shape))}
    inputs: Expected = {"input_scale": (None, (1,))} if options["activation"] == "static" else {}
    scales = (1,) if options["weight"] == "tensor" else (shape[0], 1)
    return {"weight": (FP8, shape), "weight_scale": (None, scales), **inputs}
