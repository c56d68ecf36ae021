"""Stored linear layers, which transformers loads, and their replacement by the modules that run them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.embeddings import TableOutline, checked, restore_
from epiloq.formats.io.architecture import check_unchanged, names_in, submodule
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.names import Names, in_whole_model
from epiloq.formats.io.safetensors_file import DTYPES, Entry
from epiloq.formats.io.unused import ignores_layer, is_of_another_head
from epiloq.formats.layer_reader import BIAS, Reader
from epiloq.formats.layouts.base import FormatError, located
from epiloq.formats.readers import other_part, readers, shared, unused_scales
from epiloq.integrations.hf_quantizer.names import check
from epiloq.models.conv1d import as_linear
from epiloq.models.mixtures import release_float_experts_, restack_complete_experts_, restack_experts_, why_stacked
from epiloq.models.subclasses import is_replaceable
from epiloq.vocabulary import forget_ties


class SharedLayer(nn.Module):
    """Placeholder for a layer without a weight in the files, until it shares that of a quantised embedding."""

    def __init__(self, layer: nn.Embedding | nn.Linear) -> None:
        super().__init__()
        self.__dict__["layer"] = layer
        # Attributes of a linear layer: transformers installs tensor parallelism here before the layer is replaced.
        self.out_features, self.in_features = layer.weight.shape
        self.register_parameter(BIAS, getattr(layer, BIAS, None))

    def __getattr__(self, name: str) -> Any:
        if name != "weight":
            return super().__getattr__(name)
        (rows, columns), dtype = self.layer.weight.shape, self.layer.weight.dtype
        return _outline(rows, columns, dtype)

    def opened(self) -> nn.Module:
        """The original layer, with its loaded bias and a weight without values."""
        if self.bias is not None:
            self.layer.bias = self.bias
        opened: nn.Module = self.layer
        return opened.train(self.training)


def _outline(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A weight without values, for models that initialise children's weights; transformers treats it as loaded."""
    outline = torch.empty(rows, columns, dtype=dtype, device="meta")
    outline._is_hf_initialized = True  # type: ignore[attr-defined]
    return outline


