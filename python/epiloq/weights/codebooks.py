"""Grids other than integers with zero points: float8 and FP4 values, and integers with real offsets in blocks.

Their parameters are computed as in the corresponding modules (``nn.Fp8Linear``, ``nn.Fp8BlockLinear``,
``nn.Fp4Linear``, ``nn.OnlineQuantLinear``), so that rounding to nearest gives the same weights as ``from_linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from epiloq.weights import fp4
from epiloq.weights.block_quant_weight import RANGES
from epiloq.weights.grid import QuantizedWeight
from epiloq.weights.rounding import CLIPPED, Parameters, expand_parameters

_FP8 = torch.finfo(torch.float8_e4m3fn)
_SMALLEST = torch.finfo(torch.float32).tiny
_NVFP4_RANGES = tuple(torch.linspace(2, 0.5, 31).tolist())
# Scales are powers of two: each of these doubles or halves the scale of any range.
_MXFP4_RANGES = (2.0, 0.5)

_Grid = TypeVar("_Grid", bound="_CodeGrid")


class _CodeGrid:
    """Base class of these grids: columns stay in the layer's order, and groups have nothing in common."""

    group_size: int
    reorders: ClassVar[bool] = False

    def length(self, channels: int) -> int:
        """Input channels in a full group of a layer with so many of them."""
        return channels if self.group_size == -1 else self.group_size

    def suited(self: _Grid, weight: Tensor) -> _Grid:
        """This one: it fixes the type of scales."""
        return self

    def for_weight(self: _Grid, weight: Tensor) -> _Grid:
        """This one."""
        return self

    def restore(self, q: Tensor, parameters: Parameters) -> Tensor:
        """``scale * q``, written over q, which is float32."""
        return q.mul_(parameters.scale)

    def make_weight(self, q: Tensor, parameters: Parameters, perm: Tensor | None = None) -> CodedWeight:
        """The weight. Raises ValueError for one in another order than the layer's."""
        if perm is not None:
            raise ValueError(
                f"{self}: expected columns in the layer's order; use static groups, or no activation order"
            )
        return CodedWeight(q, *parameters, self)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Float8Grid(_CodeGrid):
    """float8_e4m3fn values with a scale per `rows` output x `group_size` input channels; -1 means all.

    ``W = scale * q``, ``scale = max|W| / 448``, at least 2^-126.
    """

    rows: int = 1
    group_size: int = -1
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    tried_ranges: ClassVar[tuple[float, ...]] = CLIPPED

    def parameters(self, low: Tensor, high: Tensor) -> Parameters:
        """Scales that span `low` to `high`."""
        reach = torch.maximum(-low, high)
        return Parameters((reach / reach.new_tensor(_FP8.max)).clamp_(min=_SMALLEST))

    def round(self, weight: Tensor, parameters: Parameters) -> Tensor:
        """q as float32 numbers: true division, half to even, clamped. All arguments broadcast."""
        return (weight / parameters.scale).clamp_(_FP8.min, _FP8.max).to(self.dtype).float()


@dataclass(frozen=True)
class OffsetGrid(_CodeGrid):
    """Integers from -2^(bits-1) to 2^(bits-1) - 1 in blocks of input channels, with a real offset unless `symmetric`.

    ``W = scale * q + offset``. `epiloq.quantize_blockwise_int8` has the formulas for 8 bits; 4 bits differ only in
    the range of q.
    """

    bits: int
    group_size: int
    symmetric: bool = False
    rows: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.int8
    tried_ranges: ClassVar[tuple[float, ...]] = CLIPPED

    def parameters(self, low: Tensor, high: Tensor) -> Parameters:
        """Scales and offsets that span `low` to `high`."""
        lowest, highest = RANGES[self.bits]
        reach = torch.maximum(-low, high) if self.symmetric else high - low
        steps = reach.new_tensor(highest if self.symmetric else highest - lowest)
        constant = reach == 0
        scale = torch.where(constant, 1.0, (reach / steps).clamp_(min=_SMALLEST))
        return Parameters(scale, None if self.symmetric else torch.where(constant, high, high - highest * scale))

    def round(self, weight: Tensor, parameters: Parameters) -> Tensor:
        """q as float32 numbers: true division, half to even, clamped. All arguments broadcast."""
        shifted = weight if parameters.shift is None else weight - parameters.shift
        return torch.round(shifted / parameters.scale).clamp_(*RANGES[self.bits])

    def restore(self, q: Tensor, parameters: Parameters) -> Tensor:
        """``scale * q + offset``, written over q, which is float32."""
        q.mul_(parameters.scale)
        return q if parameters.shift is None else q.add_(parameters.shift)


