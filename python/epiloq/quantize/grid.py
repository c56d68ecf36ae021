"""Integer grids for weights, and rounding to the nearest point: what every algorithm here shares.

The one convention is ``W = scale * (q - zero)``: asymmetric grids hold unsigned q in 0 .. 2^bits - 1 and integer zero
points in the same range; symmetric grids hold signed q in -2^(bits-1) .. 2^(bits-1) - 1 and no zero point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from epiloq.packed_weight import BITS, PackedWeight, pack_weight

# Clipping tries ranges from the whole down to this part of it; two bits want about half, four bits 0.8 to 1.
SMALLEST_RANGE, RANGES = 0.4, 31
# Elements of a weight that are searched at once, to bound the temporaries (a few of 64 MB).
SEARCHED = 1 << 24


@dataclass(frozen=True)
class Grid:
    """Where weights may lie.

    bits
        2 to 8.
    group_size
        Input channels that share a scale; -1 for all. A last group may be shorter.
    symmetric
        Whether zero is in the middle, or at an integer zero point of each group.
    scale_dtype
        Scales are rounded to this type before weights are rounded to them, so that a checkpoint loses nothing.
    """

    bits: int = 4
    group_size: int = -1
    symmetric: bool = False
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"Grid: bits: expected 2 to 8, got {self.bits}")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"Grid: group_size: expected -1 or at least 1, got {self.group_size}")

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

    def round(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """q as floating-point numbers: true division, half to even, clamped. All arguments broadcast."""
        q = torch.round(weight / scale)
        return (q if zero is None else q + zero).clamp_(self.lowest, self.highest)


@dataclass(frozen=True)
class InputGrid:
    """How a layer's inputs all become int8: ``x = scale * (q - zero)``, float32 ``[1]`` and int32 ``[1]``."""

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
        How the layer's inputs are quantised, where that is known beforehand.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    grid: Grid
    perm: Tensor | None = None
    inputs: InputGrid | None = None

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return self.grid.bits

    @property
    def group_size(self) -> int:
        """Input channels that share a scale; -1 for all."""
        return self.grid.group_size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]``, channels in the layer's order, computed in float32."""
        columns = self.q.shape[1]
        length = self.grid.length(columns)
        q = self.q.float()
        if self.zero is not None:
            q -= spread(self.zero, length, columns)
        q *= spread(self.scale, length, columns)
        return (q if self.perm is None else q[:, self.perm.argsort()]).to(dtype)

    def pack(self) -> PackedWeight:
        """The same weight as ``epiloq.weight_only_mm`` takes it, its scales in 16 bits where that changes none.

        There, 5 to 7 bits are 8.
        """
        narrow = (self.scale.to(dtype) for dtype in (torch.float16, torch.bfloat16))
        scale = next((scale for scale in narrow if torch.equal(scale.float(), self.scale)), self.scale)
        bits = min(bits for bits in BITS if bits >= self.bits)
        return pack_weight(self.q, scale, self.zero, bits=bits, group_size=self.group_size, perm=self.perm)

    def split(self, rows: Sequence[int]) -> list[QuantizedWeight]:
        """One value for each of the layers whose rows were stacked."""
        edges = [0]
        for count in rows:
            edges.append(edges[-1] + count)
        return [
            replace(
                self,
                q=self.q[start:end].clone(),
                scale=self.scale[start:end].clone(),
                zero=None if self.zero is None else self.zero[start:end].clone(),
            )
            for start, end in pairwise(edges)
        ]


def spread(values: Tensor, length: int, columns: int) -> Tensor:
    """``[N, G]`` values of groups as ``[N, columns]``, each repeated for its group's channels."""
    return values.repeat_interleave(length, dim=1)[:, :columns]


