"""Quantisation schemes, as data, and `quantize_`, which applies one to a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import nn

from epiloq.layer_filter import Filter
from epiloq.models.conversion import quantize_layers
from epiloq.models.in_memory import describe_on_saving
from epiloq.nn import (
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    Fp8WeightOnlyLinear,
    Int8Conv2d,
    Int8Linear,
    OnlineQuantLinear,
    W4A8Linear,
    WeightOnlyConv2d,
    WeightOnlyLinear,
)
from epiloq.observers import OBSERVERS
from epiloq.vocabulary import planned, quantize_ends_

# Each has from_linear and check_convertible, called with a linear layer and a scheme's options.
QuantisedLinear: TypeAlias = (
    Fp4Linear
    | Fp8BlockLinear
    | Fp8Linear
    | Fp8WeightOnlyLinear
    | Int8Linear
    | OnlineQuantLinear
    | W4A8Linear
    | WeightOnlyLinear
)
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

    def check_convertible(self, layer: nn.Module) -> None:
        """Raise ValueError unless `convert` can take a layer as it is."""
        self.module.check_convertible(layer, **self.options)

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


def _w4a8(name: str, activation: str, said: str) -> Scheme:
    description = (
        f"int4 weights per group of 128 input features, symmetric; {said} activations per token, scaled at run time"
    )
    options = {"activation": activation, "group_size": 128, "zeros": "none"}
    return Scheme(name, description, W4A8Linear, options)


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
    _weight_only("w8a16", 8, -1),
    _weight_only("w4a16-g128", 4, 128),
    _weight_only("w4a16-g64", 4, 64),
    _weight_only("w4a16-g32", 4, 32),
    Scheme(
        "w4a16-mxfp4",
        "FP4 (E2M1) weights per block of 32 input features, scales of powers of two; floating-point activations",
        Fp4Linear,
        {"format": "mxfp4"},
    ),
    Scheme(
        "w4a16-nvfp4",
        "FP4 (E2M1) weights per block of 16 input features, FP8 scales; floating-point activations",
        Fp4Linear,
        {"format": "nvfp4"},
    ),
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
    scheme: str | None,
    filter_fn: Filter | None = None,
    *,
    head: str | None = None,
    embedding: str | None = None,
    ignore: str | Sequence[str] = (),
    calibrate: Callable[[nn.Module], object] | None = None,
    observer: str = "min-max",
) -> nn.Module:
    """Replace linear layers of `model`, or convolutions, by quantised ones, in place, and return `model`.

    scheme
        One of ``epiloq.schemes.available()``; for convolutions, ``available(torch.nn.Conv2d)``. None leaves them as
        they are, for `head` and `embedding` alone.
    filter_fn
        ``filter_fn(module, name) -> bool`` is asked about every ``torch.nn.Linear`` (``torch.nn.Conv2d``), subclasses
        included, and of linear layers also about GPT-2's ``Conv1D``, as a transposed ``torch.nn.Linear``. Without it
        a layer is taken if it computes what its base class does, except an output head (called "lm_head", given by
        the model's ``get_output_embeddings()``, or sharing its weight with a ``torch.nn.Embedding``), routers of
        experts, layers that a model of transformers keeps in float32, and layers whose weight the code of a module
        around them reads (for the feed-forward layers of ``torch.nn.TransformerEncoderLayer``, call
        ``torch.backends.mha.set_fastpath_enabled(False)`` if you choose them).
    head, embedding
        Schemes for the output head (as ``epiloq.vocabulary.find`` has it) and the input embedding; None leaves them in
        floating point. The head takes every scheme without calibration, the embedding the weight-only ones: it becomes
        a ``nn.QuantizedEmbedding``. A model that ties them has one weight for both: naming either quantises both, to
        one stored tensor, by a weight-only scheme.
    ignore
        Layers to leave in floating point, whatever `filter_fn` says: names of layers or of modules that hold them, with
        ``*`` and ``?`` as a shell matches file names, or regular expressions after "re:".
    calibrate
        ``calibrate(model)`` runs the float model on sample inputs, while the smallest and largest input of every
        chosen layer are recorded. Static schemes need it, the others do not call it. It runs in evaluation mode
        under ``torch.no_grad``; then each module has its own mode again. One range covers all tokens: where a few of
        them are far larger than the rest (in language models the inputs of some down projections), leave the layer
        out.
    observer
        What range of a layer's inputs a static scheme takes: "min-max" (all of it), "percentile" (99.99 % of the
        values) or "mse" (the one with the least squared error); see ``epiloq.observers``.

    For convolutions, ``epiloq.quantize.int8_graph.batch_norm.fold_batch_norm_(model)`` before and
    ``epiloq.quantize.int8_graph.exchange.exchange_int8(model)`` after take what lies between the layers into them.

    The stacked experts of a model in transformers count as linear layers, one for each matrix of each expert
    (``model.layers.0.mlp.experts.7.gate_proj``), and run as ``nn.GatedExperts`` where all of a layer's are quantised by
    "fp8-block", "fp8-token", "fp8" (by the token, then), "w8a8-int8", "w4a8-fp8", "w4a8-int8" or a weight-only scheme,
    else one by one in ``nn.ExpertLinears``. A warning names experts of other structures, which stay in floating point,
    and, unless `filter_fn` chose them, layers that cannot be quantised, whose weight other code reads, that the model
    keeps in float32, or whose class computes something else than its base class.

    ``save_pretrained`` of a model of transformers then writes the format "epiloq", which opens as it was saved.

    Layers are replaced one at a time, each float weight released before the next is quantised, as far as nothing
    else holds it. A layer that appears under several names is quantised once. Hooks on a replaced layer are not
    carried over.

    Raises ValueError, with the model untouched: an unknown scheme; a static one without `calibrate`; nothing
    chosen; `model` itself a linear layer (there is nothing to replace it in; ``epiloq.nn`` has classes with
    ``from_linear``); a pattern to ignore that matches nothing; a layer chosen by `filter_fn` that cannot be converted,
    or no layer that can; NaN or infinity in the weight of a chosen layer; one that calibration never reached, or
    reached with NaN or infinite inputs; a `head` or `embedding` of a scheme that it cannot have, of a model that has
    none, or also chosen by `filter_fn`.
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
    if observer not in OBSERVERS:
        raise ValueError(f"quantize_: observer: expected one of {', '.join(OBSERVERS)}, got {observer!r}")
    ends = planned(model, head, embedding, SCHEMES)
    left: dict[str, str] = {}
    if scheme is not None:
        left = quantize_layers(model, SCHEMES[scheme], filter_fn, ignore, calibrate, OBSERVERS[observer], ends.names)
    if ends.names:
        quantize_ends_(model, ends)
    describe_on_saving(model)
    if left:
        said = "; ".join(f"{name} ({reason})" for name, reason in left.items())
        warnings.warn(f"quantize_: left in floating point: {said}", stacklevel=2)
    return model
