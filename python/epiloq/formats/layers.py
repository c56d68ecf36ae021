"""A checkpoint's linear layers in any format: checked against its model, and read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from epiloq.formats.configs import fp8
from epiloq.formats.embeddings import TableOutline, checked, restore_
from epiloq.formats.io.architecture import ignores_tensor, renamed, skeleton, untie_
from epiloq.formats.io.checkpoint import Checkpoint, split_name
from epiloq.formats.io.names import in_whole_model, named_in
from epiloq.formats.io.unused import buffers_of, check_unused, ignores_layer, is_computed, is_expected
from epiloq.formats.layer_reader import BIAS, Reader
from epiloq.formats.layouts.base import FormatError, Quantization, located
from epiloq.formats.readers import other_part, readers, shared, unused_scales
from epiloq.formats.table import METHODS
from epiloq.formats.weights import Weight
from epiloq.models.conv1d import TransposedConv1D, as_linear
from epiloq.models.mixtures import why_stacked
from epiloq.models.subclasses import is_replaceable

_Found = TypeVar("_Found")


class Layers:
    """The linear layers of a checkpoint, in floating point or quantised in any format.

    On creation every tensor's header is compared with the model that config.json describes, which is built without
    values unless one is given. Raises FormatError, naming file and tensor, if they disagree.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module | None = None) -> None:
        self.checkpoint = checkpoint
        self.model = skeleton(checkpoint, "meta") if model is None else renamed(model, checkpoint)
        modules = self.model.named_modules(remove_duplicate=False)
        linears = ((name, as_linear(module)) for name, module in modules)
        self.linears = {name: linear for name, linear in linears if linear is not None}
        self.tables: dict[str, TableOutline] = {}
        """Quantised embeddings, without values."""
        self.shared = shared(checkpoint)
        """Layers of which the files hold no weight, and the quantised embedding whose weight is theirs."""
        untie_(self.model, checkpoint)
        ignores = partial(ignores_layer, self.model)
        found = {} if checkpoint.quantization is None else readers(checkpoint, self._site, ignores)
        self.readers: dict[str, Reader] = {name: reader for name, reader in found.items() if not ignores(name)}
        named = self.readers.keys() | self.shared.keys()
        self.tables = {name: TableOutline.of(table) for name, table in self._embeddings() if name in named}
        own = self.model.state_dict(keep_vars=True)
        self.unused = frozenset(unused_scales(checkpoint, self.readers.get, own.__contains__))
        """Names of tensors that are no part of the model."""
        self.parts: dict[str, dict[str, str]] = {name: {} for name in self.readers}
        """Names of a quantised layer's tensors by their last parts, the bias left out."""
        self._compare()

    def _site(self, layer: str) -> tuple[tuple[str, ...], type[nn.Module]]:
        """The names of a layer, in the model and in the files, and its class."""
        tables = dict(self._embeddings())
        kind = type(self.model.get_submodule(layer)) if layer in self.linears or layer in tables else nn.Linear
        stored = self.checkpoint.stored_layer(layer)
        return tuple(dict.fromkeys((layer, stored, in_whole_model(self.model, layer)))), kind

    def _embeddings(self) -> Iterator[tuple[str, nn.Embedding]]:
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding):
                yield name, module

    def _outline(self, layer: str) -> nn.Linear:
        return self.tables[layer] if layer in self.tables else self.linears[layer]

    @property
    def format(self) -> str | None:
        """The name of the format, or of the method if epiloq can only read it; None in floating point."""
        found = self.checkpoint.quantization if self.readers else None
        if found is not None and found.get("quant_method") == fp8.METHOD and self._has_fp4():
            return "deepseek-fp4"
        return None if found is None else METHODS.get(found["quant_method"], found["quant_method"])

    def _has_fp4(self) -> bool:
        described = (reader.described for reader in self.readers.values())
        return any(one is not None and one.kind == "fp4" for one in described)

    @property
    def quantization(self) -> Quantization | None:
        """The quantisation of all layers, if one value describes it and weights are integers on a grid; else None."""
        return Quantization.of_all({name: reader.quantization for name, reader in self.readers.items()})

    @property
    def dtype(self) -> torch.dtype:
        """The model's type."""
        return next(self.model.parameters()).dtype

    @property
    def unquantised(self) -> list[str]:
        """Linear layers in floating point, including tied ones."""
        return sorted(self.linears.keys() - self.readers.keys() - self.shared.keys())

    @property
    def rest(self) -> list[str]:
        """The model's tensors other than quantised weights (biases included), one file after the other."""
        taken = {name for parts in self.parts.values() for name in parts.values()} | self.unused
        return [name for name in self.checkpoint.names() if name not in taken]

    def shape(self, layer: str) -> tuple[int, int]:
        """``(N, K)``."""
        outline = self._outline(self.shared.get(layer, layer))
        return outline.out_features, outline.in_features

    def ordered(self, layer: str) -> bool:
        """Whether a quantised layer's groups are in activation order; False if GPTQ's ``g_idx`` is in order."""
        parts = self.parts[layer]
        part = parts.get("g_idx", parts.get("weight_g_idx"))
        if part is None:
            return "weight_perm" in parts
        index, quantization = self.checkpoint.tensor(part), self.readers[layer].quantization
        columns = self.shape(layer)[1]
        if index.shape != (columns,):
            where = self.checkpoint.where(part)
            raise FormatError(f"{where}: expected the group of each of {columns} columns, got {list(index.shape)}")
        length = quantization.grid.length(len(index)) if quantization is not None else len(index)
        return not torch.equal(index.to(torch.int64), torch.arange(len(index)) // length)

    def weight(self, layer: str) -> Weight:
        """The weight that a quantised layer's tensors represent. Raises FormatError, naming file and layer, if they are
        inconsistent."""
        return self._named(layer, lambda tensors: self.readers[layer].weight(tensors, self.shape(layer)))

    def module(self, layer: str) -> nn.Module:
        """The module that runs a quantised layer, with the model's bias. Raises FormatError as `weight` does."""
        linear = self._outline(layer)
        bias = {} if linear.bias is None else {BIAS: linear.bias.detach()}
        return self._named(layer, lambda tensors: self.readers[layer].opened(linear, tensors | bias))

    def dequantize(self, layer: str) -> Tensor | None:
        """Any linear layer's weight, float32; None for a layer tied to something other than a linear layer."""
        layer = self.shared.get(layer, layer)
        if layer in self.readers:
            return self.weight(layer).dequantize()
        name = f"{layer}.weight"
        if name not in self.checkpoint.files:
            return None
        weight = self.checkpoint.tensor(name).float()
        return weight.t() if isinstance(self.linears.get(layer), TransposedConv1D) else weight

    def sharing(self, layer: str) -> list[str]:
        """The layers that share a layer's weight."""
        return [name for name, source in self.shared.items() if source == layer]

    def share_(self) -> None:
        """Replace the model's layers that share the weight of a quantised embedding."""
        restore_(self.model, self.shared)

    def _named(self, layer: str, read: Callable[[dict[str, Tensor]], _Found]) -> _Found:
        tensors = {part: self.checkpoint.tensor(name) for part, name in self.parts[layer].items()}
        with located(partial(self.checkpoint.where, layer)):
            return read(tensors)

    def _compare(self) -> None:
        """Compare the files' tensors with the model's, and assign those of quantised layers to `parts`."""
        self._check_layers()
        checkpoint, targets = self.checkpoint, self.model.state_dict(keep_vars=True)
        seen = self._assign(targets)
        for layer, reader in self.readers.items():
            headers = {part: checkpoint.entries[name].outline() for part, name in self.parts[layer].items()}
            with located(partial(checkpoint.where, layer)):
                reader.check(headers, self.shape(layer))
        # The files contain a tied weight under one name only.
        without = self.readers.keys() | self.shared.keys()
        for name in sorted(name for name in targets if name.removesuffix(".weight") not in without):
            if id(targets[name]) not in seen and not is_computed(self.model, name, targets[name]):
                raise FormatError(f"{checkpoint.where(name)}: expected a tensor, found none")

    def _check_layers(self) -> None:
        checkpoint = self.checkpoint
        for layer in self.readers:
            if layer not in self.linears and layer not in self.tables:
                why = why_stacked(self.model, named_in(self.model, layer))
                raise FormatError(f"{checkpoint.where(layer)}: not a linear layer of this model{why}")
            if layer in self.linears and not is_replaceable(self.linears[layer]):
                kind = type(self.linears[layer]).__name__
                raise FormatError(f"{checkpoint.where(layer)}: expected a plain linear layer, but {kind} is not")
        for layer, source in self.shared.items():
            with located(checkpoint.folder):
                checked(self.model, layer, self.shape(source))

    def _assign(self, targets: Mapping[str, Tensor]) -> set[int]:
        """Assign tensors of quantised layers to `parts`; the ids of the model's tensors that the files have."""
        checkpoint = self.checkpoint
        seen, unused, buffers = set(), set(), buffers_of(self.model)
        for name, entry in checkpoint.entries.items():
            layer, part = split_name(name)
            if name in self.unused:
                continue
            if layer in self.readers and part != BIAS:
                self._part(layer, part, name)
                continue
            if name not in targets or (layer in self.shared and part != BIAS):
                if ignores_tensor(self.model, name) or part in buffers or self._empty_bias(layer, part):
                    continue
                why = why_stacked(self.model, name)
                if not why and (checkpoint.quantization is None or is_expected(self.model, name)):
                    unused.add(name)
                    continue
                raise FormatError(f"{checkpoint.where(name)}: not a tensor of this model{why}")
            target = targets[name]
            if not entry.fits(target):
                raise FormatError(
                    f"{checkpoint.where(name)}: expected {target.dtype} {list(target.shape)}, "
                    f"got {entry.dtype} {list(entry.shape)}"
                )
            seen.add(id(target))
        check_unused(self.model, unused, checkpoint)
        return seen

    def _empty_bias(self, layer: str, part: str) -> bool:
        """Whether this is a bias of zeros, which AutoGPTQ writes for layers without a bias."""
        ours = layer in self.readers and part == BIAS
        return ours and not bool(self.checkpoint.tensor(f"{layer}.{part}").any())

    def _part(self, layer: str, part: str, name: str) -> None:
        known = self.readers[layer].parts
        if known is not None and part not in known:
            raise FormatError(f"{self.checkpoint.where(name)}: {other_part(known, part)}")
        self.parts[layer][part] = name
