"""What every layout of a layer's tensors shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from epiloq.quantize.grid import Grid, QuantizedWeight

Activations = Literal["int8", "int8-azp", "int8-static"] | None


@dataclass(frozen=True)
class Quantization:
    """How the layers of a checkpoint are quantised: all alike, but for those in `dynamic`."""

    grid: Grid
    activations: Activations = None
    """Per token at run time, symmetric or with a zero point; static: one scale and zero point for all tokens. None
    leaves them in floating point."""
    dynamic: tuple[str, ...] = ()
    """Of int8-static, the layers that are int8-azp instead."""

    def of(self, layer: str) -> Quantization:
        """How one layer is quantised."""
        return Quantization(self.grid, "int8-azp") if layer in self.dynamic else replace(self, dynamic=())

    @staticmethod
    def of_all(layers: Mapping[str, Quantization | None]) -> Quantization | None:
        """How layers by name are quantised together; None where no one value says that."""
        found = set(layers.values())
        if len(found) == 2 and None not in found:
            dynamic, static = sorted((one for one in found if one is not None), key=lambda one: str(one.activations))
            if (dynamic.activations, static.activations) == ("int8-azp", "int8-static") and dynamic.grid == static.grid:
                return replace(static, dynamic=tuple(sorted(name for name, one in layers.items() if one == dynamic)))
        return found.pop() if len(found) == 1 else None


class FormatError(ValueError):
    """A checkpoint that cannot be read, or a weight that a format cannot say; the message tells why."""


def unsigned(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """q, uint8, and zero points, int32 ``[N, G]``, of any grid, q from 0 to 2^bits - 1."""
    if weight.zero is not None:
        return weight.q, weight.zero
    middle = 1 << (weight.bits - 1)
    q = (weight.q.to(torch.int16) + middle).to(torch.uint8)
    return q, torch.full_like(weight.scale, middle, dtype=torch.int32)


def from_unsigned(q: Tensor, scale: Tensor, zero: Tensor, grid: Grid, perm: Tensor | None = None) -> QuantizedWeight:
    """The inverse of `unsigned`. Raises FormatError for a symmetric grid whose zero points are not in the middle."""
    scale = scale.float().contiguous()
    if not grid.symmetric:
        return QuantizedWeight(q, scale, zero.to(torch.int32).contiguous(), grid, perm)
    middle = 1 << (grid.bits - 1)
    if not (zero == middle).all():
        raise FormatError(f"zero points: expected {middle} everywhere in a symmetric checkpoint")
    return QuantizedWeight((q.to(torch.int16) - middle).to(torch.int8), scale, None, grid, perm)


def in_order(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with q's columns in the layer's order; groups are then no longer contiguous."""
    return weight if weight.perm is None else replace(weight, q=weight.q[:, weight.perm.argsort()])


def require(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[torch.dtype | None, tuple[int, ...]]]) -> None:
    """Raise FormatError unless there are tensors of these types (None: any floating-point one) and shapes."""
    for name, (dtype, shape) in shapes.items():
        found = tensors.get(name)
        if found is None:
            raise FormatError(f"{name}: expected a tensor, found none")
        right_type = found.is_floating_point() if dtype is None else found.dtype == dtype
        if not right_type or tuple(found.shape) != shape:
            expected = "floating point" if dtype is None else str(dtype)
            raise FormatError(f"{name}: expected {expected} {list(shape)}, got {found.dtype} {list(found.shape)}")


def divides(what: str, size: int, multiple: int, layout: str) -> None:
    """Raise FormatError unless `size` is a multiple of what a format can say."""
    if size % multiple:
        raise FormatError(f"{layout}: {what}: expected a multiple of {multiple}, got {size}")
