"""Layers that read the same input, computed as one product: query, key and value, or gate and up.

The layers keep their names, parameters and state dict. Their weights become views of the rows of one merged layer, so
that nothing is stored twice. The first layer called with an input computes the product for all of them, and the others
return their columns of it. A call with a different tensor computes a product of its own, so the result is correct
whatever the model does, and from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import lcm
from operator import attrgetter, is_
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq._torch.parameters import FrozenParameter
from epiloq._torch.tracing import is_exporting
from epiloq.nn import (
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    Fp8WeightOnlyLinear,
    Int8Linear,
    OnlineQuantLinear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from epiloq.nn.base.prepared_linear import FP8_BLOCK, N_MULTIPLE
from epiloq.nn.base.w4a8_layer import W4A8Layer
from epiloq.optimize.guards import untouched
from epiloq.optimize.tokens import Quantized, multiply
from epiloq.weights.packed_layout import PANEL_ROWS

# Granularity of the rows of stored tensors: all layers but the last must have a multiple of it.
ROWS: dict[type[nn.Module], int] = {
    Int8Linear: N_MULTIPLE,
    Fp8Linear: N_MULTIPLE,
    Fp8BlockLinear: FP8_BLOCK,
    WeightOnlyLinear: PANEL_ROWS,
    W4A8Linear: PANEL_ROWS,
    OnlineQuantLinear: 4,
    Fp4Linear: PANEL_ROWS,
    W4A8Fp4Linear: PANEL_ROWS,
    Fp8WeightOnlyLinear: N_MULTIPLE,
}
# The dimension of rows of a stored tensor, by default the first; and the tensors that must be equal in all layers.
ROW_DIMENSION = {"weight_parameters": -1}
SHARED = ("input_scale", "input_zero_point", "weight_perm", "weight_global_scale", "pre_quant_scale")
# Layers whose kernels read tensors without padding rows.
_NOT_PADDED = (Fp4Linear, Fp8WeightOnlyLinear, W4A8Fp4Linear)


def reason_against(layers: Sequence[Any]) -> str | None:
    """Return why layers cannot be merged, or None if they can."""
    first = layers[0]
    forwards = [forward for layer in layers if (forward := vars(layer).get("forward")) is not None]
    if any(isinstance(forward, partial) and forward.func is member for forward in forwards):
        return "a layer is merged already, with others"
    if forwards:
        return "a layer's forward was replaced"
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return "a layer has hooks"
    if any(type(layer) is not type(first) for layer in layers):
        return "not layers of one quantised kind: " + ", ".join(type(layer).__name__ for layer in layers)
    if type(first) not in ROWS:
        return f"{type(first).__name__} has no merged form"
    if any(_options(layer) != _options(first) for layer in layers):
        return "layers of different options"
    if len({id(layer) for layer in layers}) != len(layers):
        return "one layer under several names"
    rows = _multiple(first)
    uneven = [layer.out_features for layer in layers[:-1] if layer.out_features % rows]
    if uneven:
        return f"{uneven[0]} output features, not a multiple of {rows}"
    return _reason_against_tensors(layers)


def _reason_against_tensors(layers: Sequence[Any]) -> str | None:
    """Return why the present tensors of layers, whose kinds and options fit, cannot be merged, or None if they can."""
    for name in layers[0]._parameters:
        held = [layer._parameters.get(name) for layer in layers]
        if any((tensor is None) != (held[0] is None) for tensor in held):
            return f"{name} in some layers only"
        tensors = [tensor for tensor in held if tensor is not None]
        if any(t.dtype != tensors[0].dtype or t.device != tensors[0].device for t in tensors):
            return f"{name} of different types or devices"
        if any(t.is_meta for t in tensors):
            return "no values yet (meta device)"
        if name in SHARED and any(not torch.equal(t, tensors[0]) for t in tensors):
            return f"different {name}"
    return None


def _multiple(layer: Any) -> int:
    """Return the number of which every layer's rows, except the last one's, must be a multiple."""
    rows = ROWS[type(layer)]
    return lcm(rows, layer.block[0]) if isinstance(layer, Fp8WeightOnlyLinear) and layer.block[0] > 1 else rows


def _options(layer: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(layer).items() if not k.startswith("_") and k not in ("out_features", "training")}


def _rows_of(layer: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A stored tensor by rows; a single scale of a weight is repeated for each output feature."""
    if isinstance(layer, Fp8Linear) and name == "weight_scale" and layer.weight_scales == "tensor":
        return tensor.expand(layer.out_features)
    if isinstance(layer, Fp8WeightOnlyLinear) and name == "weight_scale" and layer.block[0] == -1:
        return tensor.expand(layer.out_features, -1)
    return tensor


def _whole(layers: Sequence[Any], name: str) -> Tensor | None:
    """The rows of a stored tensor of all layers, concatenated; None if they have none."""
    tensors = [_rows_of(layer, name, t) for layer in layers if (t := layer._parameters[name]) is not None]
    if not tensors:
        return None
    whole = torch.cat(
        [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors], ROW_DIMENSION.get(name, 0)
    )
    return whole.view(tensors[0].dtype) if whole.dtype != tensors[0].dtype else whole


