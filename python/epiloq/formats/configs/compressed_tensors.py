"""The configurations of compressed-tensors: groups of layers, by name, regular expression or class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import check_keys, mapping, names, pattern
from epiloq.formats.description import Description, Inputs, Kind, Rules
from epiloq.formats.layouts.base import FormatError, flag, located

METHOD = "compressed-tensors"
PACKED, INTEGER, FLOAT, FORMER = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
MIXED = "mixed-precision"
WITHOUT_WEIGHT = frozenset({PACKED, NVFP4, MXFP4})
"""Layouts whose layers have no tensor of the name ``weight``."""

_KNOWN = {"quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config", "transform_config"}
# State of the tool's own workflow, and notes.
_NOTES = {"quantization_status", "global_compression_ratio", "version", "run_compressed", "dequantize"}
_NOTES |= {"use_optimized_inference"}
_GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
_NUMBERS = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"}
# How scales were computed, and dtypes, which the files contain.
_OBSERVED = {"actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_STRATEGIES = ("tensor", "channel", "group", "block")
# Values of ``actorder``: whether the files may have the order of groups. The package writes the strings; Booleans are
# older. Calibration in the order of activations ("weight", "static") leaves the groups as they are.
_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
# For each FP4 format: the package's names for strategy, block size and scale dtype.
_FP4 = {
    NVFP4: ("tensor_group", 16, "torch.float8_e4m3fn"),
    MXFP4: ("group", 32, "torch.uint8"),
}
_MX_BLOCK = 32
"""Weights that share a scale in MX formats."""
_CACHE = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"} | _OBSERVED


@dataclass(frozen=True)
class _Numbers:
    """A group's entries for weights or activations, with the package's defaults for missing ones."""

    kind: Kind
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    check_keys(found, _KNOWN, METHOD, _NOTES)
    _check_neighbours(found)
    groups = found.get("config_groups") or {}
    only_cache = not groups and bool(found.get("kv_cache_scheme"))
    usable = isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())
    if not usable or not (groups or only_cache):
        raise FormatError(f"{METHOD}: config_groups: expected one or more objects, got {found.get('config_groups')!r}")
    # Among equal targets the last group applies, as in the package.
    targets: dict[str, Description | None] = {}
    for group in groups.values():
        listed = names(group, "targets", METHOD)
        if not listed:
            raise FormatError(f"{METHOD}: config_groups: targets: expected names, got {group.get('targets')!r}")
        described = _description(group, found.get("format"))
        targets |= dict.fromkeys(listed, described)
    ignored = _matching(names(found, "ignore", METHOD))
    chosen = _matching(sorted(targets, key=lambda target: ("re:" in target, target)))

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        if ignored(layer, kind) is not None:
            return None
        target = chosen(layer, kind)
        return None if target is None else targets[target]

    return rules


def _check_neighbours(found: Mapping[str, Any]) -> None:
    """Raise FormatError for entries that change the computation outside of quantised layers."""
    sparsity = mapping(found, "sparsity_config", METHOD)
    if sparsity.get("format", "dense") != "dense":
        raise FormatError(f"{METHOD}: sparsity_config: expected none or the format dense, got {sparsity!r}")
    transforms = mapping(found, "transform_config", METHOD)
    if any(transforms.values()):
        raise FormatError(
            f"{METHOD}: transform_config: expected none, because epiloq does not transform activations at run time, "
            f"got {transforms!r}"
        )
    cache = mapping(found, "kv_cache_scheme", METHOD)
    check_keys(cache, _CACHE, f"{METHOD}: kv_cache_scheme")


def _matching(targets: Sequence[str]) -> Callable[[Sequence[str], type[nn.Module]], str | None]:
    """The first target that matches a layer by one of its names, otherwise by its class or a base class, as in
    ``compressed_tensors.utils.match``.
    """
    named = [(target, None if target[:3] != "re:" else pattern(target[3:], METHOD)) for target in targets]

    def found(layer: Sequence[str], kind: type[nn.Module]) -> str | None:
        for target, expression in named:
            if any(name == target if expression is None else expression.match(name) for name in layer):
                return target
        classes = {cls.__name__ for cls in kind.__mro__ if issubclass(cls, nn.Module)}
        return next((target for target, _ in named if target in classes), None)

    return found


def _description(group: Mapping[str, Any], usual: str | None) -> Description | None:
    check_keys(group, _GROUP, f"{METHOD}: config_groups")
    if group.get("output_activations") is not None:
        raise FormatError(f"{METHOD}: output_activations: expected none, got {group['output_activations']!r}")
    weights, inputs = (_numbers(group, part) for part in ("weights", "input_activations"))
    if weights is None:
        if inputs is not None:
            raise FormatError(f"{METHOD}: weights: expected an object with input_activations, got None")
        return None
    if weights.kind == "fp4":
        return _fp4(group, weights, inputs, usual)
    if weights.dynamic or weights.strategy not in _STRATEGIES:
        raise FormatError(f"{METHOD}: weights: expected scales in the files (tensor, channel, group or block)")
    if weights.kind == "fp8" and (weights.bits != 8 or not weights.symmetric):
        actual = {key: value for key, value in group["weights"].items() if value is not None}
        raise FormatError(f"{METHOD}: weights: expected symmetric floats of 4 or 8 bits, got {actual!r}")
    if weights.kind == "int" and weights.block is not None:
        raise FormatError(f"{METHOD}: weights: strategy: no kernel supports integers in blocks of {weights.block}")
    layout = group.get("format") or (usual if usual != MIXED else None)
    in_bytes = weights.kind == "fp8" and "uint8" in str(group["weights"].get("scale_dtype"))
    if in_bytes and weights.group_size != _MX_BLOCK:
        raise FormatError(f"{METHOD}: weights: scale_dtype: expected uint8 only of groups of {_MX_BLOCK} (MXFP8)")
    expected = _layouts(weights.kind, inputs is not None, in_bytes)
    if layout is not None and layout not in expected:
        raise FormatError(f"{METHOD}: format: expected {' or '.join(expected[:-1] or expected)}, got {layout!r}")
    # A group of FP8 weights is a block of one row.
    block = (1, weights.group_size) if weights.kind == "fp8" and weights.strategy == "group" else weights.block
    described = Description(
        expected[0] if layout in (None, FORMER) else layout,
        weights.kind,
        weights.bits,
        weights.strategy if block is None else "block",
        weights.group_size if block is None else -1,
        block,
        weights.symmetric,
        ordered=_is_ordered(group["weights"]),
        inputs=None if inputs is None else _inputs(inputs),
    )
    with located(METHOD):
        _ = described.quantization if weights.kind == "int" else described.module
    return described


def _is_ordered(weights: Mapping[str, Any]) -> bool:
    order = weights.get("actorder")
    if order is None or isinstance(order, bool):
        return bool(order)
    if not isinstance(order, str) or order.lower() not in _ORDERS:
        expected = ", ".join(_ORDERS)
        raise FormatError(f"{METHOD}: weights: actorder: expected null or one of {expected}, got {order!r}")
    return _ORDERS[order.lower()]


def _fp4(group: Mapping[str, Any], weights: _Numbers, inputs: _Numbers | None, usual: str | None) -> Description:
    """The description of FP4 weights. Activations stay in floating point, with a warning, unless they are quantised to
    8 bits per token."""
    found = {(strategy, size): layout for layout, (strategy, size, _) in _FP4.items()}
    layout = found.get((weights.strategy, weights.group_size))
    if layout is None or not weights.symmetric or weights.dynamic:
        actual = {key: value for key, value in group["weights"].items() if value is not None}
        raise FormatError(
            f"{METHOD}: weights: expected symmetric FP4, tensor_group of 16 or group of 32, with scales in the files, "
            f"got {actual!r}"
        )
    named = group.get("format") or (usual if usual != MIXED else None)
    if named not in (None, layout):
        raise FormatError(f"{METHOD}: format: expected {layout}, got {named!r}")
    if inputs is not None and inputs.kind != "fp4":
        return Description(layout, "fp4", 4, "group", weights.group_size, inputs=_inputs(inputs))
    of_inputs = None if inputs is None else Inputs(inputs.kind, inputs.strategy, inputs.dynamic, inputs.symmetric)
    return Description(layout, "fp4", 4, "group", weights.group_size, inputs=of_inputs)


def _layouts(kind: Kind, with_inputs: bool, in_bytes: bool) -> tuple[str, ...]:
    """The layouts of such layers, whose scales may be `in_bytes` of E8M0: the default first, the former name, if there
    is one, last."""
    if kind == "fp8":
        return (MXFP8,) if in_bytes else (FLOAT, FORMER)
    return (INTEGER, PACKED, FORMER) if with_inputs else (PACKED, INTEGER, FORMER)


def _inputs(numbers: _Numbers) -> Inputs:
    if numbers.bits != 8:
        raise FormatError(f"{METHOD}: input_activations: num_bits: expected 8, got {numbers.bits!r}")
    return Inputs(numbers.kind, numbers.strategy, numbers.dynamic, numbers.symmetric, numbers.group_size)


def _numbers(group: Mapping[str, Any], part: str) -> _Numbers | None:
    where = f"{METHOD}: {part}"
    entry = group.get(part)
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: expected an object or null, got {entry!r}")
    check_keys(entry, _NUMBERS, where, _OBSERVED)
    size, kind = entry.get("group_size"), str(entry.get("type") or "int").lower()
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(entry.get("strategy") or usual).lower()
    block, dynamic = _block(entry.get("block_structure"), where), entry.get("dynamic") or False
    if kind not in ("int", "float"):
        raise FormatError(f"{where}: type: expected int or float, got {kind!r}")
    numbers: Kind = "int" if kind == "int" else "fp4" if entry.get("num_bits") == 4 else "fp8"
    # For FP4: blocks are scaled at run time, the whole tensor by a scale in the files.
    if not isinstance(dynamic, bool) and not (numbers == "fp4" and dynamic == "local"):
        raise FormatError(f"{where}: dynamic: expected true or false, got {dynamic!r}")
    if (strategy == "block") != (block is not None):
        raise FormatError(f"{where}: block_structure: expected one of blocks, got {entry.get('block_structure')!r}")
    grouped = strategy in ("group", "tensor_group")
    if grouped and not (type(size) is int and size > 0):
        raise FormatError(f"{where}: group_size: expected at least 1, got {size!r}")
    return _Numbers(
        numbers,
        entry.get("num_bits", 8),
        strategy,
        size if grouped and size is not None else -1,
        block,
        flag(entry, "symmetric", where),
        bool(dynamic),
    )


def _block(value: Any, where: str) -> tuple[int, int] | None:
    # Earlier versions of the package wrote "128x128".
    sizes = value.split("x") if isinstance(value, str) else value
    if sizes is None:
        return None
    if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdecimal() and int(size) > 0 for size in sizes):
        return int(sizes[0]), int(sizes[1])
    raise FormatError(f"{where}: block_structure: expected rows and columns, got {value!r}")


def config(
    layers: Mapping[str, Description], ignore: Sequence[str], tables: Collection[str] = (), *, restored: bool = False
) -> dict[str, Any]:
    """The ``quantization_config`` of layers by name (all names that a reader may match); `ignore` names the others.

    The largest group targets all linear layers, the other groups their layers' names; every group lists its embeddings
    (`tables`) by name. `restored` asks transformers to dequantise packed layers while it opens the directory, because
    it fails to open them otherwise. Raises FormatError for embeddings that are quantised differently from the layers.
    """
    groups: dict[Description, list[str]] = {}
    for name, described in layers.items():
        groups.setdefault(replace(described, ordered=False), []).append(name)
    if tables and len(groups) > 1:
        raise FormatError(
            f"{METHOD}: its reader supports a quantised embedding ({min(tables)}) with the layers' scheme only"
        )
    ranked = sorted(groups.items(), key=lambda group: -len([name for name in group[1] if name not in tables]))

    def targets(index: int, listed: Sequence[str]) -> list[str]:
        named = sorted(name for name in listed if index or name in tables)
        return named if index or len(named) == len(listed) else ["Linear", *named]

    entries = [_group(described, targets(i, listed)) for i, (described, listed) in enumerate(ranked)]
    layouts = {group["format"] for group in entries}
    found: dict[str, Any] = {
        "quant_method": METHOD,
        "format": layouts.pop() if len(layouts) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(entries)},
        "ignore": list(ignore),
    }
    packed = [described for described in groups if described.layout in WITHOUT_WEIGHT]
    if len(groups) == 1 and packed and (restored or _needs_restoring(packed[0], tables)):
        # It does so with the description of one group for all.
        found["dequantize"] = True
    return found


def _needs_restoring(described: Description, tables: Collection[str]) -> bool:
    """Whether transformers 5.24 with compressed-tensors 0.20 opens packed layers of any model only if it dequantises
    them: it gives packed zero points a wrong shape, and fails to initialise an embedding without a weight."""
    return described.layout == PACKED and (bool(tables) or not described.symmetric)


def _group(described: Description, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = _said(described.kind, described.symmetric, described.strategy, described.bits, False)
    if described.strategy == "group":
        weights["group_size"] = described.group_size
    if described.block is not None:
        weights["block_structure"] = list(described.block)
    if described.kind == "fp4":
        weights["strategy"], weights["group_size"], weights["scale_dtype"] = _FP4[described.layout]
    inputs = described.inputs
    activations = None if inputs is None else _said(inputs.kind, inputs.symmetric, inputs.strategy, 8, inputs.dynamic)
    if inputs is not None and activations is not None and inputs.strategy == "group":
        activations["group_size"] = inputs.group_size
    return {"targets": targets, "input_activations": activations, "weights": weights, "format": described.layout}


def _said(kind: Kind, symmetric: bool, strategy: str, bits: int, dynamic: bool) -> dict[str, Any]:
    number = "int" if kind == "int" else "float"
    return {"num_bits": bits, "type": number, "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic}
