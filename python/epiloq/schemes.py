"""Quantisation schemes, as data, and `quantize_`, which applies one to a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import nn

from epiloq.layer_filter import Filter, default_filter
from epiloq.mixtures import apart, left_stacked, settle_
from epiloq.nn import (
    Fp8BlockLinear,
    Fp8Linear,
    Int8Conv2d,
    Int8Linear,
    OnlineQuantLinear,
    WeightOnlyConv2d,
    WeightOnlyLinear,
)
from epiloq.observers import OBSERVERS, Observer, input_quantizers

# Each has from_linear and check_convertible, called with a linear layer and a scheme's options.
QuantisedLinear: TypeAlias = Fp8BlockLinear | Fp8Linear | Int8Linear | OnlineQuantLinear | WeightOnlyLinear
# The same with from_conv2d.
QuantisedConv2d: TypeAlias = Int8Conv2d | WeightOnlyConv2d


@dataclass(frozen=True)
class Scheme:
    """What `quantize_` makes of a layer: ``module.from_linear(linear, **options)``, or ``from_conv2d``.

    A static scheme, whose options have ``activation="static"``, also passes ``input_scale`` and ``input_zero_point``,
    from calibration.
    """

    name: str
    description: str
    module: type[QuantisedLinear] | type[QuantisedConv2d]
    options: Mapping[str, Any]

    @property
    def static(self) -> bool:
        """Whether the range of each layer's inputs has to be seen beforehand."""
        return self.options.get("activation") == "static" or self.module is Int8Conv2d

    @property
    def layer(self) -> type[nn.Module]:
        """What the scheme replaces: ``nn.Linear`` or ``nn.Conv2d``."""
        return nn.Conv2d if issubclass(self.module, (Int8Conv2d, WeightOnlyConv2d)) else nn.Linear

    def convert(self, layer: nn.Module, **seen: Any) -> nn.Module:
        """The quantised layer of a float one, with what calibration saw of its inputs."""
        if issubclass(self.module, (Int8Conv2d, WeightOnlyConv2d)):
            return self.module.from_conv2d(cast(nn.Conv2d, layer), **self.options, **seen)
        return self.module.from_linear(cast(nn.Linear, layer), **self.options, **seen)


def _weight_only(name: str, bits: int, group_size: int) -> Scheme:
    # 4 bits cost nearly twice as much without zero points (SmolLM2-135M in groups of 32: 38 and 21 % more perplexity);
    # 8 bits lose little either way.
    zeros, said = ("none", "") if bits == 8 else ("zero", ", with zero points")
    grid = "output channel" if group_size == -1 else f"group of {group_size} input features"
    description = f"int{bits} weights per {grid}{said}, rounded to nearest; floating-point activations"
    return Scheme(name, description, WeightOnlyLinear, {"bits": bits, "group_size": group_size, "zeros": zeros})


