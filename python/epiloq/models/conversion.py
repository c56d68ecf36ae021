"""Replaces a model's layers by quantised ones, for `epiloq.quantize_`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from epiloq.layer_filter import Filter
from epiloq.models.choice import choose
from epiloq.models.conv1d import transposed
from epiloq.models.mixtures import experts_left_stacked, restack_complete_experts_, unstacked_experts
from epiloq.models.multiplied_as_one import together
from epiloq.models.sequential_experts import unstacked
from epiloq.observers import Observer, evaluating, input_quantizers
from epiloq.weights.computed import carry_hooks_over
from epiloq.weights.fp4 import divisor_of

if TYPE_CHECKING:
    from epiloq.schemes import Scheme


def quantize_layers(
    model: nn.Module,
    chosen: Scheme,
    filter_fn: Filter | None,
    ignore: str | Sequence[str],
    calibrate: Callable[[nn.Module], object] | None,
    observer: Callable[[], Observer],
    ends: Sequence[str],
) -> dict[str, str]:
    """`quantize_` without the embedding and the head, whose names are given. Returns the layers left in floating point,
    with reasons."""
    if chosen.static and calibrate is None:
        raise ValueError(
            f"quantize_: calibrate: scheme {chosen.name!r} needs a function that runs the model on sample inputs, "
            "as in calibrate=lambda model: model(inputs); got None"
        )
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    with ExitStack() as stack:
        if chosen.layer is nn.Linear:
            stack.enter_context(transposed(model))
            stack.enter_context(unstacked_experts(model))
            stack.enter_context(unstacked(model))
        groups, left = choose(model, chosen.layer, filter_fn, patterns, chosen.check_convertible)
        twice = {name for names in groups for name in names} & set(ends)
        if twice:
            raise ValueError(f"quantize_: head: {min(twice)} is chosen by filter_fn, too: expected one or the other")
        _convert(model, groups, chosen, calibrate, observer)
    if chosen.layer is nn.Linear and filter_fn is None:
        left |= {f"the experts of {name}": reason for name, reason in experts_left_stacked(model).items()}
    return left


def _convert(
    model: nn.Module,
    groups: list[list[str]],
    chosen: Scheme,
    calibrate: Callable[[nn.Module], object] | None,
    observer: Callable[[], Observer],
) -> None:
    """`quantize_` for given layers of a model with unstacked experts."""
    inputs: list[dict[str, Any]] = [{}] * len(groups)
    if chosen.static and calibrate is not None:
        symmetric = chosen.options.get("symmetric", False)
        layers = {names[0]: model.get_submodule(names[0]) for names in groups}
        with evaluating(model):
            inputs = input_quantizers(layers, lambda: calibrate(model), observer, symmetric=symmetric)
    if chosen.options.get("format") == "nvfp4":
        inputs = _shared_divisors(model, groups)
    for names, seen in zip(groups, inputs, strict=True):
        quantised = chosen.convert(model.get_submodule(names[0]), **seen)
        carry_hooks_over(model.get_submodule(names[0]), quantised)
        for name in names:
            model.set_submodule(name, quantised)
        # Release float weights as soon as a layer's experts are complete.
        restack_complete_experts_(model, names[0].rpartition(".")[0].rpartition(".")[0])


def _shared_divisors(model: nn.Module, groups: list[list[str]]) -> list[dict[str, Any]]:
    """NVFP4's divisor for each layer, given its names; it is shared by layers that engines multiply as one matrix."""
    found: dict[str, Any] = {}
    for names in together(names[0] for names in groups):
        weights: list[Any] = [model.get_submodule(name).weight for name in names]
        if not any(weight.is_meta for weight in weights):
            found |= dict.fromkeys(names, divisor_of(*(weight.detach() for weight in weights)))
    return [{"divisor": found[names[0]]} if names[0] in found else {} for names in groups]