class StoredLinear(nn.Module):
    """The tensors of a quantised linear layer as stored, until the module that runs it is created from them."""

    def __init__(self, linear: nn.Linear, parts: Mapping[str, Entry], reader: Reader, origin: str, layer: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.reader, self.origin = reader, origin
        # not a child, so that transformers does not load it
        self.__dict__["outline"] = linear
        self.read: Callable[[], dict[str, Tensor]] | None = None
        self.load_extra: Callable[[], dict[str, Tensor]] | None = None
        self.layer, self.parts = layer, tuple(parts)
        for name, entry in parts.items():
            self._expect(name, DTYPES[entry.dtype], entry.shape)
        if linear.bias is not None:
            self._expect(BIAS, self.dtype, (self.out_features,))
        else:
            self.register_parameter(BIAS, None)

    def __getattr__(self, name: str) -> Any:
        if name != "weight" or name in self._parameters:
            return super().__getattr__(name)
        return _outline(self.out_features, self.in_features, self.dtype)

    def _expect(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        # Not by register_parameter, which would refuse because __getattr__ returns a value for the name.
        self._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def leave_to(self, read: Callable[[], dict[str, Tensor]]) -> None:
        """Provide the reader with which `opened` loads the tensors; transformers will not load them."""
        self._parameters.clear()
        self.register_parameter(BIAS, None)
        self.read = read

    def opened(self) -> nn.Module:
        """The module that runs the layer, on its tensors' device. Raises FormatError, which names file and layer."""
        tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.named_parameters()}
        tensors = tensors if self.read is None else self.read()
        device = next(iter(tensors.values())).device
        if self.load_extra is not None:
            tensors |= {name: tensor.to(device) for name, tensor in self.load_extra().items()}
        if any(tensor.is_meta for tensor in tensors.values()):
            raise FormatError(f"{self.origin}: its tensors are offloaded; use a device_map that keeps it on a device")
        linear = self.outline
        if not isinstance(linear, TableOutline):
            linear = nn.Linear(self.in_features, self.out_features, BIAS in tensors, device="meta", dtype=self.dtype)
        # one number in memory, because its values are never read
        blank = torch.zeros((), device=device, dtype=self.dtype).expand(linear.weight.shape)
        linear.weight = nn.Parameter(blank, requires_grad=False)
        with located(self.origin):
            module = self.reader.opened(linear, tensors)
        return module.to(device).train(self.training)


def store_layers(model: Any, checkpoint: Checkpoint) -> dict[str, Reader]:
    """Replace each quantised layer of `model`, which is on the meta device, by a `StoredLinear`.

    Experts stored as one matrix per expert become unstacked. Returns the layers' readers by their names in the model.
    Raises FormatError, which names the file and the tensor, for an unsupported configuration, a quantised layer that
    the model does not have or whose weight it changes, missing or unknown tensors, wrong shapes and dtypes.
    """
    names = names_in(model, checkpoint)

    def site(layer: str) -> tuple[tuple[str, ...], type[nn.Module]]:
        own = _own_name(names, layer)
        module = submodule(model, own)
        kind = nn.Linear if module is None else type(module)
        return tuple(dict.fromkeys((own, layer, in_whole_model(model, own)))), kind

    def ignores(layer: str) -> bool:
        return ignores_layer(model, layer) or is_of_another_head(model, checkpoint, layer)

    known, sharing = readers(checkpoint, site, ignores), shared(checkpoint)
    tables = [name for name in known if isinstance(submodule(model, name), nn.Embedding)]
    forget_ties(model, (*sharing, *tables))
    unused = set(unused_scales(checkpoint, known.get, names.has))
    layers, extra = _by_layer(checkpoint, known, unused)
    own_names = {layer: _own_name(names, layer) for layer in layers}
    # epiloq's own format uses the model's names of layers, other formats those of the files.
    found_readers = {layer: known.get(layer) or known.get(own) for layer, own in own_names.items()}
    quantised = {own_names[layer] for layer, reader in found_readers.items() if reader is not None}
    check_unchanged(model, {own: checkpoint.where(layer) for layer, own in own_names.items() if own in quantised})
    _forget_ties_among(model, quantised, set(own_names.values()))
    _ignore_unexpected(model, (name for parts in extra.values() for name in parts.values()))
    found: dict[str, Reader] = {}
    for layer, parts in layers.items():
        own, reader = own_names[layer], found_readers[layer]
        if reader is None or ignores(own):
            continue
        # A module with two names may be stored already.
        if not isinstance(submodule(model, own), StoredLinear):
            stored = _stored(model, own, parts, reader, checkpoint, layer)
            if layer in extra:
                stored.load_extra = partial(_read, checkpoint, extra[layer])
            model.set_submodule(own, stored)
        found[own] = reader
    for name, source in sharing.items():
        if source not in found:
            raise FormatError(f"{checkpoint.folder}: {source}: expected the tensors of an embedding, found none")
        model.set_submodule(name, _sharing(model, name, source, checkpoint))
    check(model, checkpoint, unused)
    return found


def _by_layer(
    checkpoint: Checkpoint, known: Mapping[str, Reader], unused: set[str]
) -> tuple[dict[str, dict[str, Entry]], dict[str, dict[str, str]]]:
    """Entries of each layer by their last parts, and bitsandbytes' tensors, whose names a module cannot have."""
    layers: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
    extra: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, entry in checkpoint.entries.items():
        layer, _, part = name.rpartition(".")
        whose, dotted, rest = name.partition(".weight.")
        if dotted and whose in known:
            extra[whose][f"weight.{rest}"] = name
        elif name not in unused:
            layers[layer][part] = entry
    return layers, extra


def _stored(
    model: Any, own: str, parts: dict[str, Entry], reader: Reader, checkpoint: Checkpoint, layer: str
) -> StoredLinear:
    linear = _linear(model, own, checkpoint.where(layer))
    for part in sorted(parts.keys() - (reader.parts or parts.keys()) - {BIAS}):
        raise FormatError(f"{checkpoint.where(f'{layer}.{part}')}: {other_part(reader.parts or (), part)}")
    if BIAS in parts and linear.bias is None:
        _check_empty(model, checkpoint, f"{layer}.{BIAS}", (linear.out_features,))
        del parts[BIAS]
    return StoredLinear(linear, parts, reader, checkpoint.where(layer), layer)


def _sharing(model: Any, name: str, source: str, checkpoint: Checkpoint) -> SharedLayer:
    stored = model.get_submodule(source)
    with located(checkpoint.folder):
        return SharedLayer(checked(model, name, (stored.out_features, stored.in_features)))


def _own_name(names: Names, layer: str) -> str:
    """The name in the model of a layer of the files."""
    return names.of(f"{layer}.weight").removesuffix(".weight")


def _forget_ties_among(model: Any, quantised: set[str], stored: set[str]) -> None:
    """Make a model no longer tie weights of layers that the files have separately, at least one of them quantised."""
    layers = {
        name.removesuffix(".weight"): of.removesuffix(".weight") for name, of in model.all_tied_weights_keys.items()
    }
    apart = {name for name, of in layers.items() if not quantised.isdisjoint((name, of)) and {name, of} <= stored}
    forget_ties(model, tuple(apart))


def _check_empty(model: Any, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Leave out a bias of a layer without one. Raises FormatError unless it has only zeros, as old GPTQ files do."""
    found = checkpoint.entries[name].shape
    if tuple(found) != shape:
        raise FormatError(f"{checkpoint.where(name)}: expected zeros {list(shape)}, got {list(found)}")
    if bool(checkpoint.tensor(name).any()):
        raise FormatError(f"{checkpoint.where(name)}: not a tensor of this model, whose layer has no bias")
    _ignore_unexpected(model, [name])


def stored_scales(model: Any, checkpoint: Checkpoint, known: Mapping[str, Reader]) -> dict[str, Tensor]:
    """Unused scales (of a key-value cache or activations) by their names in `model`, kept so that they can be saved
    again. `readers` are the layers' readers by name in the model."""
    names = Names(model)
    own = partial(_own_name, names)
    found = unused_scales(checkpoint, lambda layer: known.get(own(layer)), names.has)
    kept = {names.of(name): checkpoint.tensor(name).clone() for name in found}
    _ignore_unexpected(model, kept)
    return kept


def _ignore_unexpected(model: Any, names: Iterable[str]) -> None:
    """Suppress transformers' warnings of tensors that it does not load."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, *(re.escape(name) for name in names)}


def _read(checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, Tensor]:
    return {part: checkpoint.tensor(name).clone() for part, name in names.items()}


def _linear(model: Any, name: str, origin: str) -> nn.Linear:
    found = submodule(model, name)
    if isinstance(found, nn.Embedding):
        with located(origin):
            return TableOutline.of(found)
    linear = None if found is None else as_linear(found)
    if linear is None:
        is_what = "nothing of that name" if found is None else type(found).__name__
        why = why_stacked(model, name)
        raise FormatError(f"{origin}: expected a linear layer {name} in {type(model).__name__}, found {is_what}{why}")
    if not is_replaceable(linear):
        raise FormatError(f"{origin}: expected a plain linear layer, but {type(linear).__name__} is not")
    tied = model.all_tied_weights_keys
    if f"{name}.weight" in {*tied, *tied.values()}:
        raise FormatError(
            f"{origin}: expected a floating-point weight, because config.json ties it to another: if the files have "
            'both, write "tie_word_embeddings": false there'
        )
    return linear


def open_layers(model: Any, sharing: Mapping[str, str]) -> None:
    """Replace all stored layers by the modules that run them, and stack experts again.

    Raises FormatError, which names the layer.
    """
    # Names alone, so that what is replaced is released.
    for name in [name for name, module in model.named_modules() if isinstance(module, StoredLinear)]:
        model.set_submodule(name, model.get_submodule(name).opened())
        restack_complete_experts_(model, name.rpartition(".")[0].rpartition(".")[0])
    for name in sharing:
        model.set_submodule(name, model.get_submodule(name).opened())
    restore_(model, sharing)
    restack_experts_(model)
    release_float_experts_(model)
