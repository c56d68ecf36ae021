"""Reader of one quantised layer of a checkpoint: from its description, its kind of block or its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats import epiloq_modules
from epiloq.formats.description import OFFSETS, Description
from epiloq.formats.embeddings import TableOutline
from epiloq.formats.layout_table import LAYOUTS, Shape, Tensors
from epiloq.formats.layouts import gguf
from epiloq.formats.layouts.base import FormatError, Quantization, check_numbers, require
from epiloq.formats.layouts.gguf_blocks import KINDS
from epiloq.formats.weights import ModuleWeight, ScaledWeight, Weight
from epiloq.nn.base.scaled_input import SCALE
from epiloq.weights.computed import FLOAT_DTYPES
from epiloq.weights.grid import QuantizedWeight

BIAS = "bias"
# Option of the constructor of modules that multiply their input by a vector of the files first.
_SCALED_INPUT = "scaled_input"


@dataclass(frozen=True)
class Reader:
    """Reader of one layer.

    described
        Its quantisation; None in epiloq's own format.
    quantization
        The same for integers on a grid; None for other weights.
    from_tensors
        The weight that a layer's tensors represent, given its shape ``[N, K]``. Raises FormatError for inconsistent
        tensors.
    parts
        Every tensor that a layer may have other than its bias, by the last part of its name; None if `from_tensors`
        checks them.
    check
        Raises FormatError for tensors with wrong dtypes or shapes; values are not read.
    build
        Creates the module that replaces a linear layer, for tensors that are the module's state dict.
    module
        Class and options of the module that runs a layer without `quantization`, as in epiloq's own format.
    unused
        Further tensors that a layer may have and that nothing uses, by the last part of their names.
    made_by
        The function that makes it, and its argument, by which it is pickled (in a model's quantizer).
    """

    described: Description | None
    quantization: Quantization | None
    from_tensors: Callable[[Tensors, Shape], Weight]
    parts: frozenset[str] | None
    check: Callable[[Tensors, Shape], object] = lambda tensors, shape: None
    build: Callable[[nn.Linear, Tensors], nn.Module] | None = None
    module: tuple[str, Mapping[str, Any]] = ("", {})
    unused: frozenset[str] = frozenset()
    made_by: tuple[Callable[[Any], Reader], Any] | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.made_by is not None
        make, of = self.made_by
        return make, (of,)

    def weight(self, tensors: Tensors, shape: Shape) -> Weight:
        """The same as `from_tensors`. Raises FormatError also for what `check_numbers` refuses."""
        check_numbers(tensors)
        return self.from_tensors(tensors, shape)

    def opened(self, linear: nn.Linear, tensors: Tensors) -> nn.Module:
        """The module that runs a layer's tensors, with a bias if "bias" is among them.

        Sizes, mode, dtype and device are those of the linear layer that it replaces. Raises ValueError for tensors that
        do not fit, for scales that are not finite, and for a global scale that is not positive.
        """
        check_numbers(tensors)
        if self.build is not None:
            return self.build(linear, tensors)
        parts = {name: tensor for name, tensor in tensors.items() if name != BIAS}
        weight = self.from_tensors(parts, (linear.out_features, linear.in_features))
        table = linear if isinstance(linear, TableOutline) else None
        name, options = epiloq_modules.described(weight, self.quantization, table)
        state = epiloq_modules.state_of(weight, self.quantization)
        if BIAS in tensors:
            state[BIAS] = tensors[BIAS]
        module: nn.Module = epiloq_modules.KINDS[name].build(linear, options, state, linear.weight.device)
        return module


@cache
def reader(described: Description) -> Reader:
    """The reader of layers with this description. Raises FormatError if no module runs them."""
    layout = LAYOUTS[described.layout]
    module: tuple[str, Mapping[str, Any]]
    quantization: Quantization | None
    if described.layout in OFFSETS:
        options = {"bits": described.bits, "group_size": described.group_size, "zeros": "offset"}
        quantization, module = None, ("WeightOnlyLinear", options)
    else:
        quantization = described.quantization
        module = ("", {}) if quantization is not None else described.module
    if described.scaled:
        return _scaled(described)
    return Reader(
        described,
        quantization,
        lambda tensors, shape: layout.from_tensors(tensors, described, shape),
        layout.parts(described),
        lambda tensors, shape: layout.check(tensors, described, shape),
        module=module,
        unused=layout.unused(described),
        made_by=(reader, described),
    )


def _scaled(described: Description) -> Reader:
    """The reader of layers that multiply their input by a vector first, and are like others otherwise."""
    inner = reader(replace(described, scaled=False))
    assert inner.parts is not None
    module = inner.module
    if inner.quantization is not None:
        grid = inner.quantization.grid
        options = {"bits": grid.bits, "group_size": grid.group_size, "zeros": "none" if grid.symmetric else "zero"}
        module = ("WeightOnlyLinear", options)

    def from_tensors(tensors: Tensors, shape: Shape) -> Weight:
        rest, scale = _without_scale(tensors, shape)
        return _scaled_weight(inner.from_tensors(rest, shape), inner.quantization, scale)

    return Reader(
        described,
        None,
        from_tensors,
        inner.parts | {SCALE},
        lambda tensors, shape: inner.check(_without_scale(tensors, shape)[0], shape),
        module=(module[0], {**module[1], _SCALED_INPUT: True}),
        unused=inner.unused,
        made_by=(reader, described),
    )


def _without_scale(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's other tensors, and the vector ``[K]``. Raises FormatError for one of another shape or type, and for
    values that are not finite.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name != SCALE}
    require({SCALE: tensors[SCALE]}, {SCALE: (None, (shape[1],))})
    scale = tensors[SCALE]
    if scale.dtype not in FLOAT_DTYPES:
        raise FormatError(f"{SCALE}: expected floating point of 16 or 32 bits, got {scale.dtype}")
    if not scale.is_meta and not bool(scale.isfinite().all()):
        raise FormatError(f"{SCALE}: expected finite numbers, got {scale[~scale.isfinite()][0].item()}")
    return rest, scale


def _scaled_weight(inner: Weight, quantization: Quantization | None, scale: Tensor) -> ScaledWeight:
    """The weight of such a layer, given the one that it would have without the vector."""
    if not isinstance(inner, (ModuleWeight, QuantizedWeight)):
        raise FormatError(f"{SCALE}: no layer of FP8 blocks scales its inputs by channel first")
    module, options = epiloq_modules.described(inner, quantization)
    state = epiloq_modules.state_of(inner, quantization) | {SCALE: scale}

    def values() -> Tensor:
        return inner.dequantize() * scale.to(torch.float32)

    return ScaledWeight(module, {**options, _SCALED_INPUT: True}, state, values, inner, scale, columns=scale.shape[0])


@cache
def block_reader(kind: str) -> Reader:
    """The reader of a GGUF file's layers of a kind of block."""
    options = {"bits": KINDS[kind].bits, "group_size": KINDS[kind].group}
    return Reader(
        None,
        gguf.quantization_of(kind),
        lambda tensors, shape: gguf.to_weight(tensors["weight"], kind=kind, shape=shape),
        frozenset({"weight"}),
        module=("WeightOnlyLinear", {**options, "zeros": "offset" if KINDS[kind].offset else "none"}),
        made_by=(block_reader, kind),
    )


def _from_module(group: epiloq_modules.Group, tensors: Tensors, shape: Shape) -> Weight:
    outline = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=torch.float32)
    module = group.kind.build(outline, group.options, tensors, torch.device("cpu"))
    return group.kind.weight(module, group.options)


def module_reader(group: epiloq_modules.Group) -> Reader:
    """The reader of layers in epiloq's own format. The module itself refuses unexpected tensors, so all are read."""
    kind, options = group.kind, group.options
    return Reader(
        None,
        kind.described(options),
        partial(_from_module, group),
        None,
        build=lambda linear, tensors: kind.build(linear, options, tensors, linear.weight.device),
        module=(group.module, options),
        made_by=(module_reader, group),
    )
