"""The configurations of NVIDIA's ModelOpt: one algorithm for all layers, or one for each, in config.json or next to it.

``hf_quant_config.json`` has an object "quantization" whose "exclude_modules" config.json calls "ignore"; defined by
``modelopt/torch/export/{quant_utils,convert_hf_config}.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import check_keys, mapping, names
from epiloq.formats.description import INT4_FOR_FP8, Description, Inputs, Rules
from epiloq.formats.layouts.base import FormatError
from epiloq.nn.base.scaled_input import SCALE

METHOD = "modelopt"
METHODS = (METHOD, "modelopt_fp4", "modelopt_mixed")
NVFP4, MXFP4, MXFP8 = "modelopt nvfp4", "modelopt mxfp4", "modelopt mxfp8"
TENSORS, ROWS, BLOCKS = "modelopt fp8", "modelopt fp8 rows", "modelopt fp8 blocks"
INT4, INT4_FP8 = "modelopt int4", INT4_FOR_FP8
SCALED = frozenset({NVFP4, INT4, INT4_FP8})
"""Layouts of layers that may have a vector by which inputs are multiplied first."""

# Algorithm names and their descriptions. FP4 activations stay in floating point, as do FP8 ones with one scale at run
# time.
_ALGORITHMS = {
    "NVFP4": Description(NVFP4, "fp4", 4, "group", 16, inputs=Inputs("fp4", "tensor", dynamic=False)),
    "NVFP4_AWQ": Description(NVFP4, "fp4", 4, "group", 16, inputs=Inputs("fp4", "tensor", dynamic=False)),
    "W4A8_NVFP4_FP8": Description(NVFP4, "fp4", 4, "group", 16, inputs=Inputs("fp8", "tensor", dynamic=False)),
    "W4A16_AWQ": Description(INT4, "int", 4, "group", 128),
    "W4A8_AWQ": Description(INT4_FP8, "int", 4, "group", 128),
    "W4A16_NVFP4": Description(NVFP4, "fp4", 4, "group", 16),
    "MXFP4": Description(MXFP4, "fp4", 4, "group", 32, inputs=Inputs("fp4", "group", group_size=32)),
    # Exported without calibration, so that files have no scale of activations.
    "W4A8_MXFP4_FP8": Description(MXFP4, "fp4", 4, "group", 32, inputs=Inputs("fp8", "tensor")),
    "FP8": Description(TENSORS, "fp8", strategy="tensor", inputs=Inputs("fp8", "tensor", dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": Description(ROWS, "fp8", strategy="channel", inputs=Inputs("fp8", "token")),
    "FP8_PB_WO": Description(BLOCKS, "fp8", strategy="block", block=(128, 128)),
    "MXFP8": Description(MXFP8, "fp8", strategy="block", block=(1, 32), inputs=Inputs("fp8", "group", group_size=32)),
}
# Algorithms that epiloq has no layers for.
_OTHERS = {
    "W8A8_SQ_PER_CHANNEL": "int8 inputs by a stored scale that are scaled by channel before",
    "W8A16": "int8 weights in the layout of TensorRT-LLM",
    "NVFP4_SVD": "FP4 weights plus the product of two thin matrices",
}
_OF_AWQ = ("NVFP4_AWQ", "W4A16_AWQ", "W4A8_AWQ")
_MIXED = "MIXED_PRECISION"
_BESIDE = {"quant_method", "quantization", "producer"}
_INSIDE = {"quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules", "quantized_layers"}
_FLAT = {"quant_method", "kv_cache_scheme", "ignore", "config_groups", *_INSIDE}
_NOTES = {"producer", "quant_library"}
_LAYER = {"quant_algo", "group_size"}
# Entries of config_groups that repeat the algorithm; other entries change the computation.
_GROUP = {"input_activations", "weights", "targets", "quant_algo"}
# Caches that only round keys and values, so that a float cache may replace them.
_CACHES = ("FP8", "INT8", "NVFP4", "NVFP4_AFFINE")
# Bits, type and block size.
_OF_BITS: dict[tuple[Any, ...], str] = {
    (8, "float", None): "FP8",
    (8, "int", None): "INT8",
    (4, "float", 16): "NVFP4",
}


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    inner = found.get("quantization")
    entries = found if inner is None else mapping(found, "quantization", METHOD)
    described = _all_described(entries)
    before = _before(entries.get("quant_algo"))
    if inner is None:
        check_keys(found, _FLAT | before, METHOD, _NOTES)
    else:
        check_keys(found, _BESIDE, METHOD)
        check_keys(entries, _INSIDE | before, f"{METHOD}: quantization")
    for group in mapping(entries, "config_groups", METHOD).values():
        check_keys(group if isinstance(group, dict) else {"config_groups": group}, _GROUP, f"{METHOD}: config_groups")
    _check_cache(entries)
    left = names(entries, "ignore", METHOD) + names(entries, "exclude_modules", METHOD)

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        if any(_is_in(name, pattern) for name in layer for pattern in left):
            return None
        # Among matching prefixes the longest applies.
        held = [known for known in described if any(_is_in(name, known) for name in layer)]
        return described[max(held, key=len)] if held else None

    return rules


def _is_in(layer: str, pattern: str) -> bool:
    """Whether a name or pattern matches a layer or a parent of it; an empty one matches everything."""
    return not pattern or fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*")


def _all_described(entries: Mapping[str, Any]) -> dict[str, Description]:
    """Descriptions by names of layers or of what holds them; empty if only the cache is quantised."""
    if entries.get("quant_algo") is None and (entries.get("kv_cache_quant_algo") or entries.get("kv_cache_scheme")):
        return {}
    return _of_layers(entries) if entries.get("quant_algo") == _MIXED else {"": _described(entries, METHOD)}


def _of_layers(entries: Mapping[str, Any]) -> dict[str, Description]:
    layers = mapping(entries, "quantized_layers", METHOD)
    if not layers:
        raise FormatError(f"{METHOD}: quantized_layers: expected what each layer is quantised to, got none")
    found = {}
    for name, entry in layers.items():
        where = f"{METHOD}: quantized_layers: {name}"
        if not isinstance(entry, dict) or not name:
            raise FormatError(f"{where}: expected an object, got {entry!r}")
        found[name] = _described(entry, where)
        check_keys(entry, _LAYER | _before(entry.get("quant_algo")), where)
    return found


def _before(algorithm: object) -> set[str]:
    """Additional entries of AWQ's algorithms, whose layers may have a tensor that scales their inputs."""
    return {SCALE} if isinstance(algorithm, str) and algorithm.upper() in _OF_AWQ else set()


