"""Finds the quantised layers of a checkpoint, and gives each its reader."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from epiloq.formats import epiloq_modules
from epiloq.formats.configs import auto_round, fp8, others
from epiloq.formats.configs import awq as awq_config
from epiloq.formats.configs import bitsandbytes as bitsandbytes_config
from epiloq.formats.configs import compressed_tensors as ct_config
from epiloq.formats.configs import gptq as gptq_config
from epiloq.formats.configs import modelopt as modelopt_config
from epiloq.formats.configs import mxfp4 as mxfp4_config
from epiloq.formats.configs import quark as quark_config
from epiloq.formats.configs import torchao as torchao_config
from epiloq.formats.description import TABLE_OF_BITSANDBYTES, Description, Rules
from epiloq.formats.embeddings import SHARED, shared_in
from epiloq.formats.io.checkpoint import Checkpoint, split_name
from epiloq.formats.layer_reader import Reader, block_reader, module_reader, reader
from epiloq.formats.layout_table import LAYOUTS
from epiloq.formats.layouts import bitsandbytes, gguf
from epiloq.formats.layouts.base import FormatError, located
from epiloq.nn.base.scaled_input import SCALE

# Scales of quantised key-value caches, queries and attention weights, of an attention or of the layer before. vLLM's
# reader (maybe_remap_kv_scale_name) knows the same ones.
_OF_CACHES = re.compile(r"(.*\.)?([kqv]|kv|prob|prob_output|[kqv]_proj\.output|qkv_proj\.output)_scale")
# Further ones that only a described cache has: these names have other meanings, too.
_OF_DESCRIBED_CACHES = re.compile(r"(.*\.)?[kv]_(zero_point|bias)")
UNUSED = "{} describes quantised layers, but the files have none"
# Reasons why layers with certain tensors are not supported.
_WHY = {SCALE: "no layer of that kind scales its inputs by channel first"}

CONFIGS: dict[str, Callable[[Mapping[str, Any]], Rules]] = {
    ct_config.METHOD: ct_config.parse,
    gptq_config.METHOD: gptq_config.parse,
    awq_config.METHOD: awq_config.parse,
    bitsandbytes_config.METHOD: bitsandbytes_config.parse,
    **dict.fromkeys((fp8.METHOD, fp8.FBGEMM, fp8.MXFP8), fp8.parse),
    **dict.fromkeys(modelopt_config.METHODS, modelopt_config.parse),
    quark_config.METHOD: quark_config.parse,
    mxfp4_config.METHOD: mxfp4_config.parse,
    torchao_config.METHOD: torchao_config.parse,
    **dict.fromkeys(auto_round.METHODS, auto_round.parse),
}
"""Parsers of the configurations of all methods other than epiloq's own."""

_NOT_CONVERTED = "modules_to_not_convert"
_LISTS_OF_FLOAT_LAYERS: dict[str, str] = {
    ct_config.METHOD: "ignore",
    bitsandbytes_config.METHOD: "llm_int8_skip_modules",
    quark_config.METHOD: "exclude",
    **dict.fromkeys((gptq_config.METHOD, awq_config.METHOD), _NOT_CONVERTED),
    **dict.fromkeys((fp8.METHOD, fp8.FBGEMM, fp8.MXFP8), _NOT_CONVERTED),
    **dict.fromkeys((torchao_config.METHOD, *auto_round.METHODS), _NOT_CONVERTED),
    **dict.fromkeys(modelopt_config.METHODS, "ignore"),
}


# Excludes names that other layers, such as norms, use for their scales.
_MARKERS = frozenset(layout.marker for layout in LAYOUTS.values()) - {fp8.SCALE}


def unused_scales(
    checkpoint: Checkpoint, known: Callable[[str], Reader | None], owns: Callable[[str], bool]
) -> list[str]:
    """Names of tensors that epiloq does not use, given the readers of layers by their names in the files, and whether a
    tensor is one of the model: scales of a quantised key-value cache, and scales of activations that are not quantised.
    """
    has_cache = cache_of(checkpoint.quantization or {}) is not None

    def unused(name: str) -> bool:
        if _OF_CACHES.fullmatch(name) or (has_cache and _OF_DESCRIBED_CACHES.fullmatch(name)):
            return not owns(name)
        layer, part = split_name(name)
        reader = known(layer)
        return reader is not None and part in reader.unused

    return [name for name in checkpoint.names() if unused(name)]


