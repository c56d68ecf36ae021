"""AutoRound (Cheng et al., arXiv 2309.05516): learn the rounding and the ranges of weights by signed gradients.

Each weight has an offset of at most half a step, added before rounding, and both ends of each group's range are
trained too. All layers of a block are trained together, on the error of the block's output relative to each token's
norm, because the following norms divide by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Parameters, check_finite, expand_parameters, rtn
from epiloq.weights.scales import scales_in

STEPS = 200
BATCH = 4
"""Windows in a step."""
CHECKS = 10
"""Number of times the error is measured."""
HELD_OUT = 4
"""One window in four is held out of training and used to measure the error."""
INSIDE = 0.1
"""Distance in steps by which a weight is moved into the cell of its code, if that is not the nearest code."""

Run = Callable[[Mapping[str, Tensor], int], Tensor]
"""``run(weights, window)``: the block's output in a window with other weights, by layer."""


@torch.no_grad()
def autoround(
    run: Run,
    weights: Mapping[str, Tensor],
    windows: int,
    grid: Grid,
    *,
    targets: Sequence[Tensor] | None = None,
    start: Mapping[str, QuantizedWeight] | None = None,
    steps: int = STEPS,
    batch: int = BATCH,
    seed: int = 0,
) -> dict[str, QuantizedWeight]:
    """Quantise the layers of a block so that its output error is small; returns the best state seen during training.

    The error is ``mean(|y - target|^2 / |target|^2)`` over tokens. With four windows or more, the last quarter is held
    out of training, and the error on it (otherwise on all windows) is measured before the first step and ten times
    during training, so the result is never worse than the start there. Training can overfit a small calibration set.

    Args:
        weights: ``[N, K]`` by layer.
        windows: their number; ``run(weights, i)`` must be differentiable with respect to weights for each i below it.
        grid: integer grid for the weights.
        targets: desired output of the block for each window; by default its output with the exact weights.
        start: rounded weights by layer, in the layers' order of channels, whose grids are used instead of `grid`; by
            default the weights are rounded to nearest.
        steps: number of signed gradient descent steps; the learning rate decreases linearly from ``1 / steps``.
        batch: number of windows per step, drawn with `seed`.

    Raises:
        ValueError: non-finite numbers, or arguments out of range.
    """
    for name, lowest, value in (("windows", 1, windows), ("steps", 0, steps), ("batch", 1, batch)):
        if value < lowest:
            raise ValueError(f"autoround: {name}: expected at least {lowest}, got {value}")
    if targets is not None and len(targets) != windows:
        raise ValueError(f"autoround: targets: expected one for each of {windows} windows, got {len(targets)}")
    for weight in weights.values():
        check_finite("weight", weight)
    if start is None:
        start = {name: rtn(weight, grid) for name, weight in weights.items()}
    learned = {name: _Learned(weight, start[name]) for name, weight in weights.items()}
    wanted = [run(weights, window) for window in range(windows)] if targets is None else targets
    for target in wanted:
        check_finite("targets", target)

    def lost(chosen: Sequence[int]) -> Tensor:
        rounded = {name: layer.restored().to(weights[name].dtype) for name, layer in learned.items()}
        return torch.stack([_relative_error(run(rounded, window), wanted[window]) for window in chosen]).mean()

    draw, trained = torch.Generator().manual_seed(seed), windows - windows // HELD_OUT
    checked = range(trained if trained < windows else 0, windows)
    best, least = {name: layer.rounded() for name, layer in learned.items()}, float(lost(checked))
    every = max(1, steps // CHECKS)
    for step in range(steps):
        chosen = torch.randperm(trained, generator=draw)[:batch].tolist()
        with torch.enable_grad():
            parameters = [parameter for layer in learned.values() for parameter in layer.parameters()]
            gradients = torch.autograd.grad(lost(chosen), parameters, allow_unused=True)
        rate = (1 - step / steps) / steps
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(rate * gradient.sign())
        for layer in learned.values():
            layer.clamp_()
        if (step + 1) % every == 0 or step + 1 == steps:
            found = float(lost(checked))
            if found < least:
                best, least = {name: layer.rounded() for name, layer in learned.items()}, found
    return best


def _relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean over tokens of the squared error divided by the squared norm."""
    exact = wanted.to(found.device).float()
    smallest = torch.finfo(torch.float32).tiny
    return ((found.float() - exact).square().sum(-1) / exact.square().sum(-1).clamp(min=smallest)).mean()


class _Learned:
    """A layer's weight while offsets and ranges are trained.

    A weight whose code is not the nearest one, as may happen with GPTQ, is moved just inside the cell of its code, on
    its own side, so that training can move it back.
    """

    def __init__(self, weight: Tensor, start: QuantizedWeight) -> None:
        self.grid, self.start = start.grid, start.parameters
        wide = expand_parameters(self.start, self.grid, weight.shape)
        exact = weight.detach().float()
        middle = self.grid.restore(start.q.float(), wide)
        reach = (0.5 - INSIDE) * wide.scale
        moved = torch.minimum(torch.maximum(exact, middle - reach), middle + reach)
        self.weight = torch.where(self.grid.round(exact, wide) == start.q, exact, moved)
        self.offset = torch.zeros_like(self.weight, requires_grad=True)
        self.down = torch.ones_like(start.scale, requires_grad=True)
        self.up = torch.ones_like(start.scale, requires_grad=True)

    def parameters(self) -> list[Tensor]:
        """The trained parameters."""
        return [self.offset, self.up] if self.grid.symmetric else [self.offset, self.up, self.down]

    def clamp_(self) -> None:
        """Clamp offsets to half a step, and the ends of ranges to between 0.5 and 1.5 of the initial ones."""
        self.offset.clamp_(-0.5, 0.5)
        self.down.clamp_(0.5, 1.5)
        self.up.clamp_(0.5, 1.5)

    def restored(self) -> Tensor:
        """The rounded weight, differentiable as if rounding were the identity."""
        q, parameters = self._codes()
        wide = expand_parameters(parameters, self.grid, self.weight.shape)
        return (q if wide.shift is None else q - wide.shift) * wide.scale

    def rounded(self) -> QuantizedWeight:
        """The rounded weight."""
        q, parameters = self._codes()
        return self.grid.make_weight(q.detach().to(self.grid.dtype), parameters.map(Tensor.detach))

    def _parameters(self) -> Parameters:
        """Scales and zero points of the trained ranges; before training, bit-identical to the initial ones."""
        steps, zero = (1 << self.grid.bits) - 1, self.start.shift
        if zero is None:
            exact = self.start.scale * self.up
            return Parameters(_through(exact, scales_in(exact.detach(), self.grid.scale_dtype).float()))
        below, above = self.down * zero, self.up * (steps - zero)
        width = (below + above) / steps
        exact = self.start.scale * width
        shift = below / width
        rounded = _through(shift, shift.detach().round()).clamp(0, steps)
        return Parameters(_through(exact, scales_in(exact.detach(), self.grid.scale_dtype).float()), rounded)

    def _codes(self) -> tuple[Tensor, Parameters]:
        parameters = self._parameters()
        wide = expand_parameters(parameters, self.grid, self.weight.shape)
        moved = self.weight / wide.scale + self.offset
        q = _through(moved, moved.detach().round())
        return (q if wide.shift is None else q + wide.shift).clamp(self.grid.lowest, self.grid.highest), parameters


def _through(exact: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value, bit for bit, with the gradient of the exact one (straight-through)."""
    return _Through.apply(exact, rounded)  # type: ignore[no-untyped-call,no-any-return]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