@torch.no_grad()
def _refresh(merged: Any, layers: Sequence[Any]) -> bool:
    """Copy the layers' tensors into `merged`, of whose ``weight_q`` theirs are views; False if they no longer are."""
    rows = merged.weight_q.split([layer.weight_q.shape[0] for layer in layers])
    if not all(
        _alike(layer.weight_q, part) and layer.weight_q.data_ptr() == part.data_ptr()
        for layer, part in zip(layers, rows, strict=True)
    ):
        return False
    wholes = {name: _whole(layers, name) for name in layers[0]._parameters if name not in (*SHARED, "weight_q")}
    held = merged._parameters
    if not all(
        (held[name] is None) == (whole is None) and (whole is None or _alike(held[name], whole))
        for name, whole in wholes.items()
    ):
        return False
    for name, whole in wholes.items():
        if whole is not None:
            held[name].copy_(whole)
    held.update({name: layers[0]._parameters[name] for name in SHARED if name in held})
    merged._settle()
    return True


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())


@torch.no_grad()
def concatenated(layers: Sequence[Any]) -> Any:
    """A layer with the rows of all layers, checked by `reason_against`; their ``weight_q`` become views of it."""
    first = layers[0]
    kind: Any = type(first)
    merged = kind.__new__(kind)
    vars(merged).update({name: value for name, value in vars(first).items() if name != "forward"})
    merged._parameters, merged._held, merged._reader = {}, None, None
    merged.out_features = sum(layer.out_features for layer in layers)
    if isinstance(first, Fp8Linear):
        merged.weight_scales = "channel"
    if isinstance(first, Fp8WeightOnlyLinear) and first.block[0] == -1:
        merged.block = (1, first.block[1])
    for name in first._parameters:
        if name in SHARED:
            merged._parameters[name] = first._parameters[name]
        else:
            merged._store(name, _whole(layers, name))
    if hasattr(first, "_padded_shapes"):
        merged._stored_shapes = {
            name: shape if (held := merged._parameters[name]) is None else tuple(held.shape)
            for name, shape in first._stored_shapes.items()
        }
        multiples = {"weight_scale_inv": 1} | (dict.fromkeys(first._parameters, 1) if kind in _NOT_PADDED else {})
        merged._padded_shapes = {
            name: (-(-held.shape[0] // (m := multiples.get(name, N_MULTIPLE))) * m, *first._padded_shapes[name][1:])
            if name not in SHARED
            else shape
            for name, shape in first._padded_shapes.items()
            if (held := merged._parameters[name]) is not None or name in SHARED
        }
    for layer, rows in zip(layers, merged.weight_q.split([layer.weight_q.shape[0] for layer in layers]), strict=True):
        layer._parameters["weight_q"] = FrozenParameter(rows)
        layer._settle()
    merged._settle()
    return merged


# Attribute of an input tensor with its quantised tokens; while a graph is traced, they are in its `Siblings`.
_TOKENS = "_epiloq_tokens"


class _Product(NamedTuple):
    """The columns of a product that have not been returned yet, and its input."""

    x: Tensor
    version: int
    columns: list[Tensor | None]


def _version(x: Tensor) -> int:
    return 0 if is_compiling() or x.is_inference() else x._version


# What is compared in every call is gathered in C.
_parameters_of, _values_of = attrgetter("_parameters"), dict[str, Any].values
_versions_of: Callable[[Tensor], int] = attrgetter("_version")


class _Sources:
    """Tensors from which something was derived. Compared in every call, so the loops run in C."""

    def __init__(self, tensors: Sequence[Tensor | None] = ()) -> None:
        self._tensors = list(tensors)
        self._written = [t for t in tensors if t is not None and not t.is_inference()]
        self._versions = [*map(_versions_of, self._written)]

    def are(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether `tensors` are the same ones, and have not been written to."""
        same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        return same and [*map(_versions_of, self._written)] == self._versions

    def have(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether `tensors` are the same ones, which a graph can compare."""
        return len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))


class Siblings:
    """Layers that share a product. Copied and pickled with them; the merged layer is updated when they change or
    move."""

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str]) -> None:
        self.layers = list(layers)
        self.names = tuple(names)
        self.sizes = [layer.out_features for layer in layers]
        self._handed: tuple[Tensor, Quantized] | None = None
        self._product: _Product | None = None
        self._sources = _Sources()
        self._is_aliased = False
        self._merged: Any = None
        self._lock = Lock()
        self.merged()
        each: Any
        for index, each in enumerate(layers):
            each.forward = partial(member, self, index)
            each._reader = self

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"_handed": None, "_product": None, "_sources": _Sources(), "_merged": None}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def merged(self) -> Any:
        """The merged layer for the current tensors of the layers. None if those cannot be merged now, because they have
        no values (hooks of accelerate load one layer at a time) or differ in a tensor that must be equal; and in a
        graph, if no call in eager mode has merged them since they were copied or written to."""
        if is_compiling():
            return self._merged if self._sources.have(self._held_in_graph()) else None
        if not self._is_aliased and self._sources.are(self._held()):
            return self._merged
        with self._lock, torch.inference_mode(False):
            if self._is_aliased or not self._sources.are(self._held()):  # another thread may have been here first
                before, self._merged = self._merged, None  # before another copy of the weights is made
                if _reason_against_tensors(self.layers) is None:
                    if before is None or not _refresh(before, self.layers):
                        before = None
                        before = concatenated(self.layers)
                    self._merged = before
                self._sources, self._is_aliased = _Sources(self._held()), False
                for tensor in self._held():
                    if isinstance(tensor, FrozenParameter):
                        tensor.report_to(self)
            return self._merged

    def renew(self) -> None:
        """Called by a layer whose tensors were replaced or loaded: merge the layers anew, also for compiled graphs."""
        if not self._lock.locked():  # by `merged`, which replaces tensors
            self._mark_stale()
            self.merged()

    def _mark_stale(self, replaced: bool = False) -> None:
        """Merge the layers anew in the next call."""
        self._sources = _Sources()

    def _mark_aliased(self) -> None:
        """Copy the layers' tensors anew in the next call in eager mode."""
        self._is_aliased = True

    def _held_in_graph(self) -> list[Tensor | None]:
        return [tensor for layer in self.layers for tensor in layer._parameters.values()]

    def _held(self) -> list[Tensor | None]:
        return [*chain.from_iterable(map(_values_of, map(_parameters_of, self.layers)))]

    def hand(self, x: Quantized) -> Tensor:
        """Set quantised tokens, and the tensor that will represent them as the next input."""
        stand_in = x.q.view(*x.leading, x.q.shape[-1])
        if is_compiling():
            self._handed = stand_in, x
        else:
            vars(stand_in)[_TOKENS] = x
        return stand_in

    def whole(self, x: Tensor) -> Tensor:
        """The product of all layers, concatenated."""
        if not is_compiling():
            tokens = vars(x).get(_TOKENS)
        else:
            tokens = self._handed[1] if self._handed is not None and self._handed[0] is x else None
            self._handed = None
        return self.whole_of_values(x) if tokens is None else self.whole_of_tokens(tokens)

    def whole_of_tokens(self, tokens: Quantized, checked: bool = False) -> Tensor:
        """`whole` of quantised tokens; `checked` as for `multiply`."""
        merged = self.merged()
        if merged is None:
            return torch.cat([multiply(layer, tokens, checked) for layer in self.layers], -1)
        return multiply(merged, tokens, checked)

    def whole_of_values(self, x: Tensor) -> Tensor:
        """`whole` of a tensor that does not represent quantised tokens."""
        merged = self.merged()
        if merged is None:
            return torch.cat([type(layer).forward(layer, x) for layer in self.layers], -1)
        if isinstance(merged, W4A8Layer):
            merged.weight_only_below = self.layers[0].weight_only_below  # type: ignore[assignment]
        return merged.forward(x)  # type: ignore[no-any-return]

    def unchanged_in(self, module: nn.Module) -> bool:
        """Whether the layers are still children of `module`, and nothing but a merged product runs in them."""
        children = module._modules
        for name, layer in zip(self.names, self.layers, strict=True):
            if children.get(name) is not layer or not untouched(layer, member):
                return False
        return True

    def take(self, index: int, x: Tensor) -> Tensor:
        """The product of one layer; those of the others are kept for calls with the same input."""
        product = self._product
        fresh = product is not None and product.x is x and product.version == _version(x)
        if product is None or not fresh or product.columns[index] is None:
            if self.merged() is None:
                self._product, layer = None, self.layers[index]
                return type(layer).forward(layer, x)  # type: ignore[no-any-return]
            product = _Product(x, _version(x), list(self.whole(x).split(self.sizes, -1)))
        columns, result = product.columns, product.columns[index]
        columns[index] = None
        self._product = product if any(column is not None for column in columns) else None
        assert result is not None
        return result


class Alone(Siblings):
    """A layer that is one product for query, key and value, or for gate and up, in the model itself."""

    def merged(self) -> Any:
        return self.layers[0]

    def whole_of_values(self, x: Tensor) -> Tensor:
        layer: Any = self.layers[0]
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]


def member(siblings: Siblings, index: int, input: Tensor) -> Tensor:
    """``forward`` of a layer that shares a product; an exported graph has a separate product for each layer."""
    if is_exporting():
        layer: Any = siblings.layers[index]
        return type(layer).forward(layer, input)  # type: ignore[no-any-return]
    return siblings.take(index, input)


def siblings_of(*layers: nn.Module) -> Siblings | None:
    """The `Siblings` whose members are exactly these layers, in this order; None if any of them is wrapped."""
    forward = vars(layers[0]).get("forward")
    if not isinstance(forward, partial) or forward.func is not member:
        return None
    siblings: Siblings = forward.args[0]
    same = len(layers) == len(siblings.layers) and all(a is b for a, b in zip(layers, siblings.layers, strict=True))
    return siblings if same else None