def other_part(known: Collection[str], part: str) -> str:
    """The error for a layer that has an unexpected tensor, given the names of its tensors."""
    why = f": {_WHY[part]}" if part in _WHY else ""
    return f"expected of a layer {', '.join(sorted(known))}, got {part}{why}"


def cache_of(found: Mapping[str, Any]) -> Any:
    """A configuration's entry for a quantised key-value cache; None if it has none."""
    inner = found.get("quantization")
    if isinstance(inner, dict) and inner.get("kv_cache_quant_algo") is not None:
        return inner["kv_cache_quant_algo"]
    return found.get("kv_cache_scheme")


def shared(checkpoint: Checkpoint) -> dict[str, str]:
    """Layers without tensors in the files, mapped to the embeddings whose weights they share (epiloq's own format)."""
    found = checkpoint.quantization or {}
    if found.get("quant_method") == gguf.METHOD:
        return dict(found[SHARED])
    if found.get("quant_method") != epiloq_modules.METHOD:
        return {}
    try:
        known = {layer: group.module for group in epiloq_modules.parse(found) for layer in group.layers}
        return shared_in(found, known)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{checkpoint.folder / checkpoint.described_by}: {error}") from error


Site: TypeAlias = Callable[[str], "tuple[Sequence[str], type[nn.Module]]"]
"""Given a layer's name in the files: the names by which a configuration may refer to it, that in the model first, and
its class in the model."""


def readers(checkpoint: Checkpoint, site: Site, ignores: Callable[[str], bool]) -> dict[str, Reader]:
    """The reader of each quantised layer of a checkpoint, by its name there; layers with the same description share
    one. Layers that the model `ignores`, given by their names in the model, have none, however they are quantised.

    Warns if the files have no quantised layer although there is a configuration, if the configuration has a quantised
    key-value cache, which is ignored, or if epiloq computes a layer differently than described (`Description.loss`).
    Raises FormatError for an unsupported configuration, quantised tensors of a layer that the configuration leaves in
    floating point, or weights that are not in floating point where no layer has scales.
    """
    found = checkpoint.quantization or {}
    try:
        if found.get("quant_method") == epiloq_modules.METHOD:
            return {
                layer: shared
                for group in epiloq_modules.parse(found)
                for shared in [module_reader(group)]
                for layer in group.layers
            }
        if found.get("quant_method") == gguf.METHOD:
            return {layer: block_reader(kind) for layer, kind in found["layers"].items()}
        rules = parse(found)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{checkpoint.folder / checkpoint.described_by}: {error}") from error
    layers = _described(checkpoint, rules, site, ignores)
    if not layers:
        for name, entry in checkpoint.entries.items():
            if name.endswith(".weight") and not entry.is_float:
                raise FormatError(f"{checkpoint.where(name)}: {entry.dtype}: expected scales beside it, found none")
        _warn(checkpoint, f"the model is in floating point: {UNUSED.format(checkpoint.described_by)}")
    if cache_of(found) is not None or any(map(_OF_CACHES.fullmatch, checkpoint.files)):
        _warn(checkpoint, "the key-value cache stays in the model's type, and its scales are not used")
    for loss in dict.fromkeys(described.loss for described in layers.values()):
        if loss is not None:
            _warn(checkpoint, loss)
    return {layer: reader(described) for layer, described in layers.items()}


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config`` of any method other than epiloq's own.

    Raises FormatError, which names key and value, for unsupported entries.
    """
    check_method(found)
    return CONFIGS[found["quant_method"]](found)


def check_method(found: Mapping[str, Any]) -> None:
    """Raise FormatError, with what to do, for the ``quantization_config`` of a method that epiloq does not read."""
    method = found.get("quant_method")
    if isinstance(method, str) and method in others.METHODS:
        raise FormatError(f"quantization_config: quant_method: {others.METHODS[method]}")
    if not isinstance(method, str) or method not in CONFIGS:
        expected = ", ".join((*CONFIGS, epiloq_modules.METHOD))
        likely = ", as in directories of MLX" if method is None and found.keys() >= {"bits", "group_size"} else ""
        raise FormatError(
            f"quantization_config: quant_method: expected one of {expected}, got {method!r}{likely}; "
            "quantise the float model instead"
        )


def leaving(found: Mapping[str, Any], layers: Mapping[str, type[nn.Module]]) -> dict[str, Any]:
    """A ``quantization_config`` that leaves these layers, given with their classes, in floating point: those that it
    describes as quantised are listed, so that other readers do not expect scales of them."""
    key = _LISTS_OF_FLOAT_LAYERS.get(str(found.get("quant_method")))
    rules = parse(found) if key is not None and layers else None
    described = [name for name, kind in layers.items() if rules is not None and rules((name,), kind) is not None]
    if key is None or not described:
        return dict(found)
    if isinstance(found.get("quantization"), dict):  # ModelOpt's own file
        inner = found["quantization"]
        return {
            **found,
            "quantization": inner | {"exclude_modules": [*(inner.get("exclude_modules") or ()), *described]},
        }
    return {**found, key: [*(found.get(key) or ()), *described]}


def _described(
    checkpoint: Checkpoint, rules: Rules, site: Site, ignores: Callable[[str], bool]
) -> dict[str, Description]:
    layers: dict[str, Description] = {}
    found = checkpoint.quantization or {}
    marked = dict.fromkeys(
        layer
        for layer, part in map(split_name, checkpoint.files)
        if part in _MARKERS or (part == fp8.SCALE and _is_scaled(checkpoint, layer))
    )
    for layer in marked:
        names, kind = site(layer)
        if ignores(names[0]):
            continue
        described = rules(names, kind)
        if described is None:
            part = next(part for part in (*sorted(_MARKERS), fp8.SCALE) if f"{layer}.{part}" in checkpoint.files)
            raise FormatError(
                f"{checkpoint.where(f'{layer}.{part}')}: belongs to a quantised layer, "
                f"but {checkpoint.described_by} leaves {layer} in floating point"
            )
        if described.layout == fp8.BLOCKS and "weight_block_size" not in found and _has_one_scale(checkpoint, layer):
            described = fp8.of_tensors(dynamic=True)
        if described.layout == fp8.TENSORS and f"{layer}.weight_scale_inv" in checkpoint.files:
            described = replace(described, layout=fp8.SCALARS)  # transformers' names
        if described.layout in fp8.BY_SCALE and f"{layer}.{fp8.SCALE}" in checkpoint.files:
            described = replace(described, layout=fp8.BY_SCALE[described.layout])
        if described.layout == TABLE_OF_BITSANDBYTES:
            described = _sized(checkpoint, layer, described)
        if described.layout == torchao_config.ANY:
            described = _of_torchao(checkpoint, layer)
        if described.layout in modelopt_config.SCALED and f"{layer}.{SCALE}" in checkpoint.files:
            described = replace(described, scaled=True)
        layers[layer] = described
    return layers


def _is_scaled(checkpoint: Checkpoint, layer: str) -> bool:
    """Whether a layer's weight is FP8 or packed FP4."""
    weight = checkpoint.entries.get(f"{layer}.weight")
    return weight is not None and weight.dtype in ("F8_E4M3", "I8", "U8")