def _described(entries: Mapping[str, Any], where: str) -> Description:
    algorithm = entries.get("quant_algo")
    name = algorithm.upper() if isinstance(algorithm, str) else ""
    if name in _OTHERS:
        raise FormatError(f"{where}: quant_algo: {algorithm} is {_OTHERS[name]}; epiloq has no layer that computes it")
    found = _ALGORITHMS.get(name)
    if found is None:
        raise FormatError(
            f"{where}: quant_algo: expected one of {', '.join((*_ALGORITHMS, _MIXED))}, got {algorithm!r}"
        )
    size = entries.get("group_size")
    if found.kind == "int" and type(size) is int and size > 0:
        return replace(found, group_size=size)
    expected = _group_of(found)
    if size not in (None, expected or 0) or isinstance(size, bool):
        wanted = "a positive number" if found.kind == "int" else expected or "none"
        raise FormatError(f"{where}: group_size: expected {wanted} of {algorithm}, got {size!r}")
    return found


def _group_of(described: Description) -> int | None:
    """The group size that an algorithm's entry states; None if it states none."""
    if described.layout == MXFP8 and described.block is not None:
        return described.block[1]
    return described.group_size if described.kind == "fp4" else None


def _check_cache(entries: Mapping[str, Any]) -> None:
    """Raise FormatError for a key-value cache in a format whose rounding cannot be omitted."""
    cache = entries.get("kv_cache_quant_algo", entries.get("kv_cache_scheme"))
    if isinstance(cache, dict):
        check_keys(cache, {"dynamic", "num_bits", "type", "group_size"}, f"{METHOD}: kv_cache_scheme")
        numbers = cache.get("num_bits"), cache.get("type"), cache.get("group_size")
        cache = next((name for known, name in _OF_BITS.items() if known == numbers), None) or dict(cache)
    if cache is not None and cache not in _CACHES:
        raise FormatError(f"{METHOD}: kv_cache_quant_algo: expected {' or '.join(_CACHES)} or none, got {cache!r}")


def config(layers: Mapping[str, Description], ignore: Collection[str]) -> dict[str, Any]:
    """The ``quantization_config`` of layers by name (all names that a reader may match); `ignore` names the others.

    Raises FormatError for layers that no algorithm describes.
    """
    known = {described: name for name, described in reversed(_ALGORITHMS.items())}
    found = {name: known[described] for name, described in layers.items()}
    made: dict[str, Any] = {"quant_method": METHOD, "producer": {"name": "epiloq"}, "ignore": sorted(ignore)}
    if len(set(found.values())) == 1:
        algorithm = next(iter(found.values()))
        return made | {"quant_algo": algorithm} | _size_of(algorithm)
    each = {name: {"quant_algo": algorithm, **_size_of(algorithm)} for name, algorithm in sorted(found.items())}
    return made | {"quant_algo": _MIXED, "quantized_layers": each}


def _size_of(algorithm: str) -> dict[str, int]:
    size = _group_of(_ALGORITHMS[algorithm])
    return {} if size is None else {"group_size": size}
