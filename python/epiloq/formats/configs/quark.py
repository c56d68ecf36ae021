"""The configurations of AMD's Quark: one setting for all layers, with exceptions by pattern.

Defined by ``quark/torch/quantization/config/config.py`` and ``quark/torch/utils/pack.py``; "Pack_mxfp4" packs even
columns into the low halves of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import check_keys, entries, mapping, names, one_of, pattern
from epiloq.formats.description import Description, Inputs, Rules
from epiloq.formats.layouts.base import FormatError, located

METHOD, MXFP4 = "quark", "quark mxfp4"
TENSORS, ROWS = "quark fp8", "quark fp8 rows"
# By the numbers' type, and whether words hold them in AWQ's order.
INTEGERS = {
    ("int4", True): "quark int4",
    ("int4", False): "quark int4 in order",
    ("uint4", True): "quark uint4",
    ("uint4", False): "quark uint4 in order",
    ("int8", True): "quark int8",
    ("uint8", True): "quark uint8",
}
"""Layouts of integers."""

_KNOWN = {"quant_method", "global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude", "export"}
_KNOWN |= {"algo_config", "kv_cache_quant_config", "softmax_quant_spec", "kv_cache_post_rope"}
_NOTES = {"quant_mode", "version", "packed_modules_mapping"}
_LAYER = {"weight", "input_tensors", "output_tensors", "bias"}
_NUMBERS = {"dtype", "qscheme", "group_size", "ch_axis", "is_dynamic", "scale_format", "block_size"}
# How scales were computed, and hints for kernels.
_OBSERVED = {"observer_cls", "round_method", "scale_calculation_mode", "scale_type", "symmetric", "is_scale_quant"}
_OBSERVED |= {"mx_element_dtype", "enable_buffer_reuse", "max_input_numel", "zero_point_type"}
_EXPORT = {"pack_method", "weight_format", "kv_cache_group"}
# Algorithms without effect at run time; rotations, for example, have one.
_OFFLINE = ("smooth", "smoothquant", "autosmoothquant", "awq", "gptq", "gptaq", "qronos")


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    check_keys(found, _KNOWN, METHOD, _NOTES)
    for key in ("layer_type_quant_config", "softmax_quant_spec"):
        if found.get(key):
            raise FormatError(f"{METHOD}: {key}: expected none, got {found[key]!r}")
    algorithms = found.get("algo_config") or []
    for one in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = one.get("name") if isinstance(one, dict) else one
        if name not in _OFFLINE:
            raise FormatError(f"{METHOD}: algo_config: name: expected one of {', '.join(_OFFLINE)}, got {name!r}")
    export = mapping(found, "export", METHOD)
    check_keys(export, _EXPORT, f"{METHOD}: export", {"min_kv_scale", "weight_merge_groups"})
    in_awqs = one_of(export, "pack_method", "reorder", ("reorder", "order"), f"{METHOD}: export") == "reorder"
    one_of(export, "weight_format", "real_quantized", ("real_quantized",), f"{METHOD}: export")
    cached = names(export, "kv_cache_group", f"{METHOD}: export")
    for name, entry in mapping(found, "kv_cache_quant_config", METHOD).items():
        _check_cache(entry, f"{METHOD}: kv_cache_quant_config: {name}")
    left = names(found, "exclude", METHOD)
    usual = _described(mapping(found, "global_quant_config", METHOD), f"{METHOD}: global_quant_config", in_awqs)
    each = {
        name: _described(
            entry if isinstance(entry, dict) else {"weight": entry},
            f"{METHOD}: layer_quant_config: {name}",
            in_awqs,
            cached=name in cached,
        )
        for name, entry in mapping(found, "layer_quant_config", METHOD).items()
    }

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        if any(_means(text, name) for text in left for name in layer):
            return None
        return next((one for text, one in each.items() if any(_means(text, name) for name in layer)), usual)

    return rules


def _means(text: str, layer: str) -> bool:
    """Whether a name, a shell-style pattern or, after "re:", a regular expression matches a layer."""
    if text.startswith("re:"):
        return pattern(text[3:], METHOD).match(layer) is not None
    return fnmatchcase(layer, text)


def _described(entry: Mapping[str, Any], where: str, in_awqs: bool, cached: bool = False) -> Description | None:
    """The description of one layer, whose words are `in_awqs` order; None leaves it in floating point. Outputs are
    quantised only to be `cached`, as keys and values; a cache in floating point may replace that one."""
    check_keys(entry, _LAYER, where, {"target_device"})
    if cached and entry.get("output_tensors") is not None:
        _check_cache({**entry, "weight": None, "input_tensors": None}, where)
        entry = {**entry, "output_tensors": None}
    for part in ("output_tensors", "bias"):
        if entry.get(part) is not None:
            raise FormatError(f"{where}: {part}: expected none, got {entry[part]!r}")
    weight, inputs = entry.get("weight"), entry.get("input_tensors")
    if weight is None and inputs is None:
        return None
    if _dtype(weight) == _FP8:
        return _float8(weight, inputs, where)
    if _dtype(weight) in _BITS:
        return _integers(weight, inputs, where, in_awqs)
    _check_mxfp4(weight, f"{where}: weight", dynamic=False)
    if inputs is not None:
        _check_mxfp4(inputs, f"{where}: input_tensors", dynamic=True)
    of_inputs = None if inputs is None else Inputs("fp4", "group", group_size=32)
    return Description(MXFP4, "fp4", 4, "group", 32, inputs=of_inputs)


_FP8, _BITS = "fp8_e4m3", {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
_STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group", "per_token": "token"}


def _dtype(entry: Any) -> str | None:
    found = entry.get("dtype") if isinstance(entry, dict) else None
    return found if isinstance(found, str) else None


def _check_cache(entry: Any, where: str) -> None:
    """Raise FormatError for cached keys or values that are more than rounded to FP8."""
    entries(entry, _LAYER, where, {"target_device"})
    for part in ("weight", "input_tensors", "bias"):
        if entry.get(part) is not None:
            raise FormatError(f"{where}: {part}: expected none, got {entry[part]!r}")
    _numbers_of_fp8(entry.get("output_tensors"), f"{where}: output_tensors")


def _float8(weight: Any, inputs: Any, where: str) -> Description:
    """FP8 weights per tensor or channel; activations as they are, per tensor, or per token."""
    _, of_weights, dynamic = _numbers_of_fp8(weight, f"{where}: weight")
    if dynamic:
        raise FormatError(f"{where}: weight: is_dynamic: expected scales in the files, got {dynamic!r}")
    of_inputs = None
    if inputs is not None:
        strategy, _, dynamic = _numbers_of_fp8(inputs, f"{where}: input_tensors")
        of_inputs = Inputs("fp8", strategy, dynamic)
        if strategy == "token" and not dynamic:
            raise FormatError(f"{where}: input_tensors: is_dynamic: expected true with per_channel, got {dynamic!r}")
    return Description(TENSORS if of_weights == "tensor" else ROWS, "fp8", strategy=of_weights, inputs=of_inputs)


def _integers(weight: Any, inputs: Any, where: str, in_awqs: bool) -> Description:
    """Integers of 4 bits per channel or group, or of 8 bits per tensor, too; activations as they are, or of 8 bits."""
    strategy, symmetric, dynamic = _numbers_of_integers(weight, f"{where}: weight")
    kind = weight["dtype"]
    allowed = ("channel", "group") if _BITS[kind] == 4 else ("tensor", "channel", "group")
    if strategy not in allowed or dynamic:
        expected = ", ".join(f"per_{one}" for one in allowed)
        raise FormatError(f"{where}: weight: expected {kind} {expected}, with scales in the files, got {weight!r}")
    if strategy == "group" and not (type(weight.get("group_size")) is int and weight["group_size"] > 0):
        raise FormatError(f"{where}: weight: group_size: expected at least 1, got {weight.get('group_size')!r}")
    one_of(weight, "ch_axis", None, (0, None) if strategy == "channel" else (1, -1, None), f"{where}: weight")
    of_inputs = None
    if _dtype(inputs) == _FP8:
        granularity, _, dynamic = _numbers_of_fp8(inputs, f"{where}: input_tensors")
        of_inputs = Inputs("fp8", granularity, dynamic)
    elif inputs is not None:
        granularity, own, dynamic = _numbers_of_integers(inputs, f"{where}: input_tensors")
        one_of(inputs, "dtype", None, ("int8",), f"{where}: input_tensors")
        granularity = "token" if granularity == "channel" else granularity
        of_inputs = Inputs("int", granularity, dynamic, own)
    size = weight["group_size"] if strategy == "group" else -1
    layout = INTEGERS[kind, in_awqs or _BITS[kind] == 8]
    made = Description(layout, "int", _BITS[kind], strategy, size, symmetric=symmetric, inputs=of_inputs)
    with located(where):
        _ = made.quantization
    return made


def _numbers_of_integers(entry: Any, where: str) -> tuple[str, bool, bool]:
    """The granularity of scales, whether there are no zero points, and whether scales are computed at run time."""
    entries(entry, _NUMBERS, where, _OBSERVED)
    one_of(entry, "dtype", None, tuple(_BITS), where)
    one_of(entry, "zero_point_type", "int32", ("int32", None), where)
    scheme = one_of(entry, "qscheme", None, tuple(_STRATEGIES), where)
    symmetric = one_of(entry, "symmetric", None, (True, False), where)
    if symmetric and entry["dtype"].startswith("u"):
        raise FormatError(f"{where}: symmetric: expected false with {entry['dtype']}, got true")
    return _STRATEGIES[scheme], symmetric, one_of(entry, "is_dynamic", False, (True, False, None), where) is True


def _numbers_of_fp8(entry: Any, where: str) -> tuple[str, str, bool]:
    """The granularity of scales as activations' and as weights', and whether they are computed at run time."""
    entries(entry, _NUMBERS, where, _OBSERVED)
    one_of(entry, "dtype", None, (_FP8,), where)
    scheme = one_of(entry, "qscheme", None, ("per_tensor", "per_channel", "per_token"), where)
    of_inputs, of_weights = ("tensor", "tensor") if scheme == "per_tensor" else ("token", "channel")
    one_of(entry, "group_size", None, (None,), where)
    return of_inputs, of_weights, one_of(entry, "is_dynamic", False, (True, False, None), where) is True


def _check_mxfp4(entry: Any, where: str, dynamic: bool) -> None:
    entries(entry, _NUMBERS, where, _OBSERVED)
    one_of(entry, "dtype", None, ("fp4",), where)
    one_of(entry, "qscheme", None, ("per_group",), where)
    one_of(entry, "group_size", None, (32,), where)
    one_of(entry, "scale_format", "e8m0", ("e8m0",), where)
    one_of(entry, "ch_axis", -1, (-1, 1), where)
    one_of(entry, "is_dynamic", dynamic, (dynamic,), where)
