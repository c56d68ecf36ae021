"""Quantisation schemes, as data, and `quantize_`, which applies one to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear, OnlineQuantLinear, WeightOnlyLinear

Filter = Callable[[nn.Module, str], bool]


# Each has from_linear and check_convertible, called with a linear layer and a scheme's options.
QuantisedLinear: TypeAlias = Fp8BlockLinear | Fp8Linear | Int8Linear | OnlineQuantLinear | WeightOnlyLinear


@dataclass(frozen=True)
class Scheme:
    """What `quantize_` makes of a linear layer: ``module.from_linear(linear, **options)``.

    A static scheme, whose options have ``activation="static"``, also passes ``input_scale`` and ``input_zero_point``,
    from calibration.
    """

    name: str
    description: str
    module: type[QuantisedLinear]
    options: Mapping[str, Any]

    @property
    def static(self) -> bool:
        """Whether the range of each layer's inputs has to be seen beforehand."""
        return self.options.get("activation") == "static"


def _weight_only(name: str, bits: int, group_size: int) -> Scheme:
    grid = "output channel" if group_size == -1 else f"group of {group_size} input features"
    description = f"int{bits} weights per {grid}, rounded to nearest; floating-point activations"
    return Scheme(name, description, WeightOnlyLinear, {"bits": bits, "group_size": group_size})


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
)
SCHEMES = {scheme.name: scheme for scheme in _TABLE}


def available() -> tuple[str, ...]:
    """Names that `quantize_` takes; ``SCHEMES[name].description`` says what each does."""
    return tuple(SCHEMES)


def quantize_(
    model: nn.Module,
    scheme: str,
    filter_fn: Filter | None = None,
    *,
    calibrate: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Replace linear layers of `model` by quantised ones, in place, and return `model`.

    scheme
        One of ``epiloq.schemes.available()``.
    filter_fn
        ``filter_fn(module, name) -> bool`` is asked about every ``torch.nn.Linear``, subclasses included. Without
        it a layer is taken if its type is exactly ``torch.nn.Linear``, except an output head (called "lm_head",
        given by the model's ``get_output_embeddings()``, or sharing its weight with a ``torch.nn.Embedding``) and
        the feed-forward layers directly in a ``torch.nn.TransformerEncoderLayer``, whose fused path reads their
        float weights (to take those, call ``torch.backends.mha.set_fastpath_enabled(False)`` as well).
    calibrate
        ``calibrate(model)`` runs the float model on sample inputs, while the smallest and largest input of every
        chosen layer are recorded. Static schemes need it, the others do not call it. It runs under
        ``torch.no_grad``; put the model in eval mode first. One range serves all tokens: where a few of them are
        far larger than the rest (in language models the inputs of some down projections), leave the layer out.

    Layers are replaced one at a time, each float weight released before the next is quantised, as far as nothing
    else holds it. A layer that appears under several names is quantised once. Hooks on a replaced layer are not
    carried over.

    Raises ValueError, with the model untouched: an unknown scheme; a static one without `calibrate`; nothing
    chosen; `model` itself a linear layer (there is nothing to replace it in; ``epiloq.nn`` has classes with
    ``from_linear``); a layer that cannot be converted; a chosen layer that calibration never reached, or reached with
    NaN or infinite inputs.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize_: scheme: expected one of {', '.join(available())}, got {scheme!r}")
    chosen = SCHEMES[scheme]
    if chosen.static and calibrate is None:
        raise ValueError(
            f"quantize_: calibrate: scheme {scheme!r} needs a function that runs the model on sample inputs, "
            "as in calibrate=lambda model: model(inputs); got None"
        )
    groups = _choose(model, filter_fn, chosen)
    inputs: list[dict[str, Any]] = [{}] * len(groups)
    if chosen.static and calibrate is not None:
        inputs = _calibrated(model, [names[0] for names in groups], chosen.options["symmetric"], calibrate)
    for names, seen in zip(groups, inputs, strict=True):
        quantised = chosen.module.from_linear(_linear(model, names[0]), **chosen.options, **seen)
        for name in names:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, quantised)
    return model


def _choose(model: nn.Module, filter_fn: Filter | None, scheme: Scheme) -> list[list[str]]:
    """Names of the linear layers to replace, those of one layer together, each known to be convertible."""
    if isinstance(model, nn.Linear):
        raise ValueError(
            "quantize_: model: expected a module that contains linear layers, got a linear layer; "
            "use the from_linear of a class in epiloq.nn for it"
        )
    takes = default_filter(model) if filter_fn is None else filter_fn
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) and takes(module, name):
            names.setdefault(module, []).append(name)
    if not names:
        raise ValueError(
            "quantize_: filter_fn: expected at least one torch.nn.Linear to be chosen, got none; "
            "layers that are quantised already do not count"
        )
    for module, (name, *_) in names.items():
        try:
            scheme.module.check_convertible(module, **scheme.options)
        except ValueError as error:
            raise ValueError(f"quantize_: layer {name!r}: {error}") from error
    # Names alone, so that the float layers are not kept alive.
    return list(names.values())