_TABLE = (
    Scheme(
        "w8a8-int8",
        "int8 weights per channel; int8 activations per token, symmetric, scaled at run time",
        Int8Linear,
        {"activation": "dynamic", "symmetric": True},
    ),
    Scheme(
        "w8a8-int8-azp",
        "int8 weights per channel; int8 activations per token with a zero point, scaled at run time",
        Int8Linear,
        {"activation": "dynamic", "symmetric": False},
    ),
    Scheme(
        "w8a8-int8-static",
        "int8 weights per channel; int8 activations per tensor with a zero point, scaled by calibration",
        Int8Linear,
        {"activation": "static", "symmetric": False},
    ),
    Scheme(
        "w8a8-block",
        "int8 weights in blocks of 128; int8 activations in the same blocks with offsets, scaled at run time",
        OnlineQuantLinear,
        {"bits": 8, "group_size": 128, "symmetric": True},
    ),
    Scheme(
        "w4a8-block",
        "4-bit weights in blocks of 32 with offsets; int8 activations in the same blocks, scaled at run time",
        OnlineQuantLinear,
        {"bits": 4, "group_size": 32, "symmetric": False},
    ),
    Scheme(
        "fp8",
        "FP8 weights per tensor; FP8 activations per tensor, scaled at run time",
        Fp8Linear,
        {"activation": "tensor", "weight": "tensor"},
    ),
    Scheme(
        "fp8-token",
        "FP8 weights per channel; FP8 activations per token, scaled at run time",
        Fp8Linear,
        {"activation": "token", "weight": "channel"},
    ),
    Scheme(
        "fp8-block",
        "FP8 weights per block of 128 x 128; FP8 activations per group of 128 in a token, scaled at run time",
        Fp8BlockLinear,
        {},
    ),
    _weight_only("w8a16", 8, -1),
    _weight_only("w4a16-g128", 4, 128),
    _weight_only("w4a16-g64", 4, 64),
    _weight_only("w4a16-g32", 4, 32),
    Scheme(
        "conv-w8a8-int8",
        "convolutions: int8 weights per channel; int8 activations per tensor with a zero point, scaled by calibration",
        Int8Conv2d,
        {},
    ),
    Scheme(
        "conv-w8a16",
        "convolutions: int8 weights per output channel, rounded to nearest; floating-point activations",
        WeightOnlyConv2d,
        {"bits": 8, "group_size": -1},
    ),
    Scheme(
        "conv-w4a16",
        "convolutions: int4 weights per block of 32 input channels, with zero points, rounded to nearest; "
        "floating-point activations",
        WeightOnlyConv2d,
        {"bits": 4, "group_size": 32, "zeros": "zero"},
    ),
)
SCHEMES = {scheme.name: scheme for scheme in _TABLE}


def available(layer: type[nn.Module] = nn.Linear) -> tuple[str, ...]:
    """Names that `quantize_` takes for ``nn.Linear`` or ``nn.Conv2d``; ``SCHEMES[name].description`` says what each
    does."""
    return tuple(name for name, scheme in SCHEMES.items() if scheme.layer is layer)


