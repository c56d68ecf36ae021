"""Chooses the layers that `quantize_` replaces, and those that stay in floating point with a warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from epiloq.layer_filter import EXPECTED, HELD, Filter, Reason, check_patterns, ignored, reasons, reasons_against_conv2d
from epiloq.models.held_elsewhere import held_elsewhere
from epiloq.models.subclasses import why_quantised
from epiloq.weights.computed import NotFiniteError

_SHOWN = 3
_WORDS: dict[type[nn.Module], str] = {nn.Linear: "linear layer", nn.Conv2d: "convolution"}


def choose(
    model: nn.Module,
    kind: type[nn.Module],
    filter_fn: Filter | None,
    patterns: Sequence[str],
    check: Callable[[nn.Module], None],
) -> tuple[list[list[str]], dict[str, str]]:
    """Names of the layers to replace (all names of a layer in one list), which are convertible, and the layers left.

    The latter are layers by name with the reason why they stay in floating point, without those that are never replaced
    (output heads, routers). ``check(layer)`` raises ValueError for a layer that cannot be converted. Raises ValueError
    as documented for `quantize_`.
    """
    words = _WORDS[kind]
    if isinstance(model, kind):
        raise ValueError(
            f"quantize_: model: expected a module that contains {words}s, got a {words}; "
            f"use the from_{kind.__name__.lower()} of a class in epiloq.nn for it"
        )
    modules = list(model.named_modules(remove_duplicate=False))
    named = [(name, module) for name, module in modules if isinstance(module, kind)]
    check_patterns(patterns, [name for name, _ in [*named, *modules]], "quantize_: ignore")
    names, left = _asked_for(named, patterns, _reasons(model, filter_fn, kind))
    elsewhere = held_elsewhere(model) if filter_fn is not None else {}
    for layer, (name, *_) in list(names.items()):
        if id(layer) in elsewhere:
            raise ValueError(f"quantize_: layer {name!r}: cannot be replaced, as {elsewhere[id(layer)]}{HELD}")
        try:
            if reason := why_quantised(layer):
                raise ValueError(reason)
            check(layer)
        except ValueError as error:
            if filter_fn is not None or isinstance(error, NotFiniteError):
                raise ValueError(f"quantize_: layer {name!r}: {error}") from error
            left[name] = str(error)
            del names[layer]
    if filter_fn is None:
        left |= _scripted(modules, kind)
    if not names:
        skipped = "; ".join(f"{_some(names)}: {reason}" for reason, names in by_reason(left).items())
        raise ValueError(
            f"quantize_: filter_fn: expected at least one torch.nn.{kind.__name__} to be chosen, got none; "
            f"{skipped or 'layers that are quantised already do not count'}"
        )
    # Names only, so that the float layers are not kept alive.
    return list(names.values()), left


def _asked_for(
    named: Sequence[tuple[str, nn.Module]], patterns: Sequence[str], against: Reason
) -> tuple[dict[nn.Module, list[str]], dict[str, str]]:
    """Names of each layer that is neither ignored nor has a reason against it, and the unexpected reasons by name."""
    names: dict[nn.Module, list[str]] = {}
    left: dict[str, str] = {}
    for name, module in named:
        if ignored(patterns, name) is not None:
            continue
        reason = against(module, name)
        if reason is None:
            names.setdefault(module, []).append(name)
        elif reason and reason not in EXPECTED:
            left[name] = reason
    return names, left


def by_reason(left: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of layers by the reason why they stay in floating point."""
    found: dict[str, list[str]] = {}
    for name, reason in left.items():
        found.setdefault(reason, []).append(name)
    return found


def _some(names: Sequence[str]) -> str:
    """The first names and how many others there are."""
    more = len(names) - _SHOWN
    return f"{', '.join(names[:_SHOWN])}{f' and {more} more' if more > 0 else ''}"


def _scripted(modules: Sequence[tuple[str, nn.Module]], kind: type[nn.Module]) -> dict[str, str]:
    """Layers that TorchScript has compiled, by name, with the reason why they are not replaced."""
    scripted = (name for name, module in modules if getattr(module, "original_name", "") == kind.__name__)
    return dict.fromkeys(scripted, "TorchScript has compiled it: quantise the model before torch.jit.script")


def _reasons(model: nn.Module, filter_fn: Filter | None, kind: type[nn.Module]) -> Reason:
    """Return a function that tells why a layer is not replaced ("" if `filter_fn` excludes it), or None if it is."""
    if filter_fn is None:
        return reasons(model) if kind is nn.Linear else reasons_against_conv2d(model)
    return lambda module, name: None if filter_fn(module, name) else ""
