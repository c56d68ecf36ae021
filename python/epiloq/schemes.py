"""Table of quantisation schemes, and `quantize_`, which applies one to a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import nn

from epiloq.layer_filter import Filter, check_callable
from epiloq.models.choice import by_reason
from epiloq.models.conversion import quantize_layers
from epiloq.models.in_memory import check_not_opened_quantised, describe_on_saving
from epiloq.nn import (
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    Fp8WeightOnlyLinear,
    Int8Conv2d,
    Int8Linear,
    OnlineQuantLinear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyConv2d,
    WeightOnlyLinear,
)
from epiloq.observers import OBSERVERS
from epiloq.vocabulary import planned, quantize_vocabulary_

# Each has from_linear and check_convertible, called with a linear layer and a scheme's options.
QuantisedLinear: TypeAlias = (
    Fp4Linear
    | Fp8BlockLinear
    | Fp8Linear
    | Fp8WeightOnlyLinear
    | Int8Linear
    | OnlineQuantLinear
    | W4A8Fp4Linear
    | W4A8Linear
    | WeightOnlyLinear
)
# The same with from_conv2d.
QuantisedConv2d: TypeAlias = Int8Conv2d | WeightOnlyConv2d


@dataclass(frozen=True)
class Scheme:
    """Conversion of a layer by `quantize_`: ``module.from_linear(linear, **options)``, or ``from_conv2d``.

    A static scheme, whose options contain ``activation="static"``, also passes ``input_scale`` and
    ``input_zero_point`` from calibration.
    """

    name: str
    description: str
    module: type[QuantisedLinear] | type[QuantisedConv2d]
    options: Mapping[str, Any]

    @property
    def static(self) -> bool:
        """Whether the range of each layer's inputs must be calibrated."""
        return self.options.get("activation") == "static" or self.module is Int8Conv2d

    @property
    def layer(self) -> type[nn.Module]:
        """Class of the layers that the scheme replaces: ``nn.Linear`` or ``nn.Conv2d``."""
        return nn.Conv2d if issubclass(self.module, (Int8Conv2d, WeightOnlyConv2d)) else nn.Linear

    def check_convertible(self, layer: nn.Module) -> None:
        """Raise ValueError unless `convert` supports the layer."""
        self.module.check_convertible(layer, **self.options)

    def convert(self, layer: nn.Module, **seen: Any) -> nn.Module:
        """Convert a float layer, given calibration results for its inputs."""
        if issubclass(self.module, (Int8Conv2d, WeightOnlyConv2d)):
            return self.module.from_conv2d(cast(nn.Conv2d, layer), **self.options, **seen)
        return self.module.from_linear(cast(nn.Linear, layer), **self.options, **seen)


def _weight_only(name: str, bits: int, group_size: int) -> Scheme:
    # 4 bits cost nearly twice as much without zero points (SmolLM2-135M in groups of 32: 38 and 21 % more perplexity);
    # 8 bits lose little either way.
    zeros, suffix = ("none", "") if bits == 8 else ("zero", ", with zero points")
    grid = "output channel" if group_size == -1 else f"group of {group_size} input features"
    description = f"int{bits} weights per {grid}{suffix}, rounded to nearest; floating-point activations"
    return Scheme(name, description, WeightOnlyLinear, {"bits": bits, "group_size": group_size, "zeros": zeros})


def _w4a8(name: str, activation: str, kind: str) -> Scheme:
    description = (
        f"int4 weights per group of 128 input features, symmetric; {kind} activations per token, scaled at run time"
    )
    options = {"activation": activation, "group_size": 128, "zeros": "none"}
    return Scheme(name, description, W4A8Linear, options)


