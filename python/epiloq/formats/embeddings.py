"""Quantised embeddings in files, and tied layers, which have no tensors of their own in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from epiloq.formats.layouts.base import FormatError
from epiloq.nn import QuantizedEmbedding, WeightOnlyLinear
from epiloq.nn.quantized_embedding import factor_of
from epiloq.vocabulary import forget_ties, like, tied_head
from epiloq.weights.tensor_checks import Identity, identity

SHARED = "shared"
_SCALES = ("embed_scale", "embed_scale_rounded")


class TableOutline(nn.Linear):
    """An embedding as the linear layer of the same weight, ``[num_embeddings, embedding_dim]``, without values."""

    padding_idx: int | None
    scale: Mapping[str, Any]

    @classmethod
    def of(cls, table: nn.Embedding) -> TableOutline:
        """The outline of an embedding. Raises FormatError if `QuantizedEmbedding` does not support it."""
        try:
            scale = dict(zip(_SCALES, factor_of(table), strict=True))
        except ValueError as error:
            raise FormatError(str(error)) from None
        dtype = table.weight.dtype
        made = cls(table.embedding_dim, table.num_embeddings, bias=False, device="meta", dtype=dtype)
        # one number in memory, because its values are never read
        blank = torch.zeros((), device=table.weight.device, dtype=dtype).expand(table.weight.shape)
        made.weight = nn.Parameter(blank, requires_grad=False)
        made.padding_idx, made.scale = table.padding_idx, scale
        return made.train(table.training)

    def described(self, module: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Class and options of the embedding that corresponds to a linear layer with this class and these options.

        Raises FormatError if there is none.
        """
        if module != WeightOnlyLinear.__name__:
            raise FormatError(f"expected an embedding of integers of 2, 3, 4 or 8 bits, got the weight of {module}")
        scale = {name: value for name, value in self.scale.items() if value not in (1.0, False)}
        return QuantizedEmbedding.__name__, {**options, **scale}


def shared_layers(model: nn.Module) -> dict[str, str]:
    """Names of a model's layers without their own weight, mapped to the quantised embedding whose weight they share."""
    names: dict[Identity, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedEmbedding):
            names.setdefault(identity(module.weight_q), name)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (QuantizedEmbedding, WeightOnlyLinear)) and not module.weight_q.is_meta:
            source = names.get(identity(module.weight_q), name)
            if source != name:
                found[name] = source
    return found


def without(state: Mapping[str, Tensor], shared: Mapping[str, str]) -> dict[str, Tensor]:
    """A state dict without the weights of these layers; biases stay."""
    removed = tuple(f"{name}.weight" for name in shared)
    return {name: tensor for name, tensor in state.items() if not name.startswith(removed)}


def shared_in(config: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    """The shared layers in a configuration of epiloq's own format, given the class of each layer that has tensors.

    Raises FormatError unless they map names of layers without tensors to names of embeddings.
    """
    found = config.get(SHARED, {})
    if not isinstance(found, dict):
        raise FormatError(f"epiloq: quantization_config: {SHARED}: expected names by name, got {found!r}")
    for name, source in found.items():
        if known.get(source) != QuantizedEmbedding.__name__ or name in known:
            raise FormatError(
                f"epiloq: quantization_config: {SHARED}: expected a layer without tensors and an embedding, "
                f"got {name!r} and {source!r}"
            )
    return found


def restore_(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Replace layers that share the weight of an already quantised embedding.

    Raises FormatError for an unsupported layer.
    """
    for name, source in shared.items():
        table = cast(QuantizedEmbedding, model.get_submodule(source))
        module = checked(model, name, (table.num_embeddings, table.embedding_dim))
        layer = like(table, module) if isinstance(module, nn.Embedding) else tied_head(table, module)
        model.set_submodule(name, layer)
    forget_ties(model, (*shared, *shared.values()))


def checked(model: nn.Module, name: str, shape: tuple[int, int]) -> nn.Embedding | nn.Linear:
    """A layer that is to share a weight of this shape. Raises FormatError for other kinds of module or shapes."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise FormatError(f"{name}: not a layer of this model") from None
    if not isinstance(module, (nn.Embedding, nn.Linear)) or tuple(module.weight.shape) != shape:
        weight = getattr(module, "weight", None)
        actual = list(weight.shape) if isinstance(weight, Tensor) else "no weight"
        raise FormatError(f"{name}: expected an embedding or a linear layer {list(shape)}, got {actual}")
    return module


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that does not tie the head to the embedding."""
    key = "tie_word_embeddings"
    inner = {name: untied(value) for name, value in config.items() if isinstance(value, dict) and key in value}
    return {**config, **inner, key: False}