@torch.no_grad()
def fit(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points for a weight ``[N, K]``: float32 ``[N, G]`` and int32 ``[N, G]`` (None if symmetric).

    Args:
        moments: None takes each group's whole range (0 included). ``[K]`` searches for the part of it that minimises
            ``sum_k moments_k (W_k - W'_k)^2``; ones give the mean squared error, the diagonal of ``sum x x^T`` that of
            the output if channels were uncorrelated. ``[K, K]``, that matrix itself, minimises each group's own
            contribution to the output's squared error (clipping as in AWQ, Lin et al., 2023).

    Raises:
        ValueError: a weight that is not finite, or too large for scales of ``grid.scale_dtype``.
    """
    check_finite("weight", weight)
    if weight.numel() == 0:
        raise ValueError(f"fit: weight: expected at least one element, got shape {list(weight.shape)}")
    measure = _Error(moments, grid.length(weight.shape[1])) if moments is not None else None
    rows = max(1, SEARCHED // weight.shape[1])
    found = [_fit_rows(part.float(), grid, measure) for part in weight.split(rows)]
    scale = torch.cat([scale for scale, _ in found])
    check_finite(f"weight, with scales in {grid.scale_dtype}", scale)
    if grid.symmetric:
        return scale, None
    return scale, torch.cat([zero for _, zero in found]).to(torch.int32)


@torch.no_grad()
def rtn(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> QuantizedWeight:
    """Round a weight ``[N, K]`` to the nearest points of a grid; `moments` clips, as for `fit`."""
    scale, zero = fit(weight, grid, moments)
    columns = weight.shape[1]
    length = grid.length(columns)
    spread_zero = None if zero is None else spread(zero, length, columns)
    q = grid.round(weight.float(), spread(scale, length, columns), spread_zero)
    return QuantizedWeight(q.to(grid.dtype), scale, zero, grid)


def check_finite(name: str, value: Tensor) -> None:
    """Raise ValueError if a tensor holds NaN or infinity."""
    if not torch.isfinite(value).all():
        raise ValueError(f"quantize: {name}: expected finite numbers, got NaN or infinity")


class _Error:
    """The error of each group ``[N, G]`` for differences ``[N, G, length]``, as `fit` describes it."""

    def __init__(self, moments: Tensor, length: int) -> None:
        groups = -(-moments.shape[-1] // length)
        missing = groups * length - moments.shape[-1]
        if moments.ndim == 1:
            self.weights = torch.nn.functional.pad(moments.float(), (0, missing)).view(groups, length)
        else:
            padded = torch.nn.functional.pad(moments.float(), (0, missing, 0, missing))
            blocks = padded.view(groups, length, groups, length)
            self.weights = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()

    def __call__(self, difference: Tensor) -> Tensor:
        if self.weights.ndim == 2:
            return (difference.square_() * self.weights).sum(-1)
        return (torch.einsum("ngi,gij->ngj", difference, self.weights) * difference).sum(-1)


def _fit_rows(weight: Tensor, grid: Grid, measure: _Error | None) -> tuple[Tensor, Tensor]:
    columns = weight.shape[1]
    length = grid.length(columns)
    groups = -(-columns // length)
    # Zeros that fill the last group change no range, for ranges include zero, and have no error.
    grouped = torch.nn.functional.pad(weight, (0, groups * length - columns)).view(-1, groups, length)
    low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
    scale, zero = _parameters(low, high, grid)
    if measure is None:
        return scale, zero

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        assert measure is not None
        q = grid.round(grouped, scale[..., None], zero[..., None])
        return measure(q.sub_(zero[..., None]).mul_(scale[..., None]).sub_(grouped))

    least = error(scale, zero)
    for part in torch.linspace(1, SMALLEST_RANGE, RANGES).tolist()[1:]:
        tried = _parameters(part * low, part * high, grid)
        found = error(*tried)
        better = found < least
        least = torch.where(better, found, least)
        scale, zero = torch.where(better, tried[0], scale), torch.where(better, tried[1], zero)
    return scale, zero


def _parameters(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale and zero point (0 when symmetric), both float32, that span ``low <= 0`` to ``high >= 0``."""
    steps = (1 << grid.bits) - 1
    # Symmetric grids have a point more below zero than above; half a step on either side splits the difference, as
    # the compressed-tensors format does.
    span = 2 * torch.maximum(-low, high) if grid.symmetric else high - low
    # By a tensor: torch's CUDA kernels multiply by the reciprocal of a number that they are to divide by.
    scale = (span / span.new_tensor(steps)).to(grid.scale_dtype).clamp_(min=torch.finfo(grid.scale_dtype).tiny).float()
    if grid.symmetric:
        return scale, torch.zeros_like(scale)
    return scale, torch.round(-low / scale).clamp_(0, steps)
