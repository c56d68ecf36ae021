"""The configurations of AutoRound: GPTQ's or AWQ's tensors, with exceptions by name or regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from epiloq.formats.configs import awq, gptq
from epiloq.formats.configs.keys import TUNING, check_keys, entries, excludes, mapping, names, one_of, pattern
from epiloq.formats.description import Description, Rules
from epiloq.formats.layouts.awq import BITS
from epiloq.formats.layouts.base import FormatError

METHODS = ("auto-round", "intel/auto-round")
# "auto_round" and GPTQModel store zero points unchanged, AutoGPTQ stores them minus one. A kernel may follow, without
# effect on the layout, as in "auto_round:gptq:exllamav2".
_LAYOUTS = {
    "auto": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "gptq": "gptq",
    "auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "gemm",
    "auto_round:awq": "gemm",
}
_KERNELS = ("exllamav2", "tritonv2", "triton", "cuda", "gemm")
_NUMBERS = {"bits", "group_size", "sym", "data_type"}
_ACTIVATIONS = {"act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic"}
_KNOWN = {"quant_method", "packing_format", "extra_config", "layer_config", "to_quant_block_names", "quant_block_list"}
_KNOWN |= {"block_name_to_quantize", "modules_to_not_convert", *_NUMBERS, *_ACTIVATIONS}
_WHERE = "auto-round"
_FLOAT_BITS = 16
SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters that make a name in ``extra_config`` a regular expression."""


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    check_keys(found, _KNOWN, _WHERE, TUNING)
    if found.get("bits") is None or found.get("group_size") is None:
        raise FormatError(f"{_WHERE}: quantization_config: expected bits and group_size")
    base = _changed(Description(_layout(found)), found, _WHERE)
    if base is None:
        raise FormatError(f"{_WHERE}: bits: expected 2 to 8, got {found['bits']!r}")
    extra = {**mapping(found, "layer_config", _WHERE), **mapping(found, "extra_config", _WHERE)}
    exceptions = {name: _changed(base, entry, f"{_WHERE}: extra_config: {name}") for name, entry in extra.items()}
    expressions = [(pattern(name, f"{_WHERE}: extra_config"), name) for name in exceptions if set(name) & SPECIAL]
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


def _layout(found: Mapping[str, Any]) -> str:
    """The layout of the tensors. Before AutoRound had ``packing_format``, ``backend`` named it; in newer files that is
    the kernel to use, often "auto"."""
    key = "packing_format" if "packing_format" in found else "backend"
    value = found.get(key, "auto")
    parent, _, kernel = str(value).rpartition(":")
    if kernel in _KERNELS and parent in _LAYOUTS:
        return _LAYOUTS[parent]
    return _LAYOUTS[one_of(found, key, "auto", tuple(_LAYOUTS), _WHERE)]


def _changed(base: Description, entry: Any, where: str) -> Description | None:
    """A description changed by an entry of ``extra_config``; None for 16 bits, which means floating point."""
    entries(entry, _KNOWN, where, TUNING)
    one_of(entry, "act_bits", None, (None, 16, 32), where)
    bits = base.bits if entry.get("bits") is None else entry["bits"]
    if type(bits) is not int:
        raise FormatError(f"{where}: bits: expected 2 to 8, or 16 for floating point, got {bits!r}")
    if bits >= _FLOAT_BITS:
        return None
    one_of(entry, "data_type", "int", ("int", None), where)
    if base.layout == "gemm":
        usual = {"group_size": base.group_size} if base.bits == BITS else {}
        given = {"group_size": entry["group_size"]} if entry.get("group_size") is not None else {}
        return awq.described({**usual, **given, "bits": bits})
    made = gptq.changed(base, {key: value for key, value in entry.items() if key in _NUMBERS}, where)
    return replace(made, ordered=False)


def _blocks(found: Mapping[str, Any]) -> list[str]:
    """Names of the modules that contain the quantised layers; empty means all."""
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
