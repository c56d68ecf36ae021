"""Rounding of weights to a grid, group by group, shared by all algorithms and grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

# Two bits want about half of the whole range, four bits 0.8 to 1.
CLIPPED = tuple(torch.linspace(1, 0.4, 31).tolist()[1:])
"""Ranges that clipping tries, as multiples of a group's whole range, for grids of equally spaced numbers."""
# Elements of a weight that are searched at once, to bound the temporaries (a few of 64 MB).
SEARCHED = 1 << 24


class Parameters(NamedTuple):
    """Parameters of a weight's groups: float32 ``[ceil(N / rows), G]``, or a shape that broadcasts against values.

    shift
        A zero point or an offset, depending on the grid; None if it has neither.
    """

    scale: Tensor
    shift: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Parameters:
        """Apply a function to both."""
        return Parameters(change(self.scale), None if self.shift is None else change(self.shift))

    def split(self, rows: Sequence[int]) -> list[Parameters]:
        """Split into copies for layers whose rows were stacked; no two rows may share parameters."""
        shifts = [None] * len(rows) if self.shift is None else self.shift.split(list(rows))
        parts = zip(self.scale.split(list(rows)), shifts, strict=True)
        return [Parameters(scale, shift).map(Tensor.clone) for scale, shift in parts]


Rounded = TypeVar("Rounded")
_Weight = TypeVar("_Weight", covariant=True)


class Codebook(Protocol[_Weight]):
    """A grid: the values that weights can have, parameters fitted to each group, and the form of a rounded weight."""

    @property
    def group_size(self) -> int:
        """Input channels that share parameters; -1 for all. A last group may be shorter."""

    @property
    def rows(self) -> int:
        """Number of consecutive output channels that share them; -1 for all."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of q."""

    @property
    def reorders(self) -> bool:
        """Whether `make_weight` supports columns in an order other than the layer's (`perm`)."""

    @property
    def tried_ranges(self) -> tuple[float, ...]:
        """Ranges that clipping tries besides a group's whole range, as multiples of it."""

    def length(self, channels: int) -> int:
        """Number of input channels in a full group, given the layer's number of input channels."""

    def suited(self, weight: Tensor) -> Codebook[_Weight]:
        """The grid to fit to a weight: this one, or one with parameters of a more precise type."""

    def for_weight(self, weight: Tensor) -> Codebook[_Weight]:
        """The grid with the parameters that all groups of a weight share; this one if there are none."""

    def parameters(self, low: Tensor, high: Tensor) -> Parameters:
        """Parameters for groups with these smallest and largest values, all float32."""

    def round(self, weight: Tensor, parameters: Parameters) -> Tensor:
        """q as floating-point numbers: true division, half to even, clamped. All arguments broadcast."""

    def restore(self, q: Tensor, parameters: Parameters) -> Tensor:
        """The values of q in float32, computed in place. All arguments broadcast."""

    def make_weight(self, q: Tensor, parameters: Parameters, perm: Tensor | None = None) -> _Weight:
        """A rounded weight, q ``[N, K]`` of `dtype`; its column i is input channel perm[i]."""


def over_rows(values: Tensor, rows: int, count: int) -> Tensor:
    """Expand ``[ceil(N / rows), …]`` values to ``[N, …]`` for N = `count` output channels."""
    return values if rows == 1 else values.repeat_interleave(count if rows == -1 else rows, dim=0)[:count]


def expand_parameters(parameters: Parameters, grid: Codebook[object], shape: torch.Size) -> Parameters:
    """Expand the parameters of groups to ``[N, K]``."""
    count, columns = shape
    return parameters.map(
        lambda values: over_rows(values.repeat_interleave(grid.length(columns), 1)[:, :columns], grid.rows, count)
    )