def quantize_(
    model: nn.Module,
    scheme: str,
    filter_fn: Filter | None = None,
    *,
    calibrate: Callable[[nn.Module], object] | None = None,
    observer: str = "min-max",
) -> nn.Module:
    """Replace linear layers of `model`, or convolutions, by quantised ones, in place, and return `model`.

    scheme
        One of ``epiloq.schemes.available()``; for convolutions, ``available(torch.nn.Conv2d)``.
    filter_fn
        ``filter_fn(module, name) -> bool`` is asked about every ``torch.nn.Linear`` (``torch.nn.Conv2d``), subclasses
        included. Without it a layer is taken if its type is exactly that, except an output head (called "lm_head",
        given by the model's ``get_output_embeddings()``, or sharing its weight with a ``torch.nn.Embedding``) and
        the feed-forward layers directly in a ``torch.nn.TransformerEncoderLayer``, whose fused path reads their
        float weights (to take those, call ``torch.backends.mha.set_fastpath_enabled(False)`` as well), and routers
        of experts.
    calibrate
        ``calibrate(model)`` runs the float model on sample inputs, while the smallest and largest input of every
        chosen layer are recorded. Static schemes need it, the others do not call it. It runs under
        ``torch.no_grad``; put the model in eval mode first. One range serves all tokens: where a few of them are
        far larger than the rest (in language models the inputs of some down projections), leave the layer out.
    observer
        What range of a layer's inputs a static scheme takes: "min-max" (all of it), "percentile" (99.99 % of the
        values) or "mse" (the one with the least squared error); see ``epiloq.observers``.

    For convolutions, ``epiloq.quantize.int8_graph.batch_norm.fold_batch_norm_(model)`` before and
    ``epiloq.quantize.int8_graph.exchange.exchange_int8(model)`` after take what lies between the layers into them.

    The stacked experts of a model in transformers count as linear layers, one for each matrix of each expert
    (``model.layers.0.mlp.experts.7.gate_proj``), and run as ``nn.GatedExperts`` where all of a layer's are quantised by
    "fp8-block", "fp8-token", "fp8" (by the token, then) or "w8a8-int8", else one by one in ``nn.ExpertLinears``. A
    warning names experts of other structures, which stay in floating point.

    Layers are replaced one at a time, each float weight released before the next is quantised, as far as nothing
    else holds it. A layer that appears under several names is quantised once. Hooks on a replaced layer are not
    carried over.

    Raises ValueError, with the model untouched: an unknown scheme; a static one without `calibrate`; nothing
    chosen; `model` itself a linear layer (there is nothing to replace it in; ``epiloq.nn`` has classes with
    ``from_linear``); a layer that cannot be converted; a chosen layer that calibration never reached, or reached with
    NaN or infinite inputs.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize_: scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    if observer not in OBSERVERS:
        raise ValueError(f"quantize_: observer: expected one of {', '.join(OBSERVERS)}, got {observer!r}")
    chosen = SCHEMES[scheme]
    if chosen.static and calibrate is None:
        raise ValueError(
            f"quantize_: calibrate: scheme {scheme!r} needs a function that runs the model on sample inputs, "
            "as in calibrate=lambda model: model(inputs); got None"
        )
    with apart(model) if chosen.layer is nn.Linear else nullcontext():
        _convert(model, chosen, filter_fn, calibrate, OBSERVERS[observer])
    left = left_stacked(model) if chosen.layer is nn.Linear and filter_fn is None else {}
    for name, reason in left.items():
        warnings.warn(f"quantize_: {name}: its experts stay in floating point: {reason}", stacklevel=2)
    return model


def _convert(
    model: nn.Module,
    chosen: Scheme,
    filter_fn: Filter | None,
    calibrate: Callable[[nn.Module], object] | None,
    observer: Callable[[], Observer],
) -> None:
    """`quantize_`, of a model whose experts are taken apart."""
    groups = _choose(model, filter_fn, chosen)
    inputs: list[dict[str, Any]] = [{}] * len(groups)
    if chosen.static and calibrate is not None:
        symmetric = chosen.options.get("symmetric", False)
        inputs = input_quantizers(
            {names[0]: model.get_submodule(names[0]) for names in groups},
            lambda: calibrate(model),
            observer,
            symmetric=symmetric,
        )
    for names, seen in zip(groups, inputs, strict=True):
        quantised = chosen.convert(model.get_submodule(names[0]), **seen)
        for name in names:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, quantised)
        # As soon as a layer's experts are complete, their float weights are released.
        settle_(model, names[0].rpartition(".")[0].rpartition(".")[0])


def _choose(model: nn.Module, filter_fn: Filter | None, scheme: Scheme) -> list[list[str]]:
    """Names of the layers to replace, those of one layer together, each known to be convertible."""
    kind, words = (nn.Linear, "linear layer") if scheme.layer is nn.Linear else (nn.Conv2d, "convolution")
    if isinstance(model, kind):
        raise ValueError(
            f"quantize_: model: expected a module that contains {words}s, got a {words}; "
            f"use the from_{kind.__name__.lower()} of a class in epiloq.nn for it"
        )
    takes = filter_fn or (default_filter(model) if kind is nn.Linear else _is_conv2d)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind) and takes(module, name):
            names.setdefault(module, []).append(name)
    if not names:
        raise ValueError(
            f"quantize_: filter_fn: expected at least one torch.nn.{kind.__name__} to be chosen, got none; "
            "layers that are quantised already do not count"
        )
    for module, (name, *_) in names.items():
        try:
            scheme.module.check_convertible(module, **scheme.options)
        except ValueError as error:
            raise ValueError(f"quantize_: layer {name!r}: {error}") from error
    # Names alone, so that the float layers are not kept alive.
    return list(names.values())


def _is_conv2d(module: nn.Module, _: str) -> bool:
    return type(module) is nn.Conv2d