def _has_one_scale(checkpoint: Checkpoint, layer: str) -> bool:
    """Whether an FP8 layer has AutoFP8's scale of its whole weight."""
    scale = checkpoint.entries.get(f"{layer}.weight_scale")
    return scale is not None and tuple(scale.shape) in ((), (1,))


def _sized(checkpoint: Checkpoint, layer: str, described: Description) -> Description:
    """The description with the block size found in a layer's own tensors."""
    names = {part: f"{layer}.{part}" for part in bitsandbytes.STATES.values() if f"{layer}.{part}" in checkpoint.files}
    with located(partial(checkpoint.where, layer)):
        size = bitsandbytes.block_size({part: checkpoint.tensor(name) for part, name in names.items()})
    return replace(described, group_size=size)


def _of_torchao(checkpoint: Checkpoint, layer: str) -> Description:
    """The description that a layer's own metadata has."""
    weight, zeros = f"{layer}._weight_qdata", f"{layer}._weight_zero_point"
    if weight not in checkpoint.entries:
        raise FormatError(
            f"{checkpoint.where(layer)}: torchao: expected _weight_qdata, found none: install torchao, with which "
            "transformers opens it, or quantise the float model with epiloq"
        )
    shape = checkpoint.entries[weight].shape
    has_zeros = zeros in checkpoint.files and bool(checkpoint.tensor(zeros).any())
    metadata = checkpoint.metadata(weight).get(f"{checkpoint.stored_layer(layer)}.weight")
    with located(partial(checkpoint.where, weight)):
        return torchao_config.described(metadata, shape, has_zeros)


def _warn(checkpoint: Checkpoint, what: str) -> None:
    warnings.warn(f"{checkpoint.folder}: {what}", stacklevel=4)
