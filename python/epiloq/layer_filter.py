"""Chooses the layers that are quantised by default, and excludes layers by patterns."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from epiloq.models.held_elsewhere import held_elsewhere
from epiloq.models.mixtures import routers
from epiloq.models.parent_reads import read_by_parents
from epiloq.models.subclasses import is_plain, is_plain_conv2d, why_not_plain
from epiloq.weights.tensor_checks import Identity, identity

Filter = Callable[[nn.Module, str], bool]
Reason = Callable[[nn.Module, str], "str | None"]
REGEX, READS, HELD = "re:", " reads its weight", " holds it in a list or attribute besides its children"
ROUTER, HEAD, TIED = "a router of experts", "the output head", "it shares its weight with an embedding"
ADAPTER = "a layer of an adapter"
EXPECTED = frozenset({ROUTER, HEAD, TIED, ADAPTER})
"""Reasons that are not reported."""
_WRAPPERS = {
    "peft.tuners.tuners_utils": ("BaseTunerLayer", "base_layer"),
    "peft.utils.other": ("AuxiliaryTrainingWrapper", "original_module"),
}
"""Modules of PEFT, whose adapters stay in floating point: a class that wraps a layer, and the child that is the layer
of the model."""
LAZY = "its lazy weight has no shape yet: run the model once before quantising it"


def check_callable(given: object, where: str, form: str) -> None:
    """Raise TypeError, which names the argument, unless it is None or can be called in the `form` that is shown."""
    if given is not None and not callable(given):
        raise TypeError(f"{where}: expected a function to be called as {form}, got {type(given).__name__}")


def default_filter(model: nn.Module) -> Filter:
    """Default for the ``filter_fn`` of `quantize_`, whose docstring describes it."""
    reason = reasons(model)
    return lambda module, name: isinstance(module, nn.Linear) and reason(module, name) is None


def reasons(model: nn.Module) -> Reason:
    """Reasons why linear layers of a model stay in floating point by default, by name."""
    modules = list(model.modules())
    embedded = {weight_identity(module) for module in modules if isinstance(module, nn.Embedding)}
    left_out = {held: f"{holder}{HELD}" for held, holder in held_elsewhere(model).items()}
    left_out |= {id(router): ROUTER for router in routers(model).values()}
    for name, parent in read_by_parents(model).items():
        left_out[id(model.get_submodule(name))] = f"{parent}{READS}"
    output_embeddings = getattr(model, "get_output_embeddings", None)
    if output_embeddings is not None:
        left_out[id(output_embeddings())] = HEAD
    left_out |= {id(layer): ADAPTER for layer in adapter_layers(model)}
    kept = kept_in_float32(model)

    def reason(module: nn.Module, name: str) -> str | None:
        if id(module) in left_out:
            return left_out[id(module)]
        if name.rpartition(".")[2] == "lm_head":
            return HEAD
        if isinstance(getattr(module, "weight", None), nn.parameter.UninitializedParameter):
            return LAZY
        if not is_plain(module):
            return _no_plain(module, "linear layer")
        if kept(f"{name}.weight"):
            return "the model keeps it in float32"
        if weight_identity(module) in embedded:
            return TIED
        return None

    return reason


def reasons_against_conv2d(model: nn.Module) -> Reason:
    """Reasons why convolutions of a model stay in floating point by default."""
    elsewhere, added = held_elsewhere(model), {id(layer) for layer in adapter_layers(model)}

    def reason(module: nn.Module, name: str) -> str | None:
        if id(module) in elsewhere:
            return f"{elsewhere[id(module)]}{HELD}"
        if id(module) in added:
            return ADAPTER
        if isinstance(getattr(module, "weight", None), nn.parameter.UninitializedParameter):
            return LAZY
        return None if is_plain_conv2d(module) else _no_plain(module, "convolution")

    return reason


def _no_plain(module: nn.Module, kind: str) -> str:
    if "forward" in vars(module):
        return "its forward was replaced, as by hooks of accelerate"
    return why_not_plain(module, kind)


def kept_in_float32(model: Any, dtype: torch.dtype = torch.float16) -> Callable[[str], bool]:
    """Whether a transformers model of another type keeps a tensor with this name in float32."""
    names = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        names |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    if not names or dtype not in (torch.float16, torch.bfloat16):
        return lambda name: False
    pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(names)))
    return lambda name: pattern.search(name) is not None


def ignored(patterns: Sequence[str], name: str) -> str | None:
    """Return the first pattern that matches a layer's name, or None.

    A pattern is the name of a layer or of a module that contains it, with shell wildcards ``*`` and ``?``, or, after
    ``re:``, a regular expression for the beginning of the name.
    """
    return next((pattern for pattern in patterns if _matches(pattern, name)), None)


def check_patterns(patterns: Iterable[str], names: Sequence[str], where: str) -> None:
    """Raise ValueError for an invalid regular expression or a pattern that matches no layer, TypeError for no text."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{where}: expected patterns of layers' names, got {type(pattern).__name__}")
        if pattern in ("", REGEX):
            raise ValueError(f"{where}: expected patterns of layers' names, got an empty one ({pattern!r})")
        try:
            found = any(_matches(pattern, name) for name in names)
        except re.error as error:
            raise ValueError(f"{where}: {pattern!r}: expected a regular expression: {error}") from error
        if not found:
            example = f", as {names[0]!r}" if names else ""
            raise ValueError(f"{where}: expected patterns of layers' names{example}, but no layer matches {pattern!r}")


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def adapter_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that PEFT's tuners, and the copies that it trains (``modules_to_save``), add to a model's layers."""
    # A model has none unless PEFT has been imported.
    loaded = [(getattr(sys.modules.get(module), name, None), base) for module, (name, base) in _WRAPPERS.items()]
    wrappers = [(kind, base) for kind, base in loaded if isinstance(kind, type)]
    for module in model.modules():
        for kind, base in wrappers:
            if isinstance(module, kind):
                for name, child in module.named_children():
                    yield from () if name == base else child.modules()


def weight_identity(module: nn.Module) -> Identity:
    """Equal for layers of one weight; of a weight that is computed when it is read, for the layer alone."""
    if parametrize.is_parametrized(module, "weight"):
        return "computed", id(module)
    weight = getattr(module, "weight", None)
    return identity(weight) if isinstance(weight, Tensor) else ("without a weight", id(module))
