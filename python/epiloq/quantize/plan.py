"""Plan of ``epiloq quantize``: the layers to quantise and the format, determined before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from epiloq.formats import epiloq_modules
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.table import FORMATS
from epiloq.layer_filter import check_patterns, ignored, reasons
from epiloq.models.conv1d import TransposedConv1D
from epiloq.models.mixtures import stacked, unstack_experts_
from epiloq.models.sequential_experts import is_replaced, unstack_
from epiloq.models.stacked_experts import reason_against
from epiloq.quantize.budget.candidates import LAYOUTS
from epiloq.quantize.budget.vocabulary import assumed
from epiloq.quantize.calibration.blocks import block_lists, find_blocks, linears_of, other_lists
from epiloq.quantize.calibration.on_text import INSTEAD, other_input
from epiloq.quantize.outputs import refusals
from epiloq.quantize.settings import Settings
from epiloq.quantize.targets import TARGETS
from epiloq.quantize.texts import needs_text
from epiloq.quantize.vocabulary import of_one_scheme, preferred, reasons_against, settled
from epiloq.schemes import SCHEMES
from epiloq.vocabulary import VocabularySchemes, planned
from epiloq.weights.computed import computed_parts

FEW, MOST = 0.05, 0.5
"""Maximum fraction of weights that a format may leave in floating point if chosen by default, and if requested."""


@dataclass(frozen=True)
class Plan:
    """The plan for a model's layers.

    layout
        The format, a key of FORMATS.
    lists
        The names of the lists whose children are the blocks.
    blocks
        Number of blocks.
    layers
        Linear layers to quantise, without values.
    left
        Linear layers of the blocks that stay in floating point, with the reason.
    notes
        Warnings to issue before the work starts, one sentence each.
    vocabulary
        Schemes of the embedding and the output head, without values.
    """

    layout: str
    lists: tuple[str, ...]
    blocks: int
    layers: Mapping[str, nn.Linear]
    left: Mapping[str, str]
    notes: tuple[str, ...]
    vocabulary: VocabularySchemes


def plan(settings: Settings, outline: Any) -> Plan:
    """Plan for a model without values. Raises ValueError, with a suggestion that works."""
    layout = settings.layout
    if layout is not None:
        unstack_experts_for_format_(outline, layout)
    head, embedding = assumed(settings.head), assumed(settings.embedding)
    vocabulary = planned(outline, head, embedding, SCHEMES, str(settings.model))
    lists = _lists(settings, outline)
    wanted, left = _layers(settings, outline, lists)
    against = reasons_against(vocabulary, outline, settings.scheme, settings.symmetric)
    if settings.budget is not None and vocabulary.embedding is not None:
        against |= {name: of_one_scheme(name) for name, found in FORMATS.items() if found.describe is not None}
    if layout is not None and against[layout] is not None:
        fitting = [name for name, reason in against.items() if reason is None]
        raise FormatError(f"{settings.model}: {against[layout]}; type {' or '.join(f'--format {n}' for n in fitting)}")
    formats = [name for name, reason in refusals(settings.scheme, settings.symmetric).items() if reason is None]
    formats = preferred([name for name in formats if against[name] is None or name == layout], vocabulary)
    unfit = {name: _unfit(settings, wanted, name, settings.scheme) for name in formats}
    if settings.budget is not None:
        formats = [name for name in formats if name in LAYOUTS]
    stacks = _stacked_weights(settings, outline, lists) if layout is None else 0
    left_stacked = {name: 0 if _unstacks(outline, name) else stacks for name in formats}
    parts = {name: _part(wanted, unfit[name], left_stacked[name], stacks) for name in formats}
    notes: tuple[str, ...] = ()
    if layout is None:
        layout = next((name for name in formats if parts[name] <= FEW), min(formats, key=lambda name: parts[name]))
        if layout != formats[0]:
            first, fits = formats[0], _part(wanted, unfit[formats[0]]) <= FEW
            stacked_why = f"{first} cannot hold the experts, which the model's files stack"
            notes = (f"format {layout}: {stacked_why if fits else _cannot(settings, wanted, unfit[first], first)}",)
        if unstack_experts_for_format_(outline, layout):
            wanted, left = _layers(settings, outline, lists)
            unfit[layout] = _unfit(settings, wanted, layout, settings.scheme)
    if _part(wanted, unfit[layout]) > MOST:
        raise FormatError(f"{settings.model}: {_cannot(settings, wanted, unfit[layout], layout)}")
    left |= unfit[layout]
    layers = {name: layer for name, layer in wanted.items() if name not in left}
    vocabulary, warnings = settled(vocabulary, FORMATS[layout], settings.scheme, settings.symmetric)
    notes += warnings
    notes += _other_lists(outline, lists) if settings.blocks is None else ()
    return Plan(layout, lists, len(find_blocks(outline, _any, lists)), layers, left, notes, vocabulary)


def unstack_experts_for_format_(model: nn.Module, layout: str) -> list[str]:
    """Unstack experts if the format stores one matrix each but the model's files stack them; returns the changes."""
    if layout == epiloq_modules.METHOD:
        return unstack_experts_(model) + unstack_(model, None)
    return unstack_(model, layout)


