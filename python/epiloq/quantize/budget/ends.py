"""The embedding and the output head in a budget: which schemes they can have, what each takes, and what it costs."""

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
from epiloq.quantize.ends import reasons_against
from epiloq.quantize.targets import TARGETS
from epiloq.schemes import SCHEMES
from epiloq.vocabulary import Ends, weight_only_schemes
from epiloq.weights.rounding import rtn

FLOAT = "float"
"""The choice that leaves them as they are."""
Role = str


def assumed(scheme: str | None) -> str | None:
    """The scheme to plan with where a budget chooses: one that every format which can hold any can hold."""
    return BASE if scheme == AUTO else scheme


@dataclass(frozen=True)
class End:
    """Layers whose scheme a budget chooses, all of one weight.

    roles
        "head", "embedding" or, where they are tied, both.
    layers
        Their names.
    sizes
        Bytes by scheme, `FLOAT` among them.
    """

    roles: tuple[Role, ...]
    layers: tuple[str, ...]
    sizes: Mapping[str, int]


def free(
    model: nn.Module,
    ends: Ends,
    chosen: Mapping[Role, str | None],
    candidates: Sequence[str],
    layout: Format,
    symmetric: bool,
) -> list[End]:
    """What a budget chooses of a model's ends, where `chosen` says `AUTO`; the model has values."""
    layers = {"head": ends.found.heads, "embedding": ends.found.embeddings}
    auto = [role for role in layers if chosen[role] == AUTO and getattr(ends, role) is not None]
    parts: list[tuple[Role, ...]] = [tuple(layers)] if ends.found.tied and auto else [(role,) for role in auto]
    found = []
    for roles in parts:
        names = tuple(name for role in roles for name in layers[role])
        found.append(End(roles, names, _sizes(model, ends, roles, names, candidates, layout, symmetric)))
    return found


def _sizes(
    model: nn.Module,
    ends: Ends,
    roles: Sequence[Role],
    layers: Sequence[str],
    candidates: Sequence[str],
    layout: Format,
    symmetric: bool,
) -> dict[str, int]:
    """Bytes of an end by scheme; those that the format cannot hold beside the layers are left out."""
    weights = {f"{layer}.weight" for layer in layers}
    kept = {name: tensor for name, tensor in distinct(model).items() if name in weights}
    found, dtype = (
        {FLOAT: sum(tensor.nbytes + HEADER + len(name) for name, tensor in kept.items())},
        next(iter(kept.values())).dtype,
    )
    for scheme in candidates:
        if scheme not in weight_only_schemes(SCHEMES):
            continue
        tried = settle(replace(ends, head=None, embedding=None), dict.fromkeys(roles, scheme))
        if reasons_against(tried, model, BASE, symmetric)[layout.name] is not None:
            continue
        found[scheme] = 0
        for layer in dict.fromkeys(tried.names):
            if layout.shares and layer in tried.shared:
                continue
            quantization = TARGETS[scheme].quantization(symmetric, layout.scale_dtype(dtype, None))
            assert quantization is not None  # They are integers on a grid.
            rows, columns = model.get_parameter(f"{layer}.weight").shape
            tensors = layout.to_tensors(blank(quantization, (rows, columns)), quantization, dtype)
            found[scheme] += sum(t.nbytes + HEADER + len(f"{layer}.{part}") for part, t in tensors.items())
    return found


def settle(ends: Ends, chosen: Mapping[Role, str]) -> Ends:
    """Ends with the schemes that were chosen."""
    schemes = {role: None if name == FLOAT else SCHEMES[name] for role, name in chosen.items()}
    return replace(ends, head=schemes.get("head", ends.head), embedding=schemes.get("embedding", ends.embedding))


@torch.no_grad()
def losses(
    model: nn.Module, ends: Sequence[End], windows: Sequence[Tensor], symmetric: bool, advance: Callable[[], None]
) -> list[dict[str, float]]:
    """Of each end and scheme the divergence that it costs, nats per token, all else exact."""
    found: list[dict[str, float]] = []
    with evaluating(model):
        predicted = [_logarithms(model, window) for window in windows] if ends else []
        for end in ends:
            found.append(_losses(model, end, windows, predicted, symmetric))
            advance()
    return found


def _logarithms(model: nn.Module, window: Tensor) -> Tensor:
    return logits_of(model, window).float().log_softmax(-1)


def _losses(
    model: Any, end: End, windows: Sequence[Tensor], predicted: Sequence[Tensor], symmetric: bool
) -> dict[str, float]:
    weights = {id(weight): weight for weight in (model.get_submodule(name).weight for name in end.layers)}
    exact = {key: weight.detach().clone() for key, weight in weights.items()}
    lost = {FLOAT: 0.0}
    for name in end.sizes.keys() - {FLOAT}:
        for key, weight in weights.items():
            weight.copy_(rtn(exact[key].float(), TARGETS[name].grid(symmetric)).dequantize())
        lost[name] = mean_divergence(predicted, (_logarithms(model, window) for window in windows))
        for key, weight in weights.items():
            weight.copy_(exact[key])
    return lost
