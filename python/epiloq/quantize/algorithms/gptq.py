"""GPTQ (Frantar et al., 2022): round weights column by column, and compensate each error in later columns."""

from __future__ import annotations

from functools import partial, reduce
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from epiloq.quantize.algorithms.hessians import check_hessian
from epiloq.weights.rounding import Codebook, Parameters, Rounded, fit, over_rows, together

DAMPENING = 0.01
LARGEST_DAMPENING = 10.0


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Codebook[Rounded],
    *,
    moments: Tensor | Literal["best"] | None = None,
    act_order: bool = True,
    static_groups: bool = True,
    dampening: float = DAMPENING,
    block: int = 128,
    dtype: torch.dtype = torch.float64,
) -> Rounded:
    """Quantise a weight ``[N, K]`` so that its output error on the calibration inputs is small.

    It works with any grid. Layers that read the same input may be stacked along N if rows do not share scales: they
    are then independent.

    Args:
        hessian: ``[K, K]``, ``sum x x^T`` of the inputs in any scale (see `InputStatistics`). A channel without
            inputs is rounded to nearest and takes no part in compensation.
        moments: clip ranges, as for `fit`. "best" rounds with three choices of ranges and keeps for each row the one
            with the smallest output error: each column's error weighted by what later columns cannot compensate of
            it (see `uncompensated`), weighted by the Hessian's diagonal, as if nothing were compensated, and whole
            ranges.
        act_order: process the channels with the largest inputs first, while the most columns are left for
            compensation.
        static_groups: fit all scales to the original weights, so that `act_order` does not change the groups.
            Otherwise a group's scale is fitted to its compensated weights when it is reached, groups are formed in
            the order of processing, and with `act_order` the result has a `perm`.
        dampening: this fraction of the mean diagonal is added to the diagonal; it is increased tenfold, up to 10,
            while the matrix cannot be factored.
        block: number of columns compensated at once; it only affects speed.
        dtype: type of the factorisation, float32 or float64.

    Raises:
        ValueError: before anything is computed: `act_order` without `static_groups` on a grid that cannot represent
            such groups, mismatching shapes, non-finite numbers, a Hessian that is not symmetric; or a Hessian that
            cannot be factored with any dampening.
    """
    if weight.ndim != 2:
        raise ValueError(f"gptq: weight: expected two dimensions [N, K], got {list(weight.shape)}")
    columns = weight.shape[1]
    if act_order and not static_groups and not grid.reorders and grid.length(columns) < columns:
        raise ValueError(
            f"gptq: static_groups: expected True with act_order, or act_order=False: {grid} cannot represent groups "
            "in another order than the layer's"
        )
    if dampening < 0:
        raise ValueError(f"gptq: dampening: expected at least 0, got {dampening}")
    check_hessian("gptq", hessian, columns)
    matrix = without_dead(hessian.to(dtype))
    order = matrix.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    order = order.to(weight.device)
    upper = inverse_factor(matrix[order][:, order], dampening).float()
    grid = grid.for_weight(weight)

    def walk(moments: Tensor | None) -> _Walked:
        return _walk(weight, upper, _Groups(weight, grid, moments, order, static_groups), block)

    tried = (_costs(upper, order, hessian), hessian.diagonal(), None) if isinstance(moments, str) else (moments,)
    best = reduce(partial(_better, rows=grid.rows), map(walk, tried))
    moved = not static_groups and best.parameters.scale.shape[1] > 1 and not torch.equal(order, order.sort().values)
    q = best.q if moved else best.q[order.argsort()]
    return grid.make_weight(q.t().contiguous(), best.parameters, order if moved else None)


class _Walked(NamedTuple):
    """A weight ``[N, K]`` after GPTQ: q ``[K, N]`` in the order of processing, and each row's squared output error."""

    q: Tensor
    parameters: Parameters
    errors: Tensor


def _walk(weight: Tensor, upper: Tensor, groups: _Groups, block: int) -> _Walked:
    """Round columns in order, a block at a time."""
    # Transposed, so that each step works on contiguous rows.
    rest = weight.t()[groups.order].float()
    q = torch.empty(rest.shape, dtype=groups.grid.dtype, device=weight.device)
    lost = torch.zeros(len(weight), device=weight.device)
    for start, end in _blocks(len(rest), groups.length, block):
        errors = _quantise_block(q, rest, upper, groups, start, end)
        lost += errors.square().sum(0)
        rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    shifts = [part.shift for part in groups.fitted if part.shift is not None]
    scale = torch.cat([part.scale for part in groups.fitted], 1)
    return _Walked(q, Parameters(scale, torch.cat(shifts, 1) if shifts else None), lost)


