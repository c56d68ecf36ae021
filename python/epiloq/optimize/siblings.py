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
from operator import attrgetter, is_
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq._torch.parameters import FrozenParameter
from epiloq._torch.tracing import is_exporting
from epiloq.nn.base.w4a8_layer import W4A8Layer
from epiloq.optimize.guards import untouched
from epiloq.optimize.merged_layers import concatenated, reason_against_layers, reason_against_tensors, refresh
from epiloq.optimize.tokens import Quantized, multiply


def replaced(layers: Sequence[Any]) -> str | None:
    """Return what else happens in calls of layers than their classes define, or None."""
    forwards = [forward for layer in layers if (forward := vars(layer).get("forward")) is not None]
    if any(isinstance(forward, partial) and forward.func is member for forward in forwards):
        return "a layer is merged already, with others"
    if forwards:
        return "a layer's forward was replaced"
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return "a layer has hooks"
    return None


def reason_against(layers: Sequence[Any]) -> str | None:
    """Return why layers cannot be merged, or None if they can."""
    return replaced(layers) or reason_against_layers(layers)


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
    """Layers that share a product. Copied and pickled with them; the merged layer follows when they change or move."""

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
                if reason_against_tensors(self.layers) is None:
                    if before is None or not refresh(before, self.layers):
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


class Apart(Siblings):
    """Layers in floating point, whose products are joined: what reads them finds them in one tensor."""

    def merged(self) -> Any:
        return None


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
