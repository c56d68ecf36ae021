"""Refinement of a rounded weight: closed-form refit of scales and zero points, and coordinate descent on the codes.

Both reduce the objective that GPTQ approximates greedily, the squared output error ``trace(D H D^T)`` with D the
difference from the exact weight, and both can revise every earlier decision (CDQuant, arXiv 2406.17542).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from epiloq.quantize.algorithms.hessians import check_hessian
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Codebook, Parameters, check_finite, expand_parameters
from epiloq.weights.scales import scales_in

ROUNDS = 4
BLOCK = 128
DAMPENING = 0.01


@torch.no_grad()
def refine(
    value: Calibrated,
    weight: Tensor,
    hessian: Tensor,
    *,
    rounds: int = ROUNDS,
    dampening: float = DAMPENING,
) -> Calibrated:
    """Return a rounded weight ``[N, K]`` whose output error is at most the given one's: no step increases it.

    A round refits the scale and the zero point of each group (only for integers with one scale per row and group),
    then changes each code to the best one given all others, column by column.

    Args:
        value: result of `gptq` or `rtn` for the weight, in the layer's order or with a `perm`.
        weight: ``[N, K]``, the exact weight.
        hessian: ``[K, K]``, ``sum x x^T`` of the inputs in any scale.
        rounds: maximum number of rounds; it ends when nothing changes.
        dampening: this fraction of the mean diagonal is added to the diagonal, as in `gptq`.

    Raises:
        ValueError: mismatching shapes, non-finite numbers, a Hessian that is not symmetric or has a negative diagonal
            element, or arguments out of range.
    """
    if weight.shape != value.q.shape:
        raise ValueError(f"refine: weight: expected {list(value.q.shape)}, got {list(weight.shape)}")
    columns = weight.shape[1]
    if rounds < 0:
        raise ValueError(f"refine: rounds: expected at least 0, got {rounds}")
    if dampening < 0:
        raise ValueError(f"refine: dampening: expected at least 0, got {dampening}")
    check_finite("weight", weight)
    check_hessian("refine", hessian, columns)
    perm = value.perm if isinstance(value, QuantizedWeight) else None
    matrix = hessian.float().clone()
    matrix.diagonal().add_(dampening * matrix.diagonal().mean())
    exact = weight.float()
    if perm is not None:
        matrix, exact = matrix[perm][:, perm], exact[:, perm]
    state = _State(value.q, value.parameters, value.grid, exact, matrix)
    for _ in range(rounds):
        moved = state.refit() if isinstance(value.grid, Grid) else False
        moved |= state.descend()
        if not moved:
            break
    return value.grid.make_weight(state.codes.t().contiguous().to(value.grid.dtype), state.parameters, perm)


def joined(parts: Sequence[Calibrated]) -> Calibrated:
    """Join consecutive rows of a layer, with the same order of columns, to one weight."""
    first = parts[0]
    if len(parts) == 1:
        return first
    shifts = [part.parameters.shift for part in parts]
    known = [shift for shift in shifts if shift is not None]
    parameters = Parameters(torch.cat([part.scale for part in parts]), torch.cat(known) if known else None)
    return first.grid.make_weight(torch.cat([part.q for part in parts]), parameters)


class _State:
    """A rounded weight while it is refined; ``[K, N]``, so that each step works on contiguous rows."""

    def __init__(
        self, q: Tensor, parameters: Parameters, grid: Codebook[Calibrated], weight: Tensor, hessian: Tensor
    ) -> None:
        self.codes, self.parameters, self.grid, self.hessian = q.float().t().contiguous(), parameters, grid, hessian
        self.weight, self.shape = weight.t().contiguous(), q.shape
        self.length = grid.length(q.shape[1])

    def restored(self) -> Tensor:
        """The rounded weight ``[K, N]``."""
        return self.grid.restore(self.codes.clone(), self._spread())

    def gradient(self) -> Tensor:
        """Half the objective's derivative, ``H D`` ``[K, N]``; recomputed, so that rounding does not accumulate."""
        return self.hessian @ (self.restored() - self.weight)

    def descend(self) -> bool:
        """One pass of coordinate descent over the columns; returns whether any code changed.

        The objective is a parabola in each weight, so the code nearest to its minimum is the best one.
        """
        gradient, values, spread_out = self.gradient(), self.restored(), self._spread()
        moved = False
        for start, end in _spans(self.shape[1], BLOCK):
            here, changes = gradient[start:end], torch.zeros_like(values[start:end])
            curvature = self.hessian[start:end, start:end]
            for i, second in enumerate(curvature.diagonal().tolist()):
                if second <= 0:
                    continue
                row = start + i
                parameters = spread_out.map(lambda part, row=row: part[row])  # type: ignore[misc]
                codes = self.grid.round(values[row] - here[i] / second, parameters)
                step = self.grid.restore(codes.clone(), parameters) - values[row]
                # Rounding may choose another code at the same distance: codes change only if the objective decreases.
                step *= step * (2 * here[i] + second * step) < 0
                self.codes[row] = torch.where(step != 0, codes, self.codes[row])
                changes[i] = step
                here.addr_(curvature[:, i], step)
            if changes.any():
                moved = True
                gradient[end:].addmm_(self.hessian[end:, start:end], changes)
        return moved

    def refit(self) -> bool:
        """Refit each group's scale and integer zero point given the others, in order; returns whether any changed."""
        assert isinstance(self.grid, Grid)
        gradient, moved = self.gradient(), False
        scales, shift = self.parameters.scale.clone(), self.parameters.shift
        zeros = torch.zeros_like(scales) if shift is None else shift.float().clone()
        for group, (start, end) in enumerate(_spans(self.shape[1], self.length)):
            codes, within = self.codes[start:end], self.hessian[start:end, start:end]
            scale, zero = _best(codes, within, gradient[start:end], (scales[:, group], zeros[:, group]), self.grid)
            change = scale * (codes - zero) - scales[:, group] * (codes - zeros[:, group])
            fell = (change * (2 * gradient[start:end] + within @ change)).sum(0) < 0
            if fell.any():
                moved = True
                scales[:, group] = torch.where(fell, scale, scales[:, group])
                zeros[:, group] = torch.where(fell, zero, zeros[:, group])
                gradient.addmm_(self.hessian[:, start:end], change * fell)
        self.parameters = Parameters(scales, None if shift is None else zeros.to(shift.dtype))
        return moved

    def _spread(self) -> Parameters:
        return expand_parameters(self.parameters, self.grid, self.shape).map(lambda part: part.float().t().contiguous())


