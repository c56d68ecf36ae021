"""The embedding and the output head of a language model: the layers with one row per token of the vocabulary.

If a model ties them, they are one tensor, which is quantised by one scheme and stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from epiloq.layer_filter import weight_identity
from epiloq.models.subclasses import is_plain, why_not_plain, why_quantised
from epiloq.nn import QuantizedEmbedding, WeightOnlyLinear
from epiloq.nn.quantized_embedding import factor_of
from epiloq.weights.computed import carry_hooks_over
from epiloq.weights.tensor_checks import identity

if TYPE_CHECKING:
    from epiloq.schemes import Scheme


@dataclass(frozen=True)
class Vocabulary:
    """Names of the layers with one row per token.

    embeddings
        The input embedding, and all embeddings that share its weight.
    heads
        The output head, and all linear layers that share its weight.
    tied
        Whether all of them share one weight.
    """

    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    tied: bool


@dataclass(frozen=True)
class VocabularySchemes:
    """Schemes for a model's embedding and head; None leaves them in floating point."""

    found: Vocabulary
    head: Scheme | None
    embedding: Scheme | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers to quantise."""
        embeddings = self.found.embeddings if self.embedding is not None else ()
        return (*embeddings, *(self.found.heads if self.head is not None else ()))

    @property
    def shared(self) -> dict[str, str]:
        """Layers that share the weight of the first embedding, mapped to its name."""
        if self.embedding is None:
            return {}
        first, *others = self.found.embeddings
        heads = self.found.heads if self.found.tied else ()
        return dict.fromkeys((*others, *heads), first)


def find(model: nn.Module) -> Vocabulary:
    """Find the embedding and the head of a model: as declared to transformers, or by their classes and names.

    The head is the result of ``get_output_embeddings()`` or, without it, a linear layer called "lm_head" or sharing its
    weight with an embedding. The embedding is the result of ``get_input_embeddings()`` or, without it, one that shares
    the head's weight, or the only embedding.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    tables = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    given = _asked(model, "get_output_embeddings")
    if given is not None:
        heads = [module for module in linears.values() if module is given]
    else:
        heads = [module for name, module in linears.items() if name.rpartition(".")[2] == "lm_head"]
        heads += [module for module in linears.values() if any(_same(module, table) for table in tables.values())]
    head = heads[0] if heads else None
    given = _asked(model, "get_input_embeddings")
    table = next((module for module in tables.values() if module is given), None)
    if table is None and head is not None:
        table = next((module for module in tables.values() if _same(module, head)), None)
    if table is None and len({id(module) for module in tables.values()}) == 1:
        table = next(iter(tables.values()))
    tied = table is not None and head is not None and _same(table, head)
    return Vocabulary(
        tuple(name for name, module in tables.items() if table is not None and _same(module, table)),
        tuple(name for name, module in linears.items() if head is not None and _same(module, head)),
        tied,
    )


def planned(
    model: nn.Module, head: str | None, embedding: str | None, schemes: Mapping[str, Scheme], where: str = "quantize_"
) -> VocabularySchemes:
    """Plan the quantisation of a model's embedding and head, given the names of their schemes.

    Raises ValueError, which names the argument: a scheme that is unknown, static or for convolutions, or for an
    embedding not weight-only; nothing to quantise; tied layers with two schemes, or with one that is not weight-only; a
    layer that cannot be converted.
    """
    found = find(model)
    chosen = {
        name: _scheme(name, scheme, schemes, where) for name, scheme in (("head", head), ("embedding", embedding))
    }
    for name, layers in (("head", found.heads), ("embedding", found.embeddings)):
        if chosen[name] is not None and not layers:
            raise ValueError(f"{where}: {name}: expected a model with one, found none in {type(model).__name__}")
    if found.tied and (head or embedding):
        for name, scheme in chosen.items():
            if scheme is not None and scheme.module is not WeightOnlyLinear:
                raise ValueError(
                    f"{where}: {name}: {type(model).__name__} ties {found.heads[0]} to {found.embeddings[0]}, which "
                    f"share one weight: expected one of {_listed(schemes)}, got {scheme.name!r}"
                )
        if head and embedding and head != embedding:
            raise ValueError(
                f"{where}: embedding: {type(model).__name__} ties {found.heads[0]} to {found.embeddings[0]}, which "
                f"share one weight: expected {head!r} as for the head, got {embedding!r}"
            )
        chosen = dict.fromkeys(chosen, chosen["head"] or chosen["embedding"])
    vocabulary = VocabularySchemes(found, chosen["head"], chosen["embedding"])
    _check(model, vocabulary, where)
    return vocabulary


