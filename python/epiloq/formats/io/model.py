"""Reading and writing directories of transformers models, in floating point or quantised in any format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats import epiloq_modules
from epiloq.formats.description import Description
from epiloq.formats.embeddings import TableOutline, untied
from epiloq.formats.io.architecture import architecture, check_unchanged, distinct, layers_of_base_model, skeleton
from epiloq.formats.io.checkpoint import LARGEST_SHARD, Checkpoint, Writer
from epiloq.formats.io.described import KEY
from epiloq.formats.io.safe_files import reason
from epiloq.formats.io.unused import check_types, check_unused
from epiloq.formats.layers import Layers
from epiloq.formats.layouts import gguf
from epiloq.formats.layouts.base import FormatError, Quantization, located
from epiloq.formats.readers import UNUSED, check_method
from epiloq.formats.table import Format, Written
from epiloq.formats.weights import BlockWeight, Weight
from epiloq.models.conv1d import TransposedConv1D
from epiloq.models.in_memory import describe_on_saving
from epiloq.models.mixtures import restack_complete_experts_, restack_experts_, unquantised_neighbours
from epiloq.weights.grid import QuantizedWeight


def check_float(checkpoint: Checkpoint) -> None:
    """Raise FormatError for a model that is quantised, or described as quantised."""
    found = checkpoint.quantization
    if found is None:
        return
    if found.get("quant_method") not in (epiloq_modules.METHOD, gguf.METHOD):
        with located(checkpoint.folder / checkpoint.described_by):
            check_method(found)
    if all(entry.is_float for entry in checkpoint.entries.values()):
        unused = UNUSED.format(checkpoint.described_by)
        raise FormatError(f"{checkpoint.folder}: {unused}: expected a config.json without {KEY}")
    raise FormatError(
        f"{checkpoint.folder}: expected a model in floating point, but it is quantised already: quantise the model "
        "that it was made from"
    )


def load_float(checkpoint: Checkpoint) -> nn.Module:
    """Load a model that is not quantised, in its own type and in evaluation mode.

    Raises FormatError if it is quantised, or if its tensors do not match its configuration. Warns of unused tensors.
    """
    check_float(checkpoint)
    check_types(skeleton(checkpoint, "meta"), checkpoint)
    try:
        model, info = architecture(checkpoint).from_pretrained(
            checkpoint.folder,
            dtype="auto",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # mismatches are reported below
            output_loading_info=True,
        )
    except Exception as error:
        raise FormatError(f"{checkpoint.folder}: transformers cannot open it: {reason(error)}") from error
    where = f"{checkpoint.folder}: config.json disagrees with the tensors"
    if info["missing_keys"]:
        raise FormatError(f"{where}: expected {', '.join(sorted(map(str, info['missing_keys']))[:3])}, found none")
    for name, found, wanted in info["mismatched_keys"]:
        raise FormatError(f"{where}: {name}: expected {list(wanted)}, got {list(found)}")
    check_unused(model, info["unexpected_keys"], checkpoint)
    model.eval()
    return model  # type: ignore[no-any-return]


def from_directory(folder: str | Path) -> nn.Module:
    """Load the model in a directory, in floating point or quantised in any format, in its own type, in evaluation mode.

    Raises FormatError, which names file and tensor, for missing or mismatching tensors.
    """
    return load(Checkpoint(folder))[0]


def load(checkpoint: Checkpoint) -> tuple[nn.Module, Quantization | None]:
    """Load a model of either kind, and how its layers are quantised.

    The latter is None in floating point, if weights are not on an integer grid, or if layers differ.
    """
    if checkpoint.quantization is None:
        return load_float(checkpoint), None
    layers = Layers(checkpoint, skeleton(checkpoint))
    fill(layers)
    model = restack_experts_(layers.model)
    if layers.readers:
        describe_on_saving(model)
    return model, layers.quantization


@torch.no_grad()
def fill(layers: Layers) -> None:
    """Load all tensors into the layers' model, and replace linear layers by quantised ones.

    Raises FormatError, naming file and layer, for tensors that disagree, and for weights that the model changes.
    """
    check_unchanged(layers.model, {name: layers.checkpoint.where(name) for name in layers.readers})
    targets = layers.model.state_dict(keep_vars=True)
    for name in layers.rest:
        if name in targets:
            targets[name].copy_(layers.checkpoint.tensor(name))
    for name in layers.readers:
        layers.model.set_submodule(name, layers.module(name))
        restack_complete_experts_(layers.model, name.rpartition(".")[0].rpartition(".")[0])
    layers.share_()


def save(
    model: nn.Module,
    weights: Iterable[tuple[str, Weight, Quantization | None]],
    source: Checkpoint,
    folder: Path,
    layout: Format,
    shared: Mapping[str, str] | None = None,
    *,
    untie: bool = False,
    largest_shard: int = LARGEST_SHARD,
    value: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a calibrated model to a new `folder`: layers by name in a format, everything else from the model.

    Each weight comes with how it is quantised, or None if it is not on an integer grid. `shared` layers use the
    weight of an embedding instead of their own; with `untie`, config.json does not tie the head to its embedding.
    `value` returns tensors by name that are on the meta device in the model. Raises FormatError for what the format
    cannot represent.
    """
    target = Target(layout, next(model.parameters()).dtype, Writer(folder, largest_shard), source, shared, untie=untie)
    for name, weight, quantization in weights:
        layer = model.get_submodule(name)
        target.layer(name, weight, quantization, TableOutline.of(layer) if isinstance(layer, nn.Embedding) else None)
    for name, tensor in distinct(model).items():
        layer_name = name.removesuffix(".weight")
        if layer_name not in target.quantised:
            tensor = value(name) if value is not None and tensor.is_meta else tensor
            is_conv1d = layer_name != name and isinstance(model.get_submodule(layer_name), TransposedConv1D)
            target.writer.add(source.stored_name(name), tensor.t() if is_conv1d else tensor)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    target.close(linears | unquantised_neighbours(model, target.quantised), model)
    source.copy_other_files(folder)


