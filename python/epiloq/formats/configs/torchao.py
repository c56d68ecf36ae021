"""The configurations of torchao in safetensors files: the file's metadata describes each layer's tensors as JSON.

``quantization_config`` only says how weights were quantised, by a class of torchao. Metadata is defined by
``torchao/prototype/safetensors/safetensors_utils.py``, the tensors by ``torchao/quantization/quantize_/workflows``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import check_keys, excludes, names, one_of
from epiloq.formats.description import Description, Inputs, Rules
from epiloq.formats.layouts.base import FormatError

METHOD = "torchao"
ANY, INTEGERS, FLOATS = "torchao", "torchao int", "torchao fp8"
"""The layout of layers before their metadata is read, and the layouts of integers and of FP8."""
_KNOWN = {"quant_method", "quant_type", "modules_to_not_convert"}
# What was quantised, and how; metadata has the result.
_NOTES = {"include_input_output_embeddings", "untie_embedding_weights", "quant_type_kwargs"}
_DATA = {"block_size", "dtype", "act_quant_kwargs"}
_INPUTS = {"granularity", "mapping_type", "reduce_range", "float8_dtype", "mm_config", "kernel_preference"}
_LIMITS = ("hp_value_lb", "hp_value_ub")
_BITS = (2, 3, 4, 8)

Shape = tuple[int, int]


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, which names key and value, for unsupported
    entries."""
    check_keys(found, _KNOWN, METHOD, _NOTES)
    left = names(found, "modules_to_not_convert", METHOD)

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        return None if any(excludes(left, name) for name in layer) else Description(ANY)

    return rules


def described(metadata: str | None, shape: Shape, has_zeros: bool) -> Description:
    """The description of a layer ``[N, K]``, given the metadata of its weight, and whether it has zero points other
    than 0. Raises FormatError, which names key and value, for what no layer computes."""
    try:
        found = json.loads(metadata or "null")
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{METHOD}: metadata: expected JSON: {error}") from None
    kind, data = (found.get("_type"), found.get("_data")) if isinstance(found, dict) else (found, None)
    if not isinstance(kind, str) or kind not in _KINDS or not isinstance(data, dict):
        raise FormatError(
            f"{METHOD}: metadata: _type: expected one of {', '.join(_KINDS)}, got {kind!r}; dequantise the model with "
            "torchao, and quantise it anew"
        )
    block = data.get("block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise FormatError(f"{METHOD}: metadata: block_size: expected rows and columns, got {block!r}")
    made = _KINDS[kind](data, _granularity(block, shape), symmetric=not has_zeros)
    try:
        _ = made.quantization if made.kind == "int" else made.module
    except FormatError:
        # More accurate than what the files describe.
        return replace(made, inputs=None, left=made.inputs)
    return made


def _granularity(block: list[int], shape: Shape) -> dict[str, Any]:
    """The entries of a `Description` for blocks of weights that share a scale."""
    rows, columns = block
    if rows == 1:
        return {"strategy": "channel"} if columns >= shape[1] else {"strategy": "group", "group_size": columns}
    if rows >= shape[0] and columns >= shape[1]:
        return {"strategy": "tensor"}
    return {"strategy": "block", "block": (rows, columns)}


def _int8(data: Mapping[str, Any], granularity: dict[str, Any], symmetric: bool) -> Description:
    check_keys(data, _DATA, f"{METHOD}: metadata", {"reduce_range"})
    return _integers(8, granularity, symmetric, _inputs(data.get("act_quant_kwargs"), "int"))


def _few_bits(data: Mapping[str, Any], granularity: dict[str, Any], symmetric: bool) -> Description:
    check_keys(data, {*_DATA, "target_dtype", "activation_quantization"}, f"{METHOD}: metadata")
    target = _named(data.get("target_dtype"))
    sizes = {f"int{bits}": next(size for size in _BITS if size >= bits) for bits in range(1, 9)}
    if target not in sizes:
        raise FormatError(f"{METHOD}: metadata: target_dtype: expected int1 to int8, got {target!r}")
    how = one_of(data, "activation_quantization", None, (None, "int8_asym_per_token"), f"{METHOD}: metadata")
    inputs = None if how is None else Inputs("int", "token", symmetric=False)
    return _integers(sizes[target], granularity, symmetric, inputs)


def _integers(bits: int, granularity: dict[str, Any], symmetric: bool, inputs: Inputs | None) -> Description:
    if granularity["strategy"] == "block":
        raise FormatError(f"{METHOD}: metadata: block_size: no kernel supports integers in {granularity['block']}")
    return Description(INTEGERS, "int", bits, **granularity, symmetric=symmetric, inputs=inputs)


def _float8(data: Mapping[str, Any], granularity: dict[str, Any], symmetric: bool) -> Description:
    check_keys(data, _DATA, f"{METHOD}: metadata", {"mm_config", "kernel_preference"})
    inputs = _inputs(data.get("act_quant_kwargs"), "fp8")
    if granularity["strategy"] == "group" or (inputs is not None and inputs.strategy == "group"):
        # Also of a layer as small as a block.
        granularity = {"strategy": "block", "block": tuple(data["block_size"])}
    return Description(FLOATS, "fp8", **granularity, inputs=inputs)


def _inputs(found: Any, kind: Any) -> Inputs | None:
    """The quantisation of activations, which torchao computes at run time."""
    if found is None:
        return None
    where = f"{METHOD}: metadata: act_quant_kwargs"
    data = found.get("_data") if isinstance(found, dict) else None
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, got {found!r}")
    check_keys(data, {*_INPUTS, *_LIMITS}, where)
    granularity = data.get("granularity")
    name = granularity.get("_type") if isinstance(granularity, dict) else granularity
    strategies = {"PerRow": "token", "PerToken": "token", "PerTensor": "tensor", "PerBlock": "group"}
    if name not in strategies or _named(data.get("float8_dtype")) not in (None, "float8_e4m3fn"):
        raise FormatError(f"{where}: expected {', '.join(strategies)} (float8_e4m3fn), got {data!r}")
    if data.get("hp_value_lb") is not None:
        raise FormatError(f"{where}: hp_value_lb: expected none, got {data['hp_value_lb']!r}")
    limit = data.get("hp_value_ub")
    size = 128 if name == "PerBlock" else -1
    symmetric = _named(data.get("mapping_type")) in (None, "SYMMETRIC")
    return Inputs(kind, strategies[name], symmetric=symmetric, group_size=size, limit=limit)


def _named(value: Any) -> Any:
    """The name of a dtype or of a member of an enumeration."""
    return value.get("_data") if isinstance(value, dict) else value


_KINDS: dict[str, Callable[..., Description]] = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _few_bits,
    "Float8Tensor": _float8,
}