@torch.no_grad()
def fit(weight: Tensor, grid: Codebook[object], moments: Tensor | None = None) -> Parameters:
    """Scales, and zero points or offsets, for a weight ``[N, K]``: float32 ``[ceil(N / rows), G]``.

    Args:
        moments: None uses each group's whole range. ``[K]`` searches the grid's `tried_ranges` for the one that
            minimises ``sum_k moments_k (W_k - W'_k)^2``; ones give the mean squared error, and the diagonal of
            ``sum x x^T`` gives that of the output if channels are uncorrelated. ``[K, K]``, the whole matrix,
            minimises each group's contribution to the output's squared error (clipping as in AWQ, Lin et al., 2023).

    Raises:
        ValueError: a weight that is not finite, or too large for the type of the grid's scales.
    """
    check_finite("weight", weight)
    if weight.numel() == 0:
        raise ValueError(f"fit: weight: expected at least one element, got shape {list(weight.shape)}")
    grid = grid.suited(weight)
    measure = _Error(moments, grid.length(weight.shape[1])) if moments is not None else None
    at_once = max(1, SEARCHED // weight.shape[1] // grid.rows) * grid.rows if grid.rows > 0 else weight.shape[0]
    found = [_fit_rows(part.float(), grid, measure) for part in weight.split(at_once)]
    scale = torch.cat([scale for scale, _ in found])
    check_finite(f"weight, with scales of {grid}", scale)
    shifts = [shift for _, shift in found if shift is not None]
    return Parameters(scale, torch.cat(shifts) if shifts else None)


@torch.no_grad()
def rtn(weight: Tensor, grid: Codebook[Rounded], moments: Tensor | None = None) -> Rounded:
    """Round a weight ``[N, K]`` to nearest on a grid; `moments` enables clipping, as for `fit`."""
    grid = grid.for_weight(weight)
    parameters = fit(weight, grid, moments)
    q = grid.round(weight.float(), expand_parameters(parameters, grid, weight.shape))
    return grid.make_weight(q.to(grid.dtype), parameters)


def check_finite(name: str, value: Tensor) -> None:
    """Raise ValueError if a tensor contains NaN or infinity."""
    if not torch.isfinite(value).all():
        raise ValueError(f"quantize: {name}: expected finite numbers, got NaN or infinity")


class _Error:
    """The error of each group ``[N, G]`` for differences ``[N, G, length]``, as described in `fit`."""

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


def _fit_rows(weight: Tensor, grid: Codebook[object], measure: _Error | None) -> Parameters:
    count, columns = weight.shape
    length = grid.length(columns)
    groups = -(-columns // length)
    # The last group is padded with the last value, which changes no range; its moments are 0, so it adds no error.
    filled = torch.arange(groups * length, device=weight.device).clamp_(max=columns - 1)
    grouped = (weight if len(filled) == columns else weight[:, filled]).view(-1, groups, length)
    low, high = (
        together(ends, grid.rows, reduce)
        for ends, reduce in ((grouped.amin(-1), torch.amin), (grouped.amax(-1), torch.amax))
    )
    best = grid.parameters(low, high)
    if measure is None:
        return best

    def error(parameters: Parameters) -> Tensor:
        assert measure is not None
        each = parameters.map(lambda values: over_rows(values, grid.rows, count)[..., None])
        lost = grid.restore(grid.round(grouped, each), each).sub_(grouped)
        return together(measure(lost), grid.rows, torch.sum)

    least = error(best)
    for part in grid.tried_ranges:
        tried = grid.parameters(part * low, part * high)
        found = error(tried)
        better = found < least
        least = torch.where(better, found, least)
        shift = None
        if best.shift is not None and tried.shift is not None:
            shift = torch.where(better, tried.shift, best.shift)
        best = Parameters(torch.where(better, tried.scale, best.scale), shift)
    return best


def together(values: Tensor, rows: int, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce ``[N, G]`` values of output channels to ``[ceil(N / rows), G]`` for those that share parameters."""
    if rows == 1:
        return values
    return torch.stack([reduce(part, 0) for part in values.split(len(values) if rows == -1 else rows)])