def _best(
    codes: Tensor, within: Tensor, gradient: Tensor, before: tuple[Tensor, Tensor], grid: Grid
) -> tuple[Tensor, Tensor]:
    """The scale and zero point ``[N]`` that minimise the objective for one group; codes, gradient: ``[length, N]``.

    With the group's weights ``s (q - z)`` the objective is ``2 s (q - z) l + s^2 (q - z) H (q - z)``: for each of the
    few z the best s has a closed form.
    """
    scale, zero = before
    linear = gradient - within @ (scale * (codes - zero))
    squares = (codes * (within @ codes)).sum(0)
    crossed, ones = within.sum(0) @ codes, within.sum()
    along, alone = (codes * linear).sum(0), linear.sum(0)
    zeros = torch.arange(grid.highest + 1, device=codes.device, dtype=torch.float32) if not grid.symmetric else None
    tried = zero.new_zeros(1, 1) if zeros is None else zeros[:, None]
    slope = along - tried * alone
    curvature = squares - 2 * tried * crossed + tried.square() * ones
    fitted = torch.where(curvature > 0, -slope / curvature, 0)
    found = scales_in(fitted.clamp(min=0), grid.scale_dtype).float()
    objective = torch.where(fitted > 0, found * (2 * slope + found * curvature), torch.inf)
    least = objective.nan_to_num(nan=torch.inf).argmin(0)
    best = found.gather(0, least[None])[0]
    usable = torch.isfinite(best) & (fitted.gather(0, least[None])[0] > 0)
    return torch.where(usable, best, scale), torch.where(usable, tried[:, 0][least], zero)


def _spans(columns: int, length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + length, columns)) for start in range(0, columns, length))