def _fp4(name: str, format: str, activation: str | None) -> Scheme:
    block = {
        "mxfp4": "block of 32 input features, scales of powers of two",
        "nvfp4": "block of 16 input features, FP8 scales",
    }[format]
    weights = f"FP4 (E2M1) weights per {block}"
    if activation is None:
        return Scheme(name, f"{weights}; floating-point activations", Fp4Linear, {"format": format})
    description = f"{weights}; FP8 activations per token, scaled at run time"
    return Scheme(name, description, W4A8Fp4Linear, {"format": format, "activation": activation})


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
        "4-bit weights in blocks of 128 with offsets; int8 activations in the same blocks, scaled at run time",
        OnlineQuantLinear,
        {"bits": 4, "group_size": 128, "symmetric": False},
    ),
    Scheme(
        "w4a8-block-g32",
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
    Scheme(
        "w8a16-fp8",
        "FP8 weights per channel; floating-point activations",
        Fp8WeightOnlyLinear,
        {"block": (1, -1)},
    ),
    Scheme(
        "w8a16-fp8-block",
        "FP8 weights per block of 128 x 128; floating-point activations",
        Fp8WeightOnlyLinear,
        {"block": (128, 128)},
    ),
    _w4a8("w4a8-fp8", "fp8", "FP8"),
    _w4a8("w4a8-int8", "int8", "int8"),
    _fp4("w4a8-mxfp4-fp8", "mxfp4", "fp8"),
    _fp4("w4a8-nvfp4-fp8", "nvfp4", "fp8"),
    _weight_only("w8a16", 8, -1),
    _weight_only("w4a16-g128", 4, 128),
    _weight_only("w4a16-g64", 4, 64),
    _weight_only("w4a16-g32", 4, 32),
    _weight_only("w4a16", 4, -1),
    _fp4("w4a16-mxfp4", "mxfp4", None),
    _fp4("w4a16-nvfp4", "nvfp4", None),
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
    """Names of the schemes for ``nn.Linear`` or ``nn.Conv2d``; ``SCHEMES[name].description`` describes each."""
    return tuple(name for name, scheme in SCHEMES.items() if scheme.layer is layer)


def quantize_(
    model: nn.Module,
    scheme: str | None,
    filter_fn: Filter | None = None,
    *,
    head: str | None = None,
    embedding: str | None = None,
    ignore: str | Sequence[str] = (),
    calibrate: Callable[[nn.Module], object] | None = None,
    observer: str = "min-max",
) -> nn.Module:
    """Replace linear layers (or convolutions) of `model` by quantised ones, in place, and return `model`.

    scheme
        One of ``epiloq.schemes.available()``; for convolutions, ``available(torch.nn.Conv2d)``. None quantises only
        `head` and `embedding`.
    filter_fn
        ``filter_fn(module, name) -> bool`` is called for every ``torch.nn.Linear`` (``torch.nn.Conv2d``), including
        subclasses, and for GPT-2's ``Conv1D``, which is treated as a transposed ``torch.nn.Linear``. By default a layer
        is quantised if it computes the same as its base class. Exceptions are an output head (called "lm_head",
        returned by the model's ``get_output_embeddings()``, or sharing its weight with a ``torch.nn.Embedding``),
        routers of experts, layers of PEFT's adapters, layers that a transformers model keeps in float32, layers that a
        module also holds in a list or attribute besides its children (there a replacement would never run, so
        `filter_fn` cannot choose them), and layers whose weight is read by the code of an enclosing module (if you
        select the feed-forward layers of ``torch.nn.TransformerEncoderLayer``, call
        ``torch.backends.mha.set_fastpath_enabled(False)``).
    head, embedding
        Schemes for the output head (as found by ``epiloq.vocabulary.find``) and the input embedding; None leaves them
        in floating point. The head supports every scheme without calibration. The embedding supports the weight-only
        ones and becomes an ``nn.QuantizedEmbedding``. If the model ties the two, either argument quantises both, to one
        stored tensor, and needs a weight-only scheme.
    ignore
        Layers to leave in floating point, regardless of `filter_fn`: names of layers or of modules that contain them,
        with shell wildcards ``*`` and ``?``, or regular expressions after "re:".
    calibrate
        ``calibrate(model)`` runs the float model on sample inputs, while the range of inputs of every selected layer is
        recorded. It is required by static schemes and not called by others. It runs in evaluation mode under
        ``torch.no_grad``; each module's mode is restored afterwards. One range covers all tokens: leave a layer out if
        a few of its input tokens are much larger than the rest (in language models, some down projections).
    observer
        How a static scheme determines the range of a layer's inputs: "min-max" (the whole range), "percentile" (99.99 %
        of the values) or "mse" (least squared error); see ``epiloq.observers``.

    For convolutions, call ``epiloq.quantize.int8_graph.batch_norm.fold_batch_norm_(model)`` before and
    ``epiloq.quantize.int8_graph.exchange.exchange_int8(model)`` afterwards to fold the operations between the layers.

    The stacked experts of a transformers model are treated as one linear layer per matrix and expert
    (``model.layers.0.mlp.experts.7.gate_proj``). They run as ``nn.GatedExperts`` if all of a layer's experts are
    quantised by "fp8-block", "fp8-token", "fp8" (then per token), "w8a8-int8", "w4a8-fp8", "w4a8-int8",
    "w4a8-mxfp4-fp8", "w4a8-nvfp4-fp8" or a weight-only scheme, and otherwise one by one in ``nn.ExpertLinears``. A
    warning names experts of other structures, which stay in floating point, and, unless `filter_fn` selected them,
    layers that cannot be quantised, whose weight is read by other code, that the model keeps in float32, or whose class
    computes something other than its base class.

    ``save_pretrained`` of a transformers model then writes the format "epiloq", which restores the same model.

    Layers are replaced one at a time, and each float weight is released before the next is quantised, if nothing
    else refers to it. A layer that appears under several names is quantised once. Hooks on a replaced layer are
    called by the quantised one.

    Raises ValueError, with the model unchanged: an unknown scheme; a static one without `calibrate`; no layer
    selected; `model` is itself a linear layer (it cannot be replaced in place; the classes of ``epiloq.nn`` have
    ``from_linear``); a pattern to ignore that matches nothing; a layer selected by `filter_fn` that cannot be
    converted, or no layer that can; NaN or infinity in the weight of a selected layer; a layer that calibration never
    reached, or reached with NaN or infinite inputs; a `head` or `embedding` with an unsupported scheme, that the model
    does not have, or that is also selected by `filter_fn`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quantize_: model: expected a torch.nn.Module, got {type(model).__name__}; transformers' from_pretrained "
            "or epiloq.formats.io.model.from_directory opens a directory"
        )
    if scheme is None and head is None and embedding is None:
        raise ValueError("quantize_: scheme: expected one, or a head or an embedding to quantise, got None")
    if scheme is not None and (not isinstance(scheme, str) or scheme not in SCHEMES):
        raise ValueError(f"quantize_: scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    check_callable(filter_fn, "quantize_: filter_fn", "filter_fn(module, name)")
    check_callable(calibrate, "quantize_: calibrate", "calibrate(model)")
    if not isinstance(ignore, Iterable):
        raise TypeError(f"quantize_: ignore: expected patterns of layers' names, got {type(ignore).__name__}")
    if not isinstance(observer, str) or observer not in OBSERVERS:
        raise ValueError(f"quantize_: observer: expected one of {', '.join(OBSERVERS)}, got {observer!r}")
    check_not_opened_quantised(model)
    vocabulary = planned(model, head, embedding, SCHEMES)
    left: dict[str, str] = {}
    if scheme is not None:
        left = quantize_layers(
            model, SCHEMES[scheme], filter_fn, ignore, calibrate, OBSERVERS[observer], vocabulary.names
        )
    if vocabulary.names:
        quantize_vocabulary_(model, vocabulary)
    describe_on_saving(model)
    if left:
        reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason(left).items())
        warnings.warn(f"quantize_: left in floating point: {reasons}", stacklevel=2)
    return model
