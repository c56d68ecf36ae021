"""The layout ``float-quantized`` of the compressed-tensors package: FP8 weights and activations, as `nn.Fp8Linear`.

A layer's options here are those of `nn.Fp8Linear`, "activation" and "weight".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from epiloq.formats.compressed_tensors import document, first_group
from epiloq.formats.compressed_tensors_layers import FP8
from epiloq.formats.layouts import Expected, FormatError, require
from epiloq.formats.weights import ModuleWeight

LAYOUT, MODULE = "float-quantized", "Fp8Linear"
# What the package called it before, with the same tensors.
_FORMER = "naive-quantized"
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_WEIGHTS: dict[str, dict[str, Any]] = {
    kind: {**_FLOAT8, "strategy": kind, "dynamic": False} for kind in ("channel", "tensor")
}
_INPUTS: dict[str, dict[str, Any]] = {
    "token": {**_FLOAT8, "strategy": "token", "dynamic": True},
    "tensor": {**_FLOAT8, "strategy": "tensor", "dynamic": True},
    "static": {**_FLOAT8, "strategy": "tensor", "dynamic": False},
}
# What the package takes where a description leaves something out; of "type", integers.
_USUAL = {"num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"}


def knows(found: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` is of weights in floating point, which `parse` reads or refuses."""
    return (first_group(found).get("weights") or {}).get("type") == "float"


def config(options: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model whose linear layers are alike but for those in `ignore`."""
    inputs, weights = _INPUTS[options["activation"]], _WEIGHTS[options["weight"]]
    return document(LAYOUT, [{"targets": ["Linear"], "input_activations": inputs, "weights": weights}], ignore)


def parse(found: Mapping[str, Any]) -> dict[str, str]:
    """The options of every layer. Raises FormatError for what `nn.Fp8Linear` does not do, and says what that is."""
    group = first_group(found)
    if len(found["config_groups"]) > 1:
        raise FormatError("compressed-tensors: config_groups: expected one of FP8 weights")
    layout = group.get("format") or found.get("format")
    if layout not in (LAYOUT, _FORMER):
        raise FormatError(f"compressed-tensors: format: expected {LAYOUT}, got {layout!r}")
    return {
        "activation": _kind("input_activations", group.get("input_activations"), _INPUTS),
        "weight": _kind("weights", group.get("weights"), _WEIGHTS),
    }


def _kind(part: str, said: Mapping[str, Any] | None, known: Mapping[str, Mapping[str, Any]]) -> str:
    """Which of some descriptions this is."""
    for kind, description in known.items():
        if said is not None and all(said.get(key, _USUAL.get(key)) == value for key, value in description.items()):
            return kind
    got = None if said is None else {key: said.get(key) for key in ("num_bits", "type", "strategy", "dynamic")}
    raise FormatError(f"compressed-tensors: {part}: expected symmetric FP8 ({' or '.join(known)}), got {got}")


def parts(options: Mapping[str, Any]) -> frozenset[str]:
    """Every tensor that a layer has, by the last part of its name, beside its bias."""
    return frozenset(_expected(options, (0, 0)))


def to_tensors(weight: ModuleWeight) -> dict[str, Tensor]:
    """The tensors of a weight of `nn.Fp8Linear` by the last part of their names."""
    scale = weight.state["weight_scale"]
    return {**weight.state, "weight_scale": scale if weight.options["weight"] == "tensor" else scale.unsqueeze(1)}


def from_tensors(tensors: Mapping[str, Tensor], options: Mapping[str, Any], shape: tuple[int, int]) -> ModuleWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    require(tensors, _expected(options, shape))
    scales = {name: tensor.float().flatten() for name, tensor in tensors.items() if name != "weight"}
    state = {"weight": tensors["weight"], **scales}
    return ModuleWeight(MODULE, options, state, lambda: state["weight"].float() * state["weight_scale"].view(-1, 1))


def _expected(options: Mapping[str, Any], shape: tuple[int, int]) -> Expected:
    inputs: Expected = {"input_scale": (None, (1,))} if options["activation"] == "static" else {}
    scales = (1,) if options["weight"] == "tensor" else (shape[0], 1)
    return {"weight": (FP8, shape), "weight_scale": (None, scales), **inputs}