def _linear(model: nn.Module, name: str) -> nn.Linear:
    return cast(nn.Linear, model.get_submodule(name))  # _choose names linear layers only.


def default_filter(model: nn.Module) -> Filter:
    """What `quantize_` takes without a ``filter_fn``; its docstring says which layers that are."""
    modules = list(model.modules())
    embedded = {_identity(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    encoders = (module for module in modules if isinstance(module, nn.TransformerEncoderLayer))
    left_out = {id(child) for encoder in encoders for child in encoder.children()}
    output_embeddings = getattr(model, "get_output_embeddings", None)
    if output_embeddings is not None:
        left_out.add(id(output_embeddings()))

    def takes(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or id(module) in left_out or name.rpartition(".")[2] == "lm_head":
            return False
        return _identity(module.weight) not in embedded

    return takes


def _identity(weight: Tensor) -> tuple[object, int]:
    """Equal for weights that are one parameter or start at one address (tied through ``.data``, say)."""
    if weight.is_meta or weight.numel() == 0 or isinstance(weight, nn.parameter.UninitializedParameter):
        return "object", id(weight)
    return weight.device, weight.data_ptr()


class _Range:
    """Forward pre-hook that keeps the smallest and the largest value of a layer's inputs, on their device."""

    def __init__(self) -> None:
        self.ends: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        if x.numel() == 0:
            return
        seen = torch.stack(x.detach().aminmax()).float()
        if self.ends is not None:
            seen = torch.stack((torch.minimum(self.ends[0], seen[0]), torch.maximum(self.ends[1], seen[1])))
        self.ends = seen


@torch.no_grad()
def _calibrated(
    model: nn.Module, names: Iterable[str], symmetric: bool, calibrate: Callable[[nn.Module], object]
) -> list[dict[str, Any]]:
    """Input scale and zero point of each named layer, from the range that `calibrate` shows it."""
    ranges = {name: _Range() for name in names}
    handles = [
        _linear(model, name).register_forward_pre_hook(observer, with_kwargs=True) for name, observer in ranges.items()
    ]
    try:
        calibrate(model)
    finally:
        for handle in handles:
            handle.remove()
    return [_input_parameters(name, observer.ends, symmetric) for name, observer in ranges.items()]


def _input_parameters(name: str, ends: Tensor | None, symmetric: bool) -> dict[str, Any]:
    if ends is None:
        raise ValueError(
            f"quantize_: calibrate: expected every chosen layer to run, but {name!r} saw no input; "
            "widen the sample inputs, or leave it out with filter_fn"
        )
    if not ends.isfinite().all():
        raise ValueError(f"quantize_: calibrate: expected finite inputs of {name!r}, got a range of {ends.tolist()}")
    # The two ends have the range of all inputs, so their quantiser parameters are those of all inputs.
    _, scale, zero_point = epiloq.quantize_int8(ends.unsqueeze(0), symmetric=symmetric)
    return {"input_scale": scale, "input_zero_point": zero_point}