class Target:
    """A directory that is written in a format, layer by layer. Raises FormatError for what it cannot represent.

    Tensors have the names used in the original files, `source`. With `untie`, config.json does not tie a head, which
    then has tensors of its own, to the embedding.
    """

    def __init__(
        self,
        layout: Format,
        dtype: torch.dtype,
        writer: Writer,
        source: Checkpoint,
        shared: Mapping[str, str] | None = None,
        *,
        untie: bool = False,
    ) -> None:
        self.layout, self.dtype, self.writer, self.source = layout, dtype, writer, source
        self.quantised: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self.described: dict[str, Description] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.act_order = False
        self.shared, self.tables = dict(shared or {}), set[str]()
        self.untie = untie

    def layer(
        self, name: str, weight: Weight, described: Quantization | None, table: TableOutline | None = None
    ) -> None:
        """Write a quantised layer's tensors without its bias, given its quantisation.

        For an embedding, its outline is required.
        """
        if table is not None and not self.layout.vocabulary:
            raise FormatError(f"{self.layout.name}: cannot represent a quantised embedding")
        for part, tensor in self.layout.to_tensors(weight, described, self.dtype).items():
            self.writer.add(f"{self.source.stored_layer(name)}.{part}", tensor)
        self.quantised[name] = epiloq_modules.described(weight, described, table)
        if table is not None:
            self.tables |= {name, self.source.stored_layer(name)}
        if self.layout.describe is not None:
            description = self.layout.describe(weight, described)
            # readers may match either name
            self.described |= dict.fromkeys((name, self.source.stored_layer(name)), description)
        if isinstance(weight, BlockWeight):
            self.blocks[name] = tuple(weight.q.shape)
        self.act_order |= isinstance(weight, QuantizedWeight) and weight.perm is not None

    def close(self, linears: Collection[str], model: nn.Module) -> None:
        """Finish writing, given the names of all linear layers and of other modules that stay in floating point, and
        the model."""
        left = (set(linears) | layers_of_base_model(model)) - self.quantised.keys() - self.shared.keys()
        ignored = sorted(left | set(map(self.source.stored_layer, left)))
        written = Written(self.quantised, ignored, self.described, self.blocks, self.tables, self.shared, model)
        config = {**self.source.config, "quantization_config": self.layout.config(written)}
        config.pop("expert_dtype", None)  # DeepSeek-V4's top-level entry
        self.writer.close(untied(config) if self.untie else config)
