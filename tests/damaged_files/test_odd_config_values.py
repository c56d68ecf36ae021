"""Every entry of every method's configuration, replaced by values of other types: parsed, or refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import foreign_checkpoints as foreign
from epiloq.formats import readers
from epiloq.formats.layouts.base import FormatError

UP, QUERY = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "to_quant_block_names": ["model"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
CONFIGS: dict[str, dict[str, Any]] = {name: config for name, (_, config) in foreign._ALL.items()} | {
    "auto-round": AUTO_ROUND
    | {"packing_format": "auto_round:auto_gptq", "data_type": "int", "act_bits": 16, "modules_to_not_convert": ["a"]}
    | {"extra_config": {UP: {"bits": 8, "group_size": 64, "sym": False, "data_type": "int", "act_bits": 16}}},
    "auto-round as awq": AUTO_ROUND
    | {"packing_format": "auto_round:auto_awq", "extra_config": {UP: {"bits": 4, "group_size": 64}}},
    "gptq, dynamic": GPTQ
    | {"dynamic": {"+:.*up": {"bits": 8, "group_size": 64, "sym": True}, "-:.*down": {}}, "pack_dtype": "int32"}
    | {"checkpoint_format": "gptq_v2", "modules_to_not_convert": ["a"]},
    "awq, dynamic": AWQ | {"dynamic": {"-:.*up": {}}, "modules_to_not_convert": ["a"]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    | {"llm_int8_skip_modules": ["lm_head"], "llm_int8_has_fp16_weight": False, "bnb_4bit_quant_type": "nf4"},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["a"]},
    "fp8, static": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    | {"ignored_layers": ["a"], "expert_dtype": "fp8", "scale_fmt": "ue8m0", "fmt": "e4m3"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_scheme": CACHE}
    | {"ignore": ["a"], "config_groups": {"group_0": {"weights": {}, "targets": ["Linear"]}}},
    "modelopt, beside": {"quantization": {"quant_algo": "W4A8_AWQ", "group_size": 128, "kv_cache_quant_algo": "FP8"}}
    | {"quant_method": "modelopt"},
    "modelopt, mixed": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    | {"quantized_layers": {UP: {"quant_algo": "FP8"}, "model.layers.1": {"quant_algo": "NVFP4", "group_size": 16}}},
    "quark": {"quant_method": "quark", "global_quant_config": {"weight": FP4}, "exclude": ["a"]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]},
}
ODD: list[Any] = [None, True, False, "4", "", [], [1], ["a"], [None], {}, {"a": 1}, -1, 0, 3, 1 << 40, 1.5]
ODD += [float("nan"), float("inf"), [[]], [["a", 1]], {"a": None}]


def places(entry: Any) -> Iterator[tuple[Any, ...]]:
    """Where the entries of a configuration are, at any depth."""
    pairs = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
    for key, value in pairs:
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


def replaced(config: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    held: Any = changed
    for key in place[:-1]:
        held = held[key]
    held[place[-1]] = value
    return changed


def parsed(config: dict[str, Any]) -> None:
    """Parse the configuration and describe some layers, as a reader does."""
    rules = readers.parse(config)
    for layer in (UP, QUERY, "lm_head"):
        described = rules([layer], nn.Linear)
        if described is not None:
            _ = described.quantization if described.kind == "int" else described.module


@pytest.mark.parametrize("name", CONFIGS)
def test_each_entry(name: str) -> None:
    parsed(CONFIGS[name])
    for place in places(CONFIGS[name]):
        for value in ODD:
            try:
                parsed(replaced(CONFIGS[name], place, value))
            except FormatError as error:
                assert "\n" not in str(error)
            except Exception as error:
                pytest.fail(f"{place} = {value!r}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("auto-round", ("bits",), "4", "auto-round: bits: expected 2 to 8, or 16 for floating point, got '4'"),
        ("auto-round", ("extra_config", UP, "bits"), float("inf"), rf"{UP}: bits: expected 2 to 8, .* got inf"),
        ("modelopt", ("kv_cache_scheme", "type"), ["float"], r"kv_cache_quant_algo: expected .* got .*\['float'\]"),
        (
            "pack-quantized",
            ("config_groups", "group_0", "weights", "group_size"),
            [32],
            r"expected at least 1, got \[32",
        ),
        (
            "pack-quantized",
            ("config_groups", "group_0", "weights", "actorder"),
            "columns",
            "weights: actorder: expected null or one of group, dynamic, weight, static, got 'columns'",
        ),
        (
            foreign.FP8_BLOCKS,
            ("config_groups", "group_0", "input_activations", "symmetric"),
            False,
            "expected symmetric FP8 in groups of 128 .*, got FP8 per group of 128 with zero points",
        ),
    ],
)
def test_refused(name: str, place: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        readers.parse(replaced(CONFIGS[name], place, value))


def test_no_bits_of_a_layer_are_those_of_the_others() -> None:
    """As null elsewhere."""
    config = replaced(CONFIGS["auto-round"], ("extra_config", UP, "bits"), None)
    described = readers.parse(config)([UP], nn.Linear)
    assert described is not None and (described.bits, described.group_size) == (4, 64)
