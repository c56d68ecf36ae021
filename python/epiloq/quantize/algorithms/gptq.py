"""GPTQ (Frantar et al., 2022): round weights column by column; later columns compensate each error."""

from __future__ import annotations

from operator import itemgetter
from typing import Generic

import torch
from torch import Tensor

from epiloq.weights.rounding import Codebook, Kept, Parameters, check_finite, fit, over_rows

LARGEST_DAMPENING = 10.0


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Codebook[Kept],
    *,
    moments: Tensor | None = None,
    act_order: bool = True,
    static_groups: bool = True,
    dampening: float = 0.01,
    block: int = 128,
    dtype: torch.dtype = torch.float64,
) -> Kept:
    """Quantise a weight ``[N, K]`` so that its output error on the calibration inputs is small.

    It works with any grid, as later columns compensate the error, whatever its cause. Layers that read the same
    input may be stacked along N where rows do not share scales: then they do not depend on each other.

    Args:
        hessian: ``[K, K]``, ``sum x x^T`` of the inputs in any scale (see `InputStatistics`). A channel that never
            occurred is rounded to nearest and takes part in no compensation.
        moments: clipping of the ranges, as for `fit`.
        act_order: take the channels with the largest inputs first, while there is most left to compensate with.
        static_groups: fit every scale to the weights as they were, so that `act_order` leaves groups where they are.
            Otherwise a group's scale is fitted to its compensated weights when its turn comes, groups are made in
            the order of processing, and with `act_order` the result has a `perm`.
        dampening: this part of the mean diagonal is added to the diagonal; ten times more, up to 10, for as long as
            the matrix cannot be factored.
        block: columns that are compensated at once; only speed depends on it.
        dtype: of the factorisation, float32 or float64.

    Raises:
        ValueError: before anything is computed, `act_order` without `static_groups` on a grid that cannot represent
            such groups; shapes that do not fit, numbers that are not finite, or a Hessian that no dampening helps.
    """
    if weight.ndim != 2:
        raise ValueError(f"gptq: weight: expected two dimensions [N, K], got {list(weight.shape)}")
    columns = weight.shape[1]
    if act_order and not static_groups and not grid.reorders and grid.length(columns) < columns:
        raise ValueError(
            f"gptq: static_groups: expected True with act_order, or act_order=False: {grid} cannot represent groups "
            "in another order than the layer's"
        )
    if hessian.shape != (columns, columns):
        raise ValueError(f"gptq: hessian: expected [{columns}, {columns}], got {list(hessian.shape)}")
    if dampening < 0:
        raise ValueError(f"gptq: dampening: expected at least 0, got {dampening}")
    check_finite("hessian", hessian)
    matrix = without_dead(hessian.to(dtype))
    order = matrix.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    order = order.to(weight.device)
    upper = inverse_factor(matrix[order][:, order], dampening).float()
    groups = _Groups(weight, grid.for_weight(weight), moments, order, static_groups)
    # Transposed, so that each step works on contiguous rows.
    rest = weight.t()[order].float()
    q = torch.empty(rest.shape, dtype=grid.dtype, device=weight.device)
    for start, end in _blocks(columns, groups.length, block):
        errors = _quantise_block(q, rest, upper, groups, start, end)
        rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    return groups.result(q)


def inverse_factor(matrix: Tensor, dampening: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a dampened matrix ``[K, K]``; see `gptq` for the dampening.

    Turned by half, the lower factor of the turned matrix is an upper R with ``R R^T`` the matrix, so R's inverse is
    the factor sought: neither the inverse nor a second factorisation is needed, which take three times as long.
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
        "gptq: hessian: expected a symmetric positive semi-definite matrix, but it cannot be factored with the mean of "
        f"its diagonal added {LARGEST_DAMPENING:g} times"
    )


def without_dead(hessian: Tensor) -> Tensor:
    """A copy with an ordinary diagonal where channels never occurred, which decouples them."""
    matrix = hessian.clone()
    diagonal = matrix.diagonal()
    dead = diagonal == 0
    diagonal[dead] = diagonal[~dead].mean() if not dead.all() else 1.0
    return matrix


class _Groups(Generic[Kept]):
    """The parameters of groups while GPTQ proceeds in `order`: known from the start, or fitted when a group begins."""

    def __init__(
        self, weight: Tensor, grid: Codebook[Kept], moments: Tensor | None, order: Tensor, static: bool
    ) -> None:
        count, columns = weight.shape
        self.grid, self.moments, self.order, self.static = grid, moments, order, static
        self.length = grid.length(columns)
        self.group_of = ((order if static else torch.arange(columns)) // self.length).tolist()
        self.fitted: list[Parameters] = [fit(weight, grid, moments)] if static else []
        self.parameters: list[Parameters] = []
        """Of each group, for every output channel."""
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

    def result(self, q: Tensor) -> Kept:
        """The value, from q ``[K, N]`` in the order of processing."""
        shifts = [part.shift for part in self.fitted if part.shift is not None]
        found = Parameters(torch.cat([part.scale for part in self.fitted], 1), torch.cat(shifts, 1) if shifts else None)
        moved = not torch.equal(self.order, self.order.sort().values)
        if not self.static and found.scale.shape[1] > 1 and moved:
            return self.grid.kept(q.t().contiguous(), found, self.order)
        return self.grid.kept(q[self.order.argsort()].t().contiguous(), found)


def _quantise_block(q: Tensor, rest: Tensor, upper: Tensor, groups: _Groups[Kept], start: int, end: int) -> Tensor:
    """Quantise columns start to end, compensating inside the block; their scaled errors ``[end - start, N]``."""
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
    """First columns and ends of blocks, such that a group begins with a block or lies inside one."""
    span = length if length > block else block // length * length
    return [
        (start, min(start + block, base + span, columns))
        for base in range(0, columns, span)
        for start in range(base, min(base + span, columns), block)
    ]