def _any(module: nn.Module, name: str) -> bool:
    return True


def _lists(settings: Settings, outline: Any) -> tuple[str, ...]:
    """The lists of blocks, for encoder-decoder models both. Raises ValueError if those are to be calibrated."""
    reason = reasons(outline)

    def takes(module: nn.Module, name: str) -> bool:
        return reason(module, name) is None

    if needs_text(settings) and (other := other_input(outline)) is not None:
        raise ValueError(
            f"{settings.model}: {type(outline).__name__} runs on {other}, and is calibrated on text alone: {INSTEAD}"
        )
    if settings.blocks is not None:
        find_blocks(outline, takes, settings.blocks)
        return (settings.blocks,)
    two = getattr(outline.config, "is_encoder_decoder", False)
    if two and needs_text(settings):
        raise ValueError(
            f"{settings.model}: {type(outline).__name__} is an encoder and a decoder, which cannot be calibrated block "
            "by block: use a scheme without static scales and --algorithm rtn, or name one list with --blocks, whose "
            f"layers alone are then quantised: {other_lists(outline, takes, ())}"
        )
    return tuple(block_lists(outline, takes)[: None if two else 1])


def _other_lists(outline: nn.Module, lists: tuple[str, ...]) -> tuple[str, ...]:
    """A note on lists of blocks that stay in floating point, if one has more than `FEW` of the weights."""
    reason = reasons(outline)

    def takes(module: nn.Module, name: str) -> bool:
        return reason(module, name) is None

    def weights(name: str) -> int:
        return sum(layer.weight.numel() for layer in linears_of(outline.get_submodule(name), name, takes).values())

    left = [name for name in block_lists(outline, takes) if name not in lists]
    small = {name for name in left if weights(name) <= FEW * sum(map(weights, lists))}
    if small == set(left):
        return ()
    others = other_lists(outline, takes, small.union(lists))
    return (f"only {', '.join(lists)} is quantised; --blocks NAME takes another list instead: {others}",)


