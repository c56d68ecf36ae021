"""Table of the module classes in epiloq's own format: their options in config.json, and their weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from epiloq import nn as modules
from epiloq.formats.layouts.base import Activations, FormatError, Quantization
from epiloq.formats.weights import BlockWeight, ModuleWeight, OffsetWeight, ScaledWeight, Weight
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.scaled_input import SCALE
from epiloq.weights.grid import Grid, InputGrid, QuantizedWeight

Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """A module class in epiloq's own format.

    options
        The constructor's arguments other than sizes, and how to get them from a module.
    usual
        Default values of options, which are omitted.
    weight
        The weight of a module, given its options.
    described
        How layers with these options are quantised, if a format of integers can represent it.
    """

    module: type[Any]
    options: Mapping[str, Callable[[Any], Any]]
    weight: Callable[[Any, Options], Weight]
    described: Callable[[Options], Quantization | None] = lambda options: None
    usual: Options = field(default_factory=dict)

    def options_of(self, module: nn.Module) -> dict[str, Any]:
        """The options of a module that differ from their defaults."""
        found = {name: value(module) for name, value in self.options.items()}
        return {name: value for name, value in found.items() if name not in self.usual or value != self.usual[name]}

    def check(self, options: Options) -> None:
        """Raise FormatError for options that have the wrong type or that the constructor does not accept."""
        defaults = inspect.signature(self.module).parameters
        for name, value in options.items():
            usual = defaults[name].default
            wanted = {bool: (bool,), int: (int,), str: (str,), tuple: (list,)}.get(
                type(usual), (int, float, type(None))
            )
            if type(value) not in wanted:
                expected = " or ".join(kind.__name__ for kind in wanted)
                raise FormatError(f"{self.module.__name__}: {name}: expected {expected}, got {value!r}")
        try:
            self.module(1, 1, False, **options, device="meta")
        except (RuntimeError, TypeError, ValueError) as error:
            raise FormatError(str(error)) from None

    def build(self, linear: nn.Linear, options: Options, state: Mapping[str, Tensor], device: torch.device) -> Any:
        """Create a module that replaces a linear layer, and load its state. Raises FormatError for an invalid state."""
        if "weight_perm" in state:
            options = {**options, "act_order": True}
        try:
            module = self.module(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                **options,
                device=device,
                dtype=linear.weight.dtype,
            )
            module.load_state_dict(state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise FormatError(str(error).strip().splitlines()[-1].strip()) from None
        return module.train(linear.training)


class TableKind(Kind):
    """`Kind` of an embedding, which replaces a linear layer with the same weight."""

    def build(self, linear: nn.Linear, options: Options, state: Mapping[str, Tensor], device: torch.device) -> Any:
        sizes = linear.out_features, linear.in_features, getattr(linear, "padding_idx", None)
        try:
            module = self.module(*sizes, **options, device=device, dtype=linear.weight.dtype)
            module.load_state_dict(state)
            module.hold_scales_in_dtype_()
        except (RuntimeError, TypeError, ValueError) as error:
            raise FormatError(str(error).strip().splitlines()[-1].strip()) from None
        return module.train(linear.training)


def _attributes(*names: str) -> dict[str, Callable[[Any], Any]]:
    return {name: attrgetter(name) for name in names}


def _state(module: Any) -> dict[str, Tensor]:
    """A module's tensors except the bias, in the files' form."""
    return {name: tensor for name, tensor in module.file_state().items() if name != "bias"}


def _as_it_is(values: Callable[[Any], Tensor]) -> Callable[[Any, Options], Weight]:
    """A weight stored as the module's own state; `values` returns a module's dequantised weight."""
    return lambda module, options: ModuleWeight(
        type(module).__name__, options, _state(module), lambda: values(module), columns=module.in_features
    )


def _int8(module: modules.Int8Linear, options: Options) -> Weight:
    state, inputs = _state(module), None
    if (scale := module.input_scale) is not None:
        zero = module.input_zero_point
        inputs = InputGrid(scale, torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero)
    return QuantizedWeight(state["weight"], state["weight_scale"].view(-1, 1), None, _PER_CHANNEL, inputs=inputs)


_PER_CHANNEL = Grid(8, -1, symmetric=True)


def _int8_described(options: Options) -> Quantization:
    dynamic: Activations = "int8" if options["symmetric"] else "int8-azp"
    return Quantization(_PER_CHANNEL, "int8-static" if options["activation"] == "static" else dynamic)


def _blocks(module: modules.Fp8BlockLinear, options: Options) -> Weight:
    state = _state(module)
    return BlockWeight(state["weight"], state["weight_scale_inv"], module.rows)


def _weight_only(module: modules.WeightOnlyLinear | modules.QuantizedEmbedding, options: Options) -> Weight:
    inner = {name: value for name, value in options.items() if name != _SCALED}
    described, packed = _weight_only_described(inner), module.packed
    if described is None:
        return OffsetWeight.of(packed)
    q, scale, zero = packed.unpack()
    found = QuantizedWeight(q, scale.float(), None if zero is None else zero.int(), described.grid, packed.perm)
    return _scaled(found, module, options)


_SCALED = "scaled_input"


def _scaled(inner: QuantizedWeight | ModuleWeight, module: Any, options: Options) -> Weight:
    if not options.get(_SCALED):
        return inner
    state, name, scale = _state(module), type(module).__name__, getattr(module, SCALE).detach()
    return ScaledWeight(name, options, state, module.dequantized_weight, inner, scale, columns=module.in_features)


def _fp4(module: modules.Fp4Linear, options: Options) -> Weight:
    state = {name: tensor for name, tensor in _state(module).items() if name != SCALE}
    rest = {name: value for name, value in options.items() if name != _SCALED}
    values = partial(modules.Fp4Linear.dequantized_weight, module)
    return _scaled(ModuleWeight("Fp4Linear", rest, state, values, columns=module.in_features), module, options)


def _weight_only_described(options: Options) -> Quantization | None:
    if options["zeros"] == "offset" or options.get(_SCALED):
        return None
    return Quantization(Grid(options["bits"], options["group_size"], options["zeros"] == "none"))


def _w4a8(module: modules.W4A8Linear, options: Options) -> Weight:
    q, scale, zero = module.packed.unpack()
    grid = _w4a8_described(options).grid
    return QuantizedWeight(q, scale.float(), None if zero is None else zero.int(), grid, module.packed.perm)


def _w4a8_described(options: Options) -> Quantization:
    return Quantization(Grid(4, options["group_size"], options["zeros"] == "none"), options["activation"])


_TABLE = (
    Kind(modules.Int8Linear, _attributes("activation", "symmetric"), _int8, _int8_described),
    Kind(
        modules.Fp8Linear,
        _attributes("activation", "limit") | {"weight": attrgetter("weight_scales")},
        _as_it_is(modules.Fp8Linear.dequantized_weight),
        usual={"limit": None},
    ),
    Kind(modules.Fp8BlockLinear, _attributes("rows"), _blocks, usual={"rows": FP8_BLOCK}),
    Kind(modules.Fp8WeightOnlyLinear, _attributes("block"), _as_it_is(modules.Fp8WeightOnlyLinear.dequantized_weight)),
    Kind(
        modules.Fp4Linear,
        _attributes("format", "reciprocal", _SCALED),
        _fp4,
        usual={"reciprocal": True, _SCALED: False},
    ),
    Kind(
        modules.W4A8Fp4Linear,
        _attributes("format", "activation", "reciprocal"),
        _as_it_is(modules.W4A8Fp4Linear.dequantized_weight),
        usual={"reciprocal": True},
    ),
    Kind(modules.TableLinear, _attributes("block_size"), _as_it_is(modules.TableLinear.dequantized_weight)),
    Kind(
        modules.OnlineQuantLinear,
        _attributes("bits", "group_size", "symmetric"),
        _as_it_is(modules.OnlineQuantLinear.dequantized_weight),
    ),
    Kind(
        modules.WeightOnlyLinear,
        _attributes("bits", "group_size", "zeros", _SCALED),
        _weight_only,
        _weight_only_described,
        usual={_SCALED: False},
    ),
    Kind(modules.W4A8Linear, _attributes("activation", "group_size", "zeros"), _w4a8, _w4a8_described),
    TableKind(
        modules.QuantizedEmbedding,
        _attributes("bits", "group_size", "zeros", "embed_scale", "embed_scale_rounded"),
        _weight_only,
        _weight_only_described,
        usual={"embed_scale": 1.0, "embed_scale_rounded": False},
    ),
)
KINDS = {kind.module.__name__: kind for kind in _TABLE}