@dataclass(frozen=True)
class Fp4Grid(_CodeGrid):
    """E2M1 numbers in blocks of input channels, ``W = scale * q``: "mxfp4" or "nvfp4", as in `epiloq.fp4_quantize`.

    divisor
        For "nvfp4": ``2688 / max|W|`` of the whole weight, computed by `for_weight`. Scales are E4M3 numbers times
        its reciprocal.
    """

    format: str
    divisor: float | None = None
    rows: ClassVar[int] = 1
    # Represents every number of E2M1.
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    @property
    def group_size(self) -> int:  # type: ignore[override]
        """Input channels that share a scale."""
        return fp4.FORMATS[self.format].block_size

    @property
    def tried_ranges(self) -> tuple[float, ...]:
        """Up to twice the whole range: E2M1's numbers are closer together below 4 than between 4 and 6, and MXFP4's
        rule may round a range down to three quarters of it."""
        return _NVFP4_RANGES if fp4.FORMATS[self.format].has_global_scale else _MXFP4_RANGES

    def for_weight(self, weight: Tensor, *others: Tensor) -> Fp4Grid:
        """The grid with the divisor of one or more weights that share it, if the format has one and it is unknown."""
        if self.divisor is not None or not fp4.FORMATS[self.format].has_global_scale:
            return self
        return replace(self, divisor=fp4.divisor_of(weight, *others).item())

    def parameters(self, low: Tensor, high: Tensor) -> Parameters:
        """Scales for the range `low` to `high`, by the format's rule."""
        reach = torch.maximum(-low, high)
        if self.divisor is None:
            return Parameters(fp4.scale_values(fp4.e8m0_scales(reach)))
        factor = reach.new_tensor(self.divisor).reciprocal()
        return Parameters(fp4.scale_values(fp4.e4m3_scales(reach, factor)) * factor)

    def round(self, weight: Tensor, parameters: Parameters) -> Tensor:
        """q as float32 numbers: true division, ties to the even code, clamped. All arguments broadcast."""
        return fp4.nearest(weight / parameters.scale)

    def stored(self, weight: CodedWeight) -> dict[str, Tensor]:
        """The tensors of a weight on this grid: `weight_q`, `weight_scale` and, for "nvfp4", `weight_global_scale`,
        as in ``nn.Fp4Linear``."""
        q = torch.nn.functional.pad(weight.q.float(), (0, weight.q.shape[1] % 2))
        codes = fp4.packed(fp4.codes_of(q))
        if not fp4.FORMATS[self.format].has_global_scale:
            byte = (torch.frexp(weight.scale).exponent - 1 + fp4.BIAS).to(torch.uint8)
            return {"weight_q": codes, "weight_scale": byte}
        divisor = weight.scale.new_tensor([1.0 if self.divisor is None else self.divisor])
        # E4M3 numbers are so far apart that the product's rounding does not change the result.
        scale = (weight.scale * divisor).to(torch.float8_e4m3fn)
        return {"weight_q": codes, "weight_scale": scale, "weight_global_scale": divisor}


@dataclass(frozen=True)
class CodedWeight:
    """A layer's weight on one of these grids.

    q
        float8_e4m3fn or int8 ``[N, K]``; E2M1 numbers are represented as float8_e4m3fn.
    scale, offset
        float32 ``[ceil(N / rows), ceil(K / group_size)]``; offset is None if the grid has none.
    """

    q: Tensor
    scale: Tensor
    offset: Tensor | None
    grid: Float8Grid | Fp4Grid | OffsetGrid

    @property
    def parameters(self) -> Parameters:
        """Scales and offsets in the grid's form."""
        return Parameters(self.scale, self.offset)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]``, computed in float32."""
        return self.grid.restore(self.q.float(), expand_parameters(self.parameters, self.grid, self.q.shape)).to(dtype)

    def split(self, rows: Sequence[int]) -> list[CodedWeight]:
        """Split into one value per layer whose rows were stacked. Raises ValueError if layers share scales."""
        if len(rows) == 1:
            return [self]
        if self.grid.rows != 1:
            raise ValueError("split: rows: expected those of one layer, because they share scales")
        parts = zip(self.q.split(list(rows)), self.parameters.split(rows), strict=True)
        return [replace(self, q=q.clone(), scale=scale, offset=offset) for q, (scale, offset) in parts]


Calibrated: TypeAlias = QuantizedWeight | CodedWeight
"""A layer's weight as returned by algorithms."""