def _layers(
    settings: Settings, outline: nn.Module, lists: tuple[str, ...]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Linear layers of the blocks that can be quantised, by name, and reasons why others are not."""
    reason, scheme = reasons(outline), SCHEMES[settings.scheme]
    named = [(name, m) for name, m in outline.named_modules() if name.startswith(tuple(f"{each}." for each in lists))]
    linears = {name: module for name, module in named if isinstance(module, nn.Linear)}
    check_patterns(settings.ignore, [*linears, *(name for name, _ in outline.named_modules())], "--ignore")
    left: dict[str, str] = {}
    for name, module in linears.items():
        why, pattern = reason(module, name), ignored(settings.ignore, name)
        if why is None and pattern is not None:
            why = f"--ignore {pattern}"
        if why is None and (parts := computed_parts(module)):
            why = f"its {parts[0]} is computed from other parameters, which the files contain"
        if why is None:
            try:
                scheme.check_convertible(module)
            except ValueError as error:
                why = str(error)
        if why is not None:
            left[name] = why
    wanted = {name: module for name, module in linears.items() if name not in left}
    if not wanted:
        message = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3])
        raise ValueError(
            f"{settings.model}: expected linear layers to quantise in {', '.join(lists)}, found none: {message}"
        )
    return wanted, left


def _unfit(settings: Settings, layers: Mapping[str, nn.Linear], layout: str, scheme: str) -> dict[str, str]:
    """Layers that a format cannot represent when quantised by a scheme, with the reason."""
    target, found = TARGETS[scheme], FORMATS[layout]
    quantization = target.quantization(settings.symmetric)
    known: dict[tuple[int, int, bool], str | None] = {}

    def reason(layer: nn.Linear) -> str | None:
        if isinstance(layer, TransposedConv1D) and not found.conv1d:
            return f"{layout}: cannot represent a Conv1D, only torch.nn.Linear"
        weight = target.blank((layer.out_features, layer.in_features), settings.symmetric)
        try:
            found.to_tensors(weight, quantization, layer.weight.dtype)
        except FormatError as error:
            return str(error)
        return None

    for layer in layers.values():
        key = layer.out_features, layer.in_features, isinstance(layer, TransposedConv1D)
        if key not in known:
            known[key] = reason(layer)
    found_of = {n: (x.out_features, x.in_features, isinstance(x, TransposedConv1D)) for n, x in layers.items()}
    return {name: why for name, key in found_of.items() if (why := known[key]) is not None}


def _part(layers: Mapping[str, nn.Linear], unfit: Mapping[str, str], left_stacked: int = 0, stacks: int = 0) -> float:
    """The fraction of the weights of some layers, and of `stacks` weights of stacked experts, that a format cannot
    represent: `unfit` layers, and as many stacked weights as are left so."""
    sizes = {name: layer.in_features * layer.out_features for name, layer in layers.items()}
    return (sum(sizes[name] for name in unfit) + left_stacked) / (sum(sizes.values()) + stacks)


def _stacked_weights(settings: Settings, outline: nn.Module, lists: tuple[str, ...]) -> int:
    """Weights of experts that the files stack, and that the format epiloq stores one by one."""
    inside = tuple(f"{each}." for each in lists)
    found = {name: m for name, m in stacked(outline).items() if name.startswith(inside) and reason_against(m) is None}
    taken = [module for name, module in found.items() if ignored(settings.ignore, name) is None]
    return sum(p.numel() for module in taken for p in module.parameters(recurse=False) if p.ndim == 3)


def _unstacks(outline: nn.Module, layout: str) -> bool:
    """Whether `unstack_experts_for_format_` unstacks the model's experts for a format."""
    return layout == epiloq_modules.METHOD or any(is_replaced(module, layout) for module in outline.modules())


def _cannot(settings: Settings, layers: Mapping[str, nn.Linear], unfit: Mapping[str, str], layout: str) -> str:
    """The message that a format cannot represent layers, with options that select another one."""
    why, _ = Counter(unfit.values()).most_common(1)[0]
    name = next(name for name, reason in unfit.items() if reason == why)
    formats = [
        f"--format {other}"
        for other, refused in refusals(settings.scheme, settings.symmetric).items()
        if refused is None and _part(layers, _unfit(settings, layers, other, settings.scheme)) <= FEW
    ]
    schemes = [
        f"--scheme {other} --format {layout}"
        for other in TARGETS
        if other != settings.scheme and other.split("-")[0] == settings.scheme.split("-")[0]
        if refusals(other, settings.symmetric)[layout] is None
        and _part(layers, _unfit(settings, layers, layout, other)) <= FEW
    ]
    message = f"{layout} cannot hold {len(unfit)} of {len(layers)} layers, {name} among them: {why}"
    if settings.layout is None:
        return f"{message}; for {layout} type {' or '.join(schemes)}" if schemes else message
    return f"{message}; type {' or '.join([*formats, *schemes])} instead" if formats or schemes else message
