"""Lossless conversion of a checkpoint to another format, one tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from epiloq.formats import deepseek_fp8
from epiloq.formats.description import Description
from epiloq.formats.gguf_checkpoint import GgufCheckpoint
from epiloq.formats.io.checkpoint import LARGEST_SHARD, Checkpoint, Writer, atomic_folder
from epiloq.formats.io.gguf_file import is_gguf
from epiloq.formats.io.model import Target
from epiloq.formats.io.safe_files import check_new
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError, located
from epiloq.formats.table import FORMATS, Format, Written, blank
from epiloq.formats.weights import ModuleWeight, ScaledWeight, Weight
from epiloq.models.conv1d import TransposedConv1D
from epiloq.models.mixtures import unquantised_neighbours
from epiloq.models.sequential_experts import splitter
from epiloq.nn.base.w4a8_layer import GROUPS


@dataclass(frozen=True)
class Conversion:
    """A conversion that is possible judging by headers and channel orders. Nothing has been written yet."""

    layers: Layers
    layout: Format
    output: Path

    @property
    def steps(self) -> int:
        """Number of layers to convert."""
        return len(self.layers.readers)


def prepare(source: Path, output: Path, name: str) -> Conversion:
    """Open a checkpoint or a GGUF file and check whether the format `name` (a key of FORMATS) can represent it.

    Raises FormatError: `output` exists or cannot be created, the source is invalid or not quantised, or the format
    cannot represent it, with the reason.
    """
    check_new(output, source)
    found = "one in floating point"
    if is_gguf(source):
        file = GgufCheckpoint(source)
        layers = Layers(file, file.model)
        if file.without_kernel:
            found = f"blocks of kinds that no kernel multiplies ({', '.join(file.without_kernel)})"
    else:
        layers = Layers(Checkpoint(source))
    _ = layers.checkpoint.other_files  # checked and remembered before the work
    if layers.format is None:
        instead = (
            "write a directory by transformers' from_pretrained(…, gguf_file=…) and save_pretrained"
            if is_gguf(source)
            else "use epiloq quantize"
        )
        raise FormatError(f"{source}: expected a quantised model, got {found}; {instead}")
    if layers.format == name:
        raise FormatError(f"{source}: is in the format {name} already")
    reason = refusal(layers, FORMATS[name])
    if reason is not None:
        raise FormatError(f"{source}: {reason}")
    return Conversion(layers, FORMATS[name], output)


def refusal(layers: Layers, layout: Format) -> str | None:
    """Return why a format cannot represent layers of a checkpoint, given sizes, kinds and channel orders, or None."""
    transposed = [name for name in layers.readers if isinstance(layers.linears.get(name), TransposedConv1D)]
    if transposed and not layout.conv1d:
        return f"{transposed[0]}: {layout.name}: cannot represent a Conv1D, only torch.nn.Linear"
    if layers.tables and not layout.vocabulary:
        return f"{min(layers.tables)}: {layout.name}: cannot represent a quantised embedding"
    tried, described = set(), dict[str, Description]()
    for name, reader in layers.readers.items():
        key = (reader.quantization, repr(reader.module), layers.shape(name), layers.ordered(name))
        if key in tried:
            continue
        tried.add(key)
        try:
            sample = _restated(_sample(layers, name), layout)
            layout.to_tensors(sample, reader.quantization, layers.dtype)
            if layout.describe is not None:
                described[name] = layout.describe(sample, reader.quantization)
        except ValueError as error:
            return f"{name}: {error}"
    if not described:
        return None
    try:
        layout.config(Written({}, [], described, tables=layers.tables))
    except ValueError as error:
        return str(error)
    return None


def _sample(layers: Layers, name: str) -> Weight:
    """A weight like a layer's, without reading it if possible."""
    reader, shape = layers.readers[name], layers.shape(name)
    if reader.quantization is None:
        return layers.weight(name)
    return blank(reader.quantization, shape, layers.ordered(name))


def _restated(weight: Weight, layout: Format) -> Weight:
    """The same weight in a different representation that the format supports, or unchanged if there is none."""
    if layout.name != "deepseek-fp8" or not isinstance(weight, ModuleWeight) or isinstance(weight, ScaledWeight):
        return weight
    # The format has FP8 activations in groups.
    is_fp4 = weight.module == "Fp4Linear" or (weight.module == "W4A8Fp4Linear" and _has_groups(weight))
    return deepseek_fp8.blocks_of_mxfp4(weight) if is_fp4 and weight.options["format"] == "mxfp4" else weight


def _has_groups(weight: Weight) -> bool:
    return isinstance(weight, ModuleWeight) and weight.options.get("activation") == GROUPS


def perform(
    conversion: Conversion, advance: Callable[[], None] = lambda: None, largest_shard: int = LARGEST_SHARD
) -> dict[str, Any]:
    """Write the new directory, calling `advance` after each layer, and report the result.

    The directory is written atomically, with all files of the source other than weights and their descriptions. One
    layer is in memory at a time. Raises FormatError for values that the format cannot represent, and OSError for disk
    errors; in both cases nothing is left behind.
    """
    layers = conversion.layers
    checkpoint = layers.checkpoint
    with atomic_folder(conversion.output) as temporary:
        writer = Writer(temporary, largest_shard)
        shared = layers.shared if conversion.layout.shares else {}
        untie = bool(layers.shared) and not shared
        target = Target(conversion.layout, layers.dtype, writer, checkpoint, shared, untie=untie)
        split, split_off = splitter(layers.model, conversion.layout.name), set[str]()
        rounds_inputs = False
        by_part = {name: layer for layer, parts in layers.parts.items() for name in parts.values()}
        for name in (name for name in checkpoint.names() if name not in layers.unused):
            layer = by_part.get(name)
            if layer is None:
                for own, tensor in split(name, checkpoint.tensor(name)).items():
                    writer.add(checkpoint.stored_name(own), tensor)
                    split_off |= {own.removesuffix(".weight")} if own != name else set()
            elif layer not in target.quantised:
                weight = layers.weight(layer)
                with located(partial(checkpoint.where, layer)):
                    stored, weight = weight, _restated(weight, conversion.layout)
                    rounds_inputs |= weight is not stored and not _has_groups(stored)
                    target.layer(layer, weight, layers.readers[layer].quantization, layers.tables.get(layer))
                    for other in layers.sharing(layer) if not shared else ():
                        target.layer(other, weight, layers.readers[layer].quantization, layers.tables.get(other))
                advance()
        if rounds_inputs:
            warnings.warn(
                f"{conversion.layout.name}: weights are the same numbers, but activations, in floating point in "
                f"{checkpoint.folder}, will be quantised to FP8, as the format requires",
                stacklevel=2,
            )
        left = layers.linears.keys() | unquantised_neighbours(layers.model, target.quantised) | split_off
        target.close(left, layers.model)
        checkpoint.copy_other_files(temporary)
    return {
        "input": str(checkpoint.folder),
        "output": str(conversion.output),
        "from": layers.format,
        "to": conversion.layout.name,
        "layers": len(target.quantised),
        "act_order": target.act_order,
        "bytes_before": sum(entry.nbytes for entry in checkpoint.entries.values()),
        "bytes_after": sum(shard.size for shard in writer.shards),
    }
