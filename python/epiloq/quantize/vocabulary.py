"""The embedding and the output head in ``epiloq quantize``: formats, rounding, and their errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from epiloq.evaluation.comparison import answers, layer_error
from epiloq.formats.description import Description
from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.formats.table import FORMATS, Format
from epiloq.formats.weights import Weight
from epiloq.quantize.targets import TARGETS, Target
from epiloq.vocabulary import VocabularySchemes
from epiloq.weights.rounding import rtn


def _by_name(vocabulary: VocabularySchemes) -> dict[str, Target]:
    """The scheme of every layer to quantise, including layers that share a weight."""
    found = dict.fromkeys(vocabulary.found.embeddings if vocabulary.embedding else (), vocabulary.embedding)
    found |= dict.fromkeys(vocabulary.found.heads if vocabulary.head else (), vocabulary.head)
    return {name: TARGETS[scheme.name] for name, scheme in found.items() if scheme is not None}


def _described(target: Target, layout: Format, symmetric: bool) -> Description | None:
    """A format's `Description` of a scheme's layers, if it has any."""
    if layout.describe is None:
        return None
    return replace(layout.describe(target.blank((256, 256), symmetric), target.quantization(symmetric)), ordered=False)


def reasons_against(
    vocabulary: VocabularySchemes, outline: nn.Module, scheme: str, symmetric: bool
) -> dict[str, str | None]:
    """Return, for each format, why it cannot represent the embedding and the head together with layers of a scheme;
    None if it can."""

    def reason(layout: Format) -> str | None:
        if not vocabulary.names:
            return None
        if not layout.vocabulary:
            which = "embedding" if vocabulary.embedding is not None else "output head"
            return f"{layout.name}: cannot represent a quantised {which}"
        kept, _ = settled(vocabulary, layout, scheme, symmetric)
        for name, target in _by_name(kept).items():
            weight = cast(Tensor, outline.get_submodule(name).weight)
            blank = target.blank((weight.shape[0], weight.shape[1]), symmetric)
            try:
                layout.to_tensors(blank, target.quantization(symmetric), weight.dtype)
            except FormatError as error:
                return f"{name}: {error}"
        return None if layout.describe is None else _unlike(kept, layout, scheme, symmetric)

    return {name: reason(layout) for name, layout in FORMATS.items()}


def _unlike(vocabulary: VocabularySchemes, layout: Format, scheme: str, symmetric: bool) -> str | None:
    """Return why transformers (5.24, with compressed-tensors 0.20) cannot open layers with several descriptions."""
    try:
        layers = _described(TARGETS[scheme], layout, symmetric)
    except FormatError:
        return None  # reported for the layers themselves
    described = {name: _described(target, layout, symmetric) for name, target in _by_name(vocabulary).items()}
    for name in vocabulary.found.embeddings if vocabulary.embedding is not None else ():
        if described[name] != layers:
            return f"{layout.name}: its reader supports a quantised embedding ({name}) with the layers' scheme only"
    kinds = {*described.values(), layers}
    if len(kinds) > 1 and any(kind is not None and not kind.symmetric for kind in kinds):
        return f"{layout.name}: its reader supports integers with zero points of one scheme only; use --symmetric"
    return None


def of_one_scheme(layout: str) -> str:
    """Return why a format whose reader describes layers cannot represent a quantised embedding together with those of a
    budget."""
    return f"{layout}: its reader supports only an embedding with the layers' scheme, and a budget has several"


def settled(
    vocabulary: VocabularySchemes, layout: Format, scheme: str, symmetric: bool
) -> tuple[VocabularySchemes, tuple[str, ...]]:
    """Return how a format stores the embedding and the head, and warnings about it, a sentence each."""
    if not vocabulary.shared:
        return vocabulary, ()
    first, others = vocabulary.found.embeddings[0], ", ".join(vocabulary.shared)
    tied = f"{first} and {others} are tied"
    if layout.shares:
        return vocabulary, (f"{tied}: one quantised weight, stored once",)
    twice = f"{tied}, which {layout.name} cannot represent of a quantised weight: stored for each of them"
    target = TARGETS[vocabulary.head.name] if vocabulary.head is not None else None
    if target is None or layout.describe is None:
        return vocabulary, (twice,)
    try:
        alike = _described(target, layout, symmetric) == _described(TARGETS[scheme], layout, symmetric)
    except FormatError:
        return vocabulary, (twice,)
    if alike:
        return vocabulary, (twice,)
    float_table = f"its reader supports only an embedding with the layers' scheme, so {first} stays as it is"
    return replace(vocabulary, embedding=None), (f"{tied}, but {layout.name} stores each: {float_table}",)


def preferred(formats: Sequence[str], vocabulary: VocabularySchemes) -> list[str]:
    """Formats in order of preference: first those that store tied layers once."""
    return sorted(formats, key=lambda name: bool(vocabulary.shared) and not FORMATS[name].shares)


def rounded_vocabulary(
    model: nn.Module, vocabulary: VocabularySchemes, layout: Format, symmetric: bool
) -> Iterator[tuple[str, Weight, Quantization | None]]:
    """The weights of the embedding and the head to write, rounded to nearest, and how each is quantised."""
    apart = {
        name: target
        for name, target in _by_name(vocabulary).items()
        if not layout.shares or name not in vocabulary.shared
    }
    for name, target in apart.items():
        weight = cast(Tensor, model.get_submodule(name).weight).detach()
        options = symmetric, layout.scale_dtype(weight.dtype, target.quantization(symmetric))
        rounded = rtn(weight.float().cpu(), target.grid(*options, layout.widens))
        yield name, target.stored_form(rounded), target.quantization(*options)


def costs(
    model: nn.Module, quantised: nn.Module, vocabulary: VocabularySchemes, texts: Sequence[Tensor], layout: Format
) -> dict[str, Any]:
    """Errors of the embedding and the head, given the floating-point model and the written one.

    errors
        Relative errors of the weights by name.
    kl
        Difference between the written model's predictions and those with these layers in floating point, as measured by
        `answers`; None without text.
    """
    errors = {}
    for name in vocabulary.names:
        weight = cast(Tensor, model.get_submodule(name).weight).detach().float().cpu()
        restored = cast(Any, quantised.get_submodule(name)).dequantized_weight().cpu()
        errors[name] = layer_error(name, weight, restored).relative
    device = next(quantised.parameters()).device
    floats = {name: model.get_submodule(name).to(device) for name in vocabulary.names}
    found = answers(_Exchanged(quantised, floats), quantised, list(texts)) if texts else None
    return {
        "head": None if vocabulary.head is None else vocabulary.head.name,
        "embedding": None if vocabulary.embedding is None else vocabulary.embedding.name,
        "tied": vocabulary.found.tied,
        "stored_once": bool(vocabulary.shared) and layout.shares,
        "errors": errors,
        "kl": found,
    }


class _Exchanged(nn.Module):
    """Temporarily replace some of a model's modules."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.others = model, layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            before = self._put(self.others)
            try:
                return self.model(*args, **kwargs)
            finally:
                self._put(before)

    def _put(self, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
        before = {name: self.model.get_submodule(name) for name in layers}
        for name, layer in layers.items():
            self.model.set_submodule(name, layer)
        return before
