"""The configurations of torchao in safetensors files: the file's metadata describes each layer's tensors as JSON.

``quantization_config`` only says how weights were quantised, by a class of torchao. Metadata is defined by
``torchao/prototype/safetensors/safetensors_utils.py``, the tensors by ``torchao/quantization/quantize_/workflows``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epiloq.formats.configs.keys import check_keys, names, one_of
from epiloq.formats.description import TORCHAO_OFFSETS, Description, Inputs, Rules
from epiloq.formats.layouts.base import FormatError

METHOD = "torchao"
ANY, INTEGERS, FLOATS, HALVES = "torchao", "torchao int", "torchao fp8", "torchao int4"
"""The layout of layers before their metadata is read, and the layouts of integers, FP8 and two integers a byte."""
_KNOWN = {"quant_method", "quant_type", "modules_to_not_convert"}
# What was quantised, and how; metadata has the result.
_NOTES = {"include_input_output_embeddings", "untie_embedding_weights", "quant_type_kwargs"}
_DATA = {"block_size", "dtype", "act_quant_kwargs"}
_INPUTS = {"granularity", "mapping_type", "reduce_range", "float8_dtype", "mm_config", "kernel_preference"}
_LIMITS = ("hp_value_lb", "hp_value_ub")
_BITS = (2, 3, 4, 8)
# Classes whose tensors are in the order of a kernel, or of numbers that no layer computes with here.
_DEVICE = {
    "Int4TilePackedTo4dTensor": "4-bit integers in the order of a CUDA kernel",
    "Int4PreshuffledTensor": "4-bit integers in the order of a CUDA kernel",
    "Int4PlainInt32Tensor": "4-bit integers in the order of an XPU or NPU kernel",
    "Int4OpaqueTensor": "4-bit integers in the order of a CPU kernel",
    "IntxOpaqueTensor": "integers in the order of a CPU kernel",
    "MXTensor": "MXFP4 or MXFP8",
    "NVFP4Tensor": "NVFP4",
}
# Classes that say how to quantise, of which the tensors are read here, and entries under which they are not.
_READ = {
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int4WeightOnlyConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
}
_PACKINGS = ("PLAIN", "plain", "UNPACKED_TO_INT8", "unpacked_to_int8", None)

Shape = tuple[int, int]


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries.

    Each quantised layer has its own metadata. Names of layers to leave in floating point are not looked at, as by
    transformers when it opens such files: it compares them with names that end in ".weight", so that "k_proj" has no
    effect when it quantises.
    """
    check_keys(found, _KNOWN, METHOD, _NOTES)
    names(found, "modules_to_not_convert", METHOD)
    return lambda layer, kind: Description(ANY)


def described(metadata: str | None, shape: Sequence[int], has_zeros: bool) -> Description:
    """The description of a layer, given the metadata of its weight, the shape of its integers, and whether it has zero
    points other than 0. Raises FormatError, which names key and value, for what no layer computes."""
    try:
        found = json.loads(metadata or "null")
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{METHOD}: metadata: expected JSON: {error}") from None
    kind, data = (found.get("_type"), found.get("_data")) if isinstance(found, dict) else (found, None)
    if isinstance(kind, str) and kind in _DEVICE:
        raise FormatError(
            f"{METHOD}: metadata: _type: epiloq does not read {kind} ({_DEVICE[kind]}): install torchao, with which "
            "transformers opens it, or save the model from the float weights with another packing format"
        )
    if not isinstance(kind, str) or kind not in _KINDS or not isinstance(data, dict):
        raise FormatError(
            f"{METHOD}: metadata: _type: expected one of {', '.join(_KINDS)}, got {kind!r}; dequantise the model with "
            "torchao, and quantise it anew"
        )
    if len(shape) != 2:
        raise FormatError(f"{METHOD}: expected a matrix, got {list(shape)}")
    block = data.get("block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise FormatError(f"{METHOD}: metadata: block_size: expected rows and columns, got {block!r}")
    columns = 2 * shape[1] if kind == "Int4Tensor" else shape[1]
    made = _KINDS[kind](data, _granularity(block, (shape[0], columns)), symmetric=not has_zeros)
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


def _halves(data: Mapping[str, Any], granularity: dict[str, Any], symmetric: bool) -> Description:
    """Two integers a byte, with a real offset for each group; none if they are all 0."""
    check_keys(data, {*_DATA, "shape", "activation_dtype"}, f"{METHOD}: metadata")
    if granularity["strategy"] not in ("group", "channel"):
        raise FormatError(f"{METHOD}: metadata: block_size: expected one row, got {data['block_size']!r}")
    activation = _named(data.get("activation_dtype"))
    if activation not in (None, "bfloat16", "float8_e4m3fn"):
        expected = "bfloat16 or float8_e4m3fn"
        raise FormatError(f"{METHOD}: metadata: activation_dtype: expected {expected}, got {activation!r}")
    inputs = Inputs("fp8", "token") if activation == "float8_e4m3fn" else None
    if symmetric:
        return Description(HALVES, "int", 4, **granularity, inputs=inputs)
    return Description(TORCHAO_OFFSETS, "int", 4, **granularity, symmetric=False, left=inputs)


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
    "Int4Tensor": _halves,
}


def is_read(found: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` is of layers whose tensors are read here, judging by its ``quant_type``."""
    kinds = found.get("quant_type")
    return isinstance(kinds, dict) and all(_is_read(one) for one in kinds.values())


def _is_read(kind: Any) -> bool:
    if kind is None:
        return True  # layers that stay in floating point
    data = kind.get("_data") if isinstance(kind, dict) else None
    if not isinstance(data, dict):
        return False
    if kind.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        parts = [one for one in data.values() if isinstance(one, dict)]
        return all(_is_read(one) for part in parts for one in part.values())
    packings = [_named(value) for key, value in data.items() if key.endswith("packing_format")]
    return str(kind.get("_type")) in _READ and all(packing in _PACKINGS for packing in packings)
