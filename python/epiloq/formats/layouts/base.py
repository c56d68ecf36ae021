"""Shared by every layout of a layer's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.packed_weight import PackedWeight, pack_weight

Activations = Literal["int8", "int8-azp", "int8-static", "fp8"] | None


@dataclass(frozen=True)
class Quantization:
    """Quantisation of a checkpoint's layers: the same for all, except those in `dynamic` and `grids`."""

    grid: Grid
    activations: Activations = None
    """Per token at run time, symmetric or with a zero point (azp), or FP8; static: one scale and zero point for all
    tokens. None leaves them in floating point."""
    dynamic: tuple[str, ...] = ()
    """Layers that have dynamic activations with a zero point (azp) in a checkpoint with static ones."""
    grids: Mapping[str, Grid] = field(default_factory=dict, compare=False)
    """Grids of layers, by name, that differ from `grid`."""

    @property
    def w4a8(self) -> bool:
        """Whether `nn.W4A8Linear` runs these layers, whose weights have the groups and scales of weight-only ones."""
        return self.grid.bits == 4 and self.activations in ("int8", "fp8")

    def of(self, layer: str) -> Quantization:
        """Return the quantisation of one layer."""
        activations = "int8-azp" if layer in self.dynamic else self.activations
        return Quantization(self.grids.get(layer, self.grid), activations)

    @staticmethod
    def of_all(layers: Mapping[str, Quantization | None]) -> Quantization | None:
        """The common value for layers given by name; None if no single value describes them."""
        found = set(layers.values())
        if len(found) == 2 and None not in found:
            dynamic, static = sorted((one for one in found if one is not None), key=lambda one: str(one.activations))
            if (dynamic.activations, static.activations) == ("int8-azp", "int8-static") and dynamic.grid == static.grid:
                return replace(static, dynamic=tuple(sorted(name for name, one in layers.items() if one == dynamic)))
        return found.pop() if len(found) == 1 else None


class FormatError(ValueError):
    """A checkpoint that cannot be read, or a weight that a format cannot represent; the message is a single line.

    Unprintable characters in names from files are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


@contextmanager
def located(where: object) -> Iterator[None]:
    """Make a ValueError a FormatError whose message begins with where it occurred; `where` may be a function that says
    so."""
    try:
        yield
    except ValueError as error:
        raise FormatError(f"{where() if callable(where) else where}: {error}") from error


Expected: TypeAlias = "Mapping[str, tuple[torch.dtype | None, tuple[int, ...]]]"
"""Types (None: any floating-point one) and shapes of tensors by name."""


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


@dataclass(frozen=True)
class Codes:
    """A weight as layouts store it: unsigned integers with a zero point per group; converts from and to weight classes.

    q
        uint8 ``[N, K]`` from 0 to 2^bits - 1; column j is input channel perm[j], groups are of q's columns.
    scale, zero
        ``[N, G]``; zero is int32.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor
    perm: Tensor | None
    bits: int
    group_size: int

    @classmethod
    def of(cls, weight: QuantizedWeight) -> Codes:
        """Return the integers of a calibrated weight."""
        q, zero = unsigned(weight)
        return cls(q, weight.scale, zero, weight.perm, weight.bits, weight.group_size)

    @classmethod
    def of_packed(cls, packed: PackedWeight, layout: str) -> Codes:
        """Return the integers of a packed weight. Raises FormatError for real offsets, which layouts cannot store."""
        if packed.offset is not None:
            raise FormatError(f"{layout}: expected integer zero points or none, got real offsets")
        q, scale, zero = packed.unpack()
        middle = 1 << (packed.bits - 1)
        if zero is None:
            q, zero = (q.to(torch.int16) + middle).to(torch.uint8), torch.full_like(scale, middle)
        return cls(q, scale, zero.to(torch.int32), packed.perm, packed.bits, packed.group_size)

    def quantized(self, grid: Grid) -> QuantizedWeight:
        """Convert to a weight on a grid. Raises FormatError for a symmetric grid with zero points off the middle."""
        return from_unsigned(self.q, self.scale, self.zero, grid, self.perm)

    def packed(self, symmetric: bool | None = None) -> PackedWeight:
        """Convert to a packed weight; with None it is symmetric if every zero point is in the middle."""
        q, middle = self.q, 1 << (self.bits - 1)
        if symmetric or (symmetric is None and bool((self.zero == middle).all())):
            q, zero = (q.to(torch.int16) - middle).to(torch.int8), None
        else:
            zero = self.zero
        scale = self.scale.contiguous()
        return pack_weight(q, scale, zero, bits=self.bits, group_size=self.group_size, perm=self.perm)

    def in_order(self) -> Codes:
        """The same with q's columns in the layer's order; groups are then no longer contiguous."""
        return self if self.perm is None else replace(self, q=self.q[:, self.perm.argsort()])

    def group_index(self) -> Tensor:
        """int32 ``[K]``: the group of each input channel."""
        columns = self.q.shape[1]
        groups = torch.arange(columns, dtype=torch.int32, device=self.q.device) // group_length(
            self.group_size, columns
        )
        return groups if self.perm is None else groups[self.perm.argsort()]


