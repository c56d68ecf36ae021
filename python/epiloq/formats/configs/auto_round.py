"""The configurations of AutoRound: GPTQ's or AWQ's tensors, with exceptions by name or regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from epiloq.formats.configs import awq, gptq
from epiloq.formats.configs.keys import TUNING, check_keys, excludes, mapping, names, one_of, pattern
from epiloq.formats.description import Description, Rules
from epiloq.formats.layouts.awq import BITS
from epiloq.formats.layouts.base import FormatError

METHODS = ("auto-round", "intel/auto-round")
# "auto_round" alone and GPTQModel's store zero points as they are, AutoGPTQ's less one.
_LAYOUTS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "gemm",
}
_NUMBERS = {"bits", "group_size", "sym", "data_type"}
_ACTIVATIONS = {"act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic"}
_KNOWN = {"quant_method", "packing_format", "extra_config", "layer_config", "to_quant_block_names", "quant_block_list"}
_KNOWN |= {"block_name_to_quantize", "modules_to_not_convert", *_NUMBERS, *_ACTIVATIONS}
_WHERE = "auto-round"
_FLOAT_BITS = 16
_SPECIAL = set("*+?^$()[]{}|\\")


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, which names key and value, for what is not read."""
    check_keys(found, _KNOWN, _WHERE, TUNING)
    layout = _LAYOUTS[one_of(found, "packing_format", "auto_round:auto_gptq", tuple(_LAYOUTS), _WHERE)]
    base = _changed(Description(layout), found, _WHERE)
    if base is None:
        raise FormatError(f"{_WHERE}: bits: expected 2 to 8, got {found.get('bits')!r}")
    extra = {**mapping(found, "layer_config", _WHERE), **mapping(found, "extra_config", _WHERE)}
    exceptions = {name: _changed(base, said, f"{_WHERE}: extra_config: {name}") for name, said in extra.items()}
    expressions = [(pattern(name, f"{_WHERE}: extra_config"), name) for name in exceptions if set(name) & _SPECIAL]
    blocks, left = _blocks(found), names(found, "modules_to_not_convert", _WHERE)

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        for name in layer:
            if name in exceptions:
                return exceptions[name]
        for expression, text in expressions:
            if any(expression.search(name) for name in layer):
                return exceptions[text]
        if any(excludes(left, name) for name in layer):
            return None
        within = not blocks or any(f"{name}.".startswith(f"{block}.") for name in layer for block in blocks)
        return base if within else None

    return rules


def _changed(base: Description, said: Any, where: str) -> Description | None:
    """A description with the numbers that an entry gives; None for 16 bits, which are in floating point."""
    if not isinstance(said, dict):
        raise FormatError(f"{where}: expected an object, got {said!r}")
    check_keys(said, _KNOWN, where, TUNING)
    one_of(said, "act_bits", None, (None, 16, 32), where)
    if said.get("bits", base.bits) >= _FLOAT_BITS:
        return None
    one_of(said, "data_type", "int", ("int", None), where)
    if base.layout == "gemm":
        usual = {"bits": base.bits, "group_size": base.group_size} if base.bits == BITS else {}
        return awq.described({**usual, **{key: said[key] for key in ("bits", "group_size") if key in said}})
    made = gptq.changed(base, {key: value for key, value in said.items() if key in _NUMBERS}, where)
    return replace(made, ordered=False)


def _blocks(found: Mapping[str, Any]) -> list[str]:
    """Names of what holds the quantised layers; none means all."""
    for key in ("quant_block_list", "block_name_to_quantize", "to_quant_block_names"):
        value = found.get(key)
        if value:
            return [name for text in _flat(value, key) for name in re.split(r"\s*,\s*", text.strip()) if name]
    return []


def _flat(value: Any, key: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise FormatError(f"{_WHERE}: {key}: expected names, got {value!r}")
    return [text for each in value for text in _flat(each, key)]