def _better(one: _Walked, other: _Walked, rows: int) -> _Walked:
    """Return the result with the smaller error for each set of rows that share parameters."""
    first = together(one.errors, rows, torch.sum) <= together(other.errors, rows, torch.sum)
    scale, shift = torch.where(first[:, None], one.parameters.scale, other.parameters.scale), None
    if one.parameters.shift is not None and other.parameters.shift is not None:
        shift = torch.where(first[:, None], one.parameters.shift, other.parameters.shift)
    each = over_rows(first, rows, len(one.errors))
    # Bytes are selected, because torch lacks many operations for float8.
    q = torch.where(each, one.q.view(torch.uint8), other.q.view(torch.uint8)).view(one.q.dtype)
    return _Walked(q, Parameters(scale, shift), torch.where(each, one.errors, other.errors))


@torch.no_grad()
def uncompensated(hessian: Tensor, dampening: float = DAMPENING) -> Tensor:
    """Output error per unit of each column's squared rounding error after GPTQ's compensation in activation order.

    Returns float32 ``[K]``, in the layer's order, for a Hessian ``[K, K]``; 0 for columns without inputs.
    """
    matrix = without_dead(hessian.double())
    order = matrix.diagonal().argsort(descending=True, stable=True)
    return _costs(inverse_factor(matrix[order][:, order], dampening), order, hessian)


def _costs(upper: Tensor, order: Tensor, hessian: Tensor) -> Tensor:
    found = upper.diagonal().float().square().reciprocal()[order.argsort()]
    return found * (hessian.diagonal() != 0).to(found.device)


def inverse_factor(matrix: Tensor, dampening: float) -> Tensor:
    """Upper Cholesky factor of the inverse of a dampened matrix ``[K, K]``; see `gptq` for the dampening.

    The lower factor of the matrix with rows and columns reversed, reversed again, is an upper R with ``R R^T`` equal
    to the matrix, so R's inverse is the desired factor. This avoids the inverse and a second factorisation, which
    would take three times as long.
    """
    mean = matrix.diagonal().mean()
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    while dampening <= LARGEST_DAMPENING:
        damped = matrix.flip(0, 1)
        damped.diagonal().add_(dampening * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if torch.isfinite(upper).all():
                return upper
        dampening = max(10 * dampening, 1e-4)
    raise ValueError(
        "gptq: hessian: expected a symmetric positive semi-definite matrix, but its Cholesky factorisation fails "
        f"even with {LARGEST_DAMPENING:g} times the mean of its diagonal added"
    )


def without_dead(hessian: Tensor) -> Tensor:
    """A copy with an ordinary diagonal for channels without inputs, which decouples them."""
    matrix = hessian.clone()
    diagonal = matrix.diagonal()
    dead = diagonal == 0
    diagonal[dead] = diagonal[~dead].mean() if not dead.all() else 1.0
    return matrix


class _Groups:
    """The parameters of groups while GPTQ proceeds in `order`: given, or fitted when a group is reached."""

    def __init__(
        self, weight: Tensor, grid: Codebook[object], moments: Tensor | None, order: Tensor, static: bool
    ) -> None:
        count, columns = weight.shape
        self.grid, self.moments, self.order, self.static = grid, moments, order, static
        self.length = grid.length(columns)
        self.group_of = ((order if static else torch.arange(columns)) // self.length).tolist()
        self.fitted: list[Parameters] = [fit(weight, grid, moments)] if static else []
        self.parameters: list[Parameters] = []
        """The parameters of each group, for every output channel."""
        for whole in self.fitted:
            by_group = whole.map(lambda values: over_rows(values, grid.rows, count).t().contiguous())
            self.parameters += [by_group.map(itemgetter(group)) for group in range(len(by_group.scale))]

    def begin(self, column: int, values: Tensor) -> None:
        """Fit the group that starts at a column; `values` are its compensated weights ``[length, N]``."""
        if self.static or column % self.length:
            return
        moments = self.moments
        if moments is not None:
            channels = self.order[column : column + self.length]
            moments = moments[channels] if moments.ndim == 1 else moments[channels][:, channels]
        found = fit(values.t(), self.grid, moments)
        self.fitted.append(found)
        self.parameters.append(found.map(lambda part: over_rows(part[:, 0], self.grid.rows, values.shape[1])))


def _quantise_block(q: Tensor, rest: Tensor, upper: Tensor, groups: _Groups, start: int, end: int) -> Tensor:
    """Quantise columns start to end, compensating in the block; returns their scaled errors ``[end - start, N]``."""
    values, factor = rest[start:end], upper[start:end, start:end]
    errors = torch.empty_like(values)
    for i, diagonal in enumerate(factor.diagonal().tolist()):
        groups.begin(start + i, rest[start + i : start + i + groups.length])
        parameters = groups.parameters[groups.group_of[start + i]]
        nearest = groups.grid.round(values[i], parameters)
        q[start + i] = nearest
        torch.sub(values[i], groups.grid.restore(nearest, parameters), out=errors[i]).div_(diagonal)
        values[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return errors


def _blocks(columns: int, length: int, block: int) -> list[tuple[int, int]]:
    """First columns and ends of blocks, such that each group starts with a block or lies inside one."""
    span = length if length > block else block // length * length
    return [
        (start, min(start + block, base + span, columns))
        for base in range(0, columns, span)
        for start in range(base, min(base + span, columns), block)
    ]