def order_of(group_index: Tensor, length: int, layout: str, name: str = "g_idx") -> Tensor | None:
    """The permutation that makes groups contiguous; None if they are.

    Raises FormatError unless every group has `length` channels and the last group the rest.
    """
    perm = group_index.argsort(stable=True)
    expected = torch.arange(len(group_index), dtype=group_index.dtype, device=group_index.device) // length
    if not torch.equal(group_index[perm], expected):
        raise FormatError(f"{layout}: {name}: expected {length} channels in each group")
    return None if torch.equal(group_index, expected) else perm


def check_order(name: str, order: Tensor) -> None:
    """Raise FormatError unless integers are a permutation."""
    if not torch.equal(order.sort().values, torch.arange(len(order), dtype=order.dtype, device=order.device)):
        raise FormatError(f"{name}: expected a permutation: each of 0 to {len(order) - 1} once")


def sizes(name: str, tensor: Tensor | None) -> tuple[int, int]:
    """The sizes of a matrix. Raises FormatError, with the tensor's name, for other ranks."""
    if tensor is None:
        raise FormatError(f"{name}: expected a tensor, found none")
    if tensor.ndim != 2:
        raise FormatError(f"{name}: expected 2 dimensions, got {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def group_length(group_size: int, columns: int) -> int:
    """Number of channels in a full group, given the layer's number of channels."""
    return max(columns, 1) if group_size == -1 else max(group_size, 1)


def groups_of(columns: int, group_size: int, layout: str) -> int:
    """Number of groups of some channels; the last may be shorter. Raises FormatError for an invalid group size."""
    if group_size != -1 and group_size < 1:
        raise FormatError(f"{layout}: group_size: expected -1 or at least 1, got {group_size}")
    return 1 if group_size == -1 else -(-columns // group_size)


def check_shape(layout: str, found: tuple[int, int], shape: tuple[int, int] | None) -> None:
    """Raise FormatError unless the shape ``[N, K]`` found from tensors is the expected one."""
    if shape is not None and tuple(shape) != found:
        raise FormatError(f"{layout}: shape: expected tensors of a layer {list(shape)}, got those of {list(found)}")


def require(tensors: Mapping[str, Tensor], shapes: Expected) -> None:
    """Raise FormatError unless tensors have these dtypes and shapes and are on one device."""
    device = None
    for name, (dtype, shape) in shapes.items():
        found = tensors.get(name)
        if found is None:
            raise FormatError(f"{name}: expected a tensor, found none")
        right_type = found.is_floating_point() if dtype is None else found.dtype == dtype
        if not right_type or tuple(found.shape) != shape:
            expected = "floating point" if dtype is None else str(dtype)
            raise FormatError(f"{name}: expected {expected} {list(shape)}, got {found.dtype} {list(found.shape)}")
        device = device or found.device
        if found.device != device:
            raise FormatError(f"{name}: expected a tensor on {device}, got one on {found.device}")


_GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")


def check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Raise FormatError, naming the tensor, for NaN or infinity among a layer's scales, offsets and bias, and for a
    global scale of the weight, which may be a divisor, that is not positive.

    Quantised values ("weight") are not read.
    """
    for name, tensor in tensors.items():
        if name == "weight" or not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue
        low, high = torch.aminmax(tensor.detach().float())
        if not (low.isfinite() & high.isfinite()):
            raise FormatError(f"{name}: expected finite numbers, got NaN or infinity")
        if name in _GLOBAL_SCALES and not low > 0:
            raise FormatError(f"{name}: expected a positive number, got {low.item()}")


def flag(found: Mapping[str, Any], key: str, layout: str) -> bool:
    """A Boolean entry of a configuration, true if it is missing. Raises FormatError for anything else."""
    value = found.get(key)
    if value is not None and type(value) is not bool:
        raise FormatError(f"{layout}: quantization_config: {key}: expected true or false, got {value!r}")
    return value is not False


def check_multiple(what: str, size: int, multiple: int, layout: str) -> None:
    """Raise FormatError unless `size` is a multiple of the given number."""
    if size % multiple:
        raise FormatError(f"{layout}: {what}: expected a multiple of {multiple}, got {size}")