def quantize_vocabulary_(model: nn.Module, vocabulary: VocabularySchemes) -> None:
    """Replace a model's embedding and head by quantised layers. Tied ones share their parameters."""
    found = vocabulary.found
    shared: QuantizedEmbedding | None = None
    if vocabulary.embedding is not None:
        options = vocabulary.embedding.options
        for names in _by_module(model, found.embeddings):
            table = cast(nn.Embedding, model.get_submodule(names[0]))
            if shared is None:
                layer = shared = QuantizedEmbedding.from_embedding(table, **options)
            else:
                layer = like(shared, table)
            _put(model, names, layer)
    if vocabulary.head is not None:
        for names in _by_module(model, found.heads):
            linear = cast(nn.Linear, model.get_submodule(names[0]))
            tied = shared is not None and found.tied
            _put(model, names, tied_head(shared, linear) if tied and shared else vocabulary.head.convert(linear))
    forget_ties(model, vocabulary.names)


def like(shared: QuantizedEmbedding, table: nn.Embedding) -> QuantizedEmbedding:
    """Quantised layer for an embedding that shares its weight with one that is already quantised."""
    factor, rounded = factor_of(table)
    scale: dict[str, Any] = {"embed_scale": factor, "embed_scale_rounded": rounded}
    layer = QuantizedEmbedding.from_packed(shared.packed, table.padding_idx, **scale, dtype=shared.dtype)
    layer.share_(shared)
    return layer.train(table.training)


def tied_head(shared: QuantizedEmbedding, linear: nn.Linear) -> WeightOnlyLinear:
    """Head with its own bias that uses the weight of a quantised embedding."""
    return shared.tied_linear(linear.bias).train(linear.training)


def forget_ties(model: nn.Module, names: tuple[str, ...]) -> None:
    """Make a transformers model stop tying the float weights of these layers, which no longer exist."""
    removed = {f"{name}.weight" for name in names}
    for prefix, module in model.named_modules():
        at = f"{prefix}." if prefix else ""
        for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
            known = getattr(module, attribute, None)
            if isinstance(known, dict) and any(f"{at}{key}" in removed for key in known):
                setattr(module, attribute, {key: value for key, value in known.items() if f"{at}{key}" not in removed})


def _check(model: nn.Module, vocabulary: VocabularySchemes, where: str) -> None:
    for name in vocabulary.names:
        layer = model.get_submodule(name)
        try:
            if isinstance(layer, nn.Embedding):
                QuantizedEmbedding.check_convertible(layer)
            else:
                assert vocabulary.head is not None
                if why_quantised(layer) is None:
                    vocabulary.head.check_convertible(layer)
                if not is_plain(layer):
                    raise ValueError(why_not_plain(layer, "linear layer"))
        except ValueError as error:
            raise ValueError(f"{where}: layer {name!r}: {error}") from error
    weights = {weight_identity(model.get_submodule(name)) for name in vocabulary.names}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer_name = name.removesuffix(".weight")
        if identity(parameter) in weights and layer_name not in vocabulary.names:
            raise ValueError(
                f"{where}: {vocabulary.names[0]}: expected a weight of embeddings and heads alone, but {name} shares it"
            )


def _scheme(argument: str, name: str | None, schemes: Mapping[str, Scheme], where: str) -> Scheme | None:
    if name is None:
        return None
    scheme = schemes.get(name)
    fits = scheme is not None and scheme.layer is nn.Linear and not scheme.static
    if scheme is None or not fits or (argument == "embedding" and scheme.module is not WeightOnlyLinear):
        ready = [s.name for s in schemes.values() if s.layer is nn.Linear and not s.static]
        expected = _listed(schemes) if argument == "embedding" else ", ".join(ready)
        raise ValueError(f"{where}: {argument}: expected one of {expected}, got {name!r}")
    return scheme


def weight_only_schemes(schemes: Mapping[str, Scheme]) -> list[str]:
    """Names of the schemes supported for an embedding, and for a head that shares its weight."""
    return [name for name, scheme in schemes.items() if scheme.module is WeightOnlyLinear]


def _listed(schemes: Mapping[str, Scheme]) -> str:
    return ", ".join(weight_only_schemes(schemes))


def _asked(model: Any, method: str) -> Any:
    """Result of a method of a transformers model; None if there is no such method."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _same(one: Any, other: Any) -> bool:
    return weight_identity(one) == weight_identity(other)


def _by_module(model: nn.Module, names: tuple[str, ...]) -> Iterator[list[str]]:
    """Group names by module."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(id(model.get_submodule(name)), []).append(name)
    yield from list(found.values())


def _put(model: nn.Module, names: list[str], layer: nn.Module) -> None:
    carry_hooks_over(model.get_submodule(names[0]), layer)
    for name in names:
        model.set_submodule(name, layer)
