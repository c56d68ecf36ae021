"""Integer grids for weights, and weights rounded to them.

The convention is ``W = scale * (q - zero)``: asymmetric grids have unsigned q in 0 … 2^bits - 1 and integer zero points
in the same range; symmetric grids have signed q in -2^(bits-1) … 2^(bits-1) - 1 and no zero point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from epiloq.weights.packed_weight import BITS, PackedWeight, pack_weight
from epiloq.weights.rounding import CLIPPED, Parameters, expand_parameters
from epiloq.weights.scales import scales_in, wide_enough


@dataclass(frozen=True)
class Grid:
    """An integer grid for weights.

    bits
        2 to 8.
    group_size
        Input channels that share a scale; -1 for all. A last group may be shorter.
    symmetric
        Whether zero is in the middle of the grid; otherwise each group has an integer zero point.
    scale_dtype
        Scales are rounded to this type before the weights are rounded, so that storing them is lossless.
    widens
        Whether scales are float32 instead for a weight so small that this type would represent them with few bits.
    """

    bits: int = 4
    group_size: int = -1
    symmetric: bool = False
    scale_dtype: torch.dtype = torch.float32
    widens: bool = False
    rows: ClassVar[int] = 1
    reorders: ClassVar[bool] = True
    tried_ranges: ClassVar[tuple[float, ...]] = CLIPPED

    def __post_init__(self) -> None:
        # The values may come from files.
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"Grid: bits: expected 2 to 8, got {self.bits!r}")
        if type(self.group_size) is not int or (self.group_size != -1 and self.group_size < 1):
            raise ValueError(f"Grid: group_size: expected -1 or at least 1, got {self.group_size!r}")
        if self.group_size >= 1 << 31:
            raise ValueError(f"Grid: group_size: expected less than 2^31, got {self.group_size}")

    @property
    def lowest(self) -> int:
        """The smallest q."""
        return -(1 << (self.bits - 1)) if self.symmetric else 0

    @property
    def highest(self) -> int:
        """The largest q."""
        return self.lowest + (1 << self.bits) - 1

    @property
    def dtype(self) -> torch.dtype:
        """The type of q."""
        return torch.int8 if self.symmetric else torch.uint8

    def length(self, channels: int) -> int:
        """Input channels in a full group of a layer with so many of them."""
        return channels if self.group_size == -1 else self.group_size

    def suited(self, weight: Tensor) -> Grid:
        """The grid to fit to a weight: this one, or one with float32 scales."""
        if not self.widens:
            return self
        largest = float(weight.abs().max()) * (2 if self.symmetric else 1) / ((1 << self.bits) - 1)
        return replace(self, scale_dtype=wide_enough(largest, self.scale_dtype))

    def for_weight(self, weight: Tensor) -> Grid:
        """This one: groups have nothing in common."""
        return self

    def parameters(self, low: Tensor, high: Tensor) -> Parameters:
        """Scales and zero points that span `low` to `high`, and 0."""
        low, high, steps = low.clamp(max=0), high.clamp(min=0), (1 << self.bits) - 1
        # Symmetric grids have one more point below zero than above; as in compressed-tensors, half a step is added on
        # either side.
        span = 2 * torch.maximum(-low, high) if self.symmetric else high - low
        # The divisor is a tensor, because torch's CUDA kernels replace division by a number with a product.
        scale = scales_in(span / span.new_tensor(steps), self.scale_dtype).float()
        return Parameters(scale, None if self.symmetric else torch.round(-low / scale).clamp_(0, steps))

    def round(self, weight: Tensor, parameters: Parameters) -> Tensor:
        """q as floating-point numbers: true division, half to even, clamped. All arguments broadcast."""
        q = torch.round(weight / parameters.scale)
        return (q if parameters.shift is None else q.add_(parameters.shift)).clamp_(self.lowest, self.highest)

    def restore(self, q: Tensor, parameters: Parameters) -> Tensor:
        """``scale * (q - zero)``, written over q, which is in floating point."""
        return (q if parameters.shift is None else q.sub_(parameters.shift)).mul_(parameters.scale)

    def make_weight(self, q: Tensor, parameters: Parameters, perm: Tensor | None = None) -> QuantizedWeight:
        """The weight, its zero points as integers."""
        zero = None if parameters.shift is None else parameters.shift.to(torch.int32)
        return QuantizedWeight(q, parameters.scale, zero, self, perm)


@dataclass(frozen=True)
class InputGrid:
    """Static quantisation of a layer's inputs to int8: ``x = scale * (q - zero)``, float32 and int32 ``[1]``."""

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class QuantizedWeight:
    """A layer's weight on a grid: ``W[:, perm] = scale * (q - zero)``, group by group along q's columns.

    q
        ``[N, K]``: uint8 from 0, or int8 around 0 when symmetric.
    scale
        float32 ``[N, G]``, G = ceil(K / group_size), representable in ``grid.scale_dtype``.
    zero
        int32 ``[N, G]``, None when symmetric.
    perm
        int64 ``[K]``: column i of q is input channel perm[i]. None: the layer's own order.
    inputs
        How the layer's inputs are quantised, if this is static.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    grid: Grid
    perm: Tensor | None = None
    inputs: InputGrid | None = None

    @property
    def bits(self) -> int:
        """Number of bits of q."""
        return self.grid.bits

    @property
    def group_size(self) -> int:
        """Input channels that share a scale; -1 for all."""
        return self.grid.group_size

    @property
    def parameters(self) -> Parameters:
        """Scales and zero points in the grid's form."""
        return Parameters(self.scale, self.zero)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]``, channels in the layer's order, computed in float32."""
        q = self.grid.restore(self.q.float(), expand_parameters(self.parameters, self.grid, self.q.shape))
        return (q if self.perm is None else q[:, self.perm.argsort()]).to(dtype)

    def pack(self) -> PackedWeight:
        """The same weight for ``epiloq.weight_only_mm``, with scales in 16 bits if they are representable.

        5 to 7 bits are stored in 8.
        """
        narrow = (self.scale.to(dtype) for dtype in (torch.float16, torch.bfloat16))
        scale = next((scale for scale in narrow if torch.equal(scale.float(), self.scale)), self.scale)
        bits = min(bits for bits in BITS if bits >= self.bits)
        return pack_weight(self.q, scale, self.zero, bits=bits, group_size=self.group_size, perm=self.perm)

    def split(self, rows: Sequence[int]) -> list[QuantizedWeight]:
        """One value for each of the layers whose rows were stacked."""
        parts = zip(self.q.split(list(rows)), self.parameters.split(rows), strict=True)
        return [replace(self, q=q.clone(), scale=scale, zero=zero) for q, (scale, zero) in parts]
