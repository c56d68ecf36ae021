"""The embedding and the output head in a budget: supported schemes, their sizes and their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.evaluation.perplexity import logits_of
from epiloq.formats.io.architecture import distinct
from epiloq.formats.table import Format, blank
from epiloq.observers import evaluating
from epiloq.quantize.budget.candidates import AUTO, BASE, HEADER
from epiloq.quantize.budget.probe import mean_divergence
from epiloq.quantize.targets import TARGETS
from epiloq.quantize.vocabulary import reasons_against
from epiloq.schemes import SCHEMES
from epiloq.vocabulary import VocabularySchemes, weight_only_schemes
from epiloq.weights.rounding import rtn

FLOAT = "float"
"""The choice that leaves them in floating point."""
Role = str


def assumed(scheme: str | None) -> str | None:
    """The scheme to plan with if a budget chooses: every format that supports a quantised embedding supports it."""
    return BASE if scheme == AUTO else scheme


@dataclass(frozen=True)
class VocabularyWeight:
    """Layers that share one weight, whose scheme a budget chooses.

    roles
        "head", "embedding", or both if they are tied.
    layers
        Their names.
    sizes
        Bytes by scheme, including `FLOAT`.
    """

    roles: tuple[Role, ...]
    layers: tuple[str, ...]
    sizes: Mapping[str, int]


def free(
    model: nn.Module,
    vocabulary: VocabularySchemes,
    chosen: Mapping[Role, str | None],
    candidates: Sequence[str],
    layout: Format,
    symmetric: bool,
) -> list[VocabularyWeight]:
    """The embedding and the head whose scheme a budget chooses, that is, whose entry in `chosen` is `AUTO`. The model
    must have values."""
    layers = {"head": vocabulary.found.heads, "embedding": vocabulary.found.embeddings}
    auto = [role for role in layers if chosen[role] == AUTO and getattr(vocabulary, role) is not None]
    parts: list[tuple[Role, ...]] = [tuple(layers)] if vocabulary.found.tied and auto else [(role,) for role in auto]
    found = []
    for roles in parts:
        names = tuple(name for role in roles for name in layers[role])
        found.append(
            VocabularyWeight(roles, names, _sizes(model, vocabulary, roles, names, candidates, layout, symmetric))
        )
    return found


def _sizes(
    model: nn.Module,
    vocabulary: VocabularySchemes,
    roles: Sequence[Role],
    layers: Sequence[str],
    candidates: Sequence[str],
    layout: Format,
    symmetric: bool,
) -> dict[str, int]:
    """Bytes by scheme; schemes that the format cannot represent together with the layers are omitted."""
    weights = {f"{layer}.weight" for layer in layers}
    kept = {name: tensor for name, tensor in distinct(model).items() if name in weights}
    found, dtype = (
        {FLOAT: sum(tensor.nbytes + HEADER + len(name) for name, tensor in kept.items())},
        next(iter(kept.values())).dtype,
    )
    for scheme in candidates:
        if scheme not in weight_only_schemes(SCHEMES):
            continue
        tried = settle(replace(vocabulary, head=None, embedding=None), dict.fromkeys(roles, scheme))
        if reasons_against(tried, model, BASE, symmetric)[layout.name] is not None:
            continue
        found[scheme] = 0
        for layer in dict.fromkeys(tried.names):
            if layout.shares and layer in tried.shared:
                continue
            quantization = TARGETS[scheme].quantization(symmetric, layout.scale_dtype(dtype, None))
            assert quantization is not None  # weight-only schemes use integer grids
            rows, columns = model.get_parameter(f"{layer}.weight").shape
            tensors = layout.to_tensors(blank(quantization, (rows, columns)), quantization, dtype)
            found[scheme] += sum(t.nbytes + HEADER + len(f"{layer}.{part}") for part, t in tensors.items())
    return found


def settle(vocabulary: VocabularySchemes, chosen: Mapping[Role, str]) -> VocabularySchemes:
    """Set the schemes that were chosen."""
    schemes = {role: None if name == FLOAT else SCHEMES[name] for role, name in chosen.items()}
    return replace(
        vocabulary, head=schemes.get("head", vocabulary.head), embedding=schemes.get("embedding", vocabulary.embedding)
    )


@torch.no_grad()
def losses(
    model: nn.Module,
    vocabulary: Sequence[VocabularyWeight],
    windows: Sequence[Tensor],
    symmetric: bool,
    advance: Callable[[], None],
) -> list[dict[str, float]]:
    """KL divergence in nats per token for each weight and scheme, with everything else exact."""
    found: list[dict[str, float]] = []
    with evaluating(model):
        predicted = [_logarithms(model, window) for window in windows] if vocabulary else []
        for part in vocabulary:
            found.append(_losses(model, part, windows, predicted, symmetric))
            advance()
    return found


def _logarithms(model: nn.Module, window: Tensor) -> Tensor:
    return logits_of(model, window).float().log_softmax(-1)


def _losses(
    model: Any, part: VocabularyWeight, windows: Sequence[Tensor], predicted: Sequence[Tensor], symmetric: bool
) -> dict[str, float]:
    weights = {id(weight): weight for weight in (model.get_submodule(name).weight for name in part.layers)}
    exact = {key: weight.detach().clone() for key, weight in weights.items()}
    lost = {FLOAT: 0.0}
    for name in part.sizes.keys() - {FLOAT}:
        for key, weight in weights.items():
            weight.copy_(rtn(exact[key].float(), TARGETS[name].grid(symmetric)).dequantize())
        lost[name] = mean_divergence(predicted, (_logarithms(model, window) for window in windows))
        for key, weight in weights.items():
            weight.copy_(exact[key])
    return lost
