"""AutoRound (Cheng et al., arXiv 2309.05516): learn where weights round to, and their ranges, by signed gradients.

Each weight has an offset of at most half a step, added before it is rounded, and each group the parts of its smallest
and largest value that its range spans. They are trained together for a block of layers, on the block's output error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Parameters, check_finite, spread
from epiloq.weights.scales import scales_in

STEPS = 200
BATCH = 4
"""Windows in a step."""
CHECKS = 10
"""How often the whole error is measured."""

Run = Callable[[Mapping[str, Tensor], int], Tensor]
"""``run(weights, window)``: the block's output in a window with other weights, by layer."""


@torch.no_grad()
def autoround(
    run: Run,
    weights: Mapping[str, Tensor],
    windows: int,
    grid: Grid,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    seed: int = 0,
) -> dict[str, QuantizedWeight]:
    """Quantise the layers of a block so that its output error is small: the best of what training went through.

    The error of all windows together is measured before the first step, which rounds to nearest, and ten times on the
    way, so the result is never worse than that.

    Args:
        weights: ``[N, K]`` by layer.
        windows: how many there are; ``run(weights, i)`` must be differentiable by weights for i below that.
        grid: integers on which the weights come to lie.
        steps: of signed gradient descent; the rate falls linearly from ``1 / steps``.
        batch: windows in a step, drawn by `seed`.

    Raises:
        ValueError: numbers that are not finite, or arguments out of range.
    """
    for name, lowest, value in (("windows", 1, windows), ("steps", 0, steps), ("batch", 1, batch)):
        if value < lowest:
            raise ValueError(f"autoround: {name}: expected at least {lowest}, got {value}")
    for weight in weights.values():
        check_finite("weight", weight)
    learned = {name: _Learned(weight, grid) for name, weight in weights.items()}
    targets = [run(weights, window) for window in range(windows)]

    def lost(window: int) -> Tensor:
        rounded = {name: layer.restored().to(weights[name].dtype) for name, layer in learned.items()}
        return (run(rounded, window).float() - targets[window].float()).square().mean()

    draw = torch.Generator().manual_seed(seed)
    best, least = {name: layer.kept() for name, layer in learned.items()}, _total(lost, windows)
    every = max(1, steps // CHECKS)
    for step in range(steps):
        chosen = torch.randperm(windows, generator=draw)[:batch].tolist()
        with torch.enable_grad():
            parameters = [parameter for layer in learned.values() for parameter in layer.parameters()]
            loss = torch.stack([lost(window) for window in chosen]).sum()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        rate = (1 - step / steps) / steps
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(rate * gradient.sign())
        for layer in learned.values():
            layer.clamp_()
        if (step + 1) % every == 0 or step + 1 == steps:
            found = _total(lost, windows)
            if found < least:
                best, least = {name: layer.kept() for name, layer in learned.items()}, found
    return best


def _total(lost: Callable[[int], Tensor], windows: int) -> float:
    return float(sum(float(lost(window)) for window in range(windows)))


@dataclass
class _Learned:
    """A layer's weight while offsets and ranges are trained."""

    weight: Tensor
    grid: Grid

    def __post_init__(self) -> None:
        self.weight = self.weight.detach().float()
        self.grid = self.grid.suited(self.weight)
        count, columns = self.weight.shape
        length = self.grid.length(columns)
        missing = -columns % length
        padded = torch.nn.functional.pad(self.weight, (0, missing)).view(count, -1, length)
        # Zeros that fill the last group change no range, since every range spans 0.
        self.low, self.high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
        self.offset = torch.zeros_like(self.weight, requires_grad=True)
        self.down = torch.ones_like(self.low, requires_grad=True)
        self.up = torch.ones_like(self.low, requires_grad=True)

    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [self.offset, self.down, self.up]

    def clamp_(self) -> None:
        """Keep offsets within half a step, and ranges between nothing and the whole."""
        self.offset.clamp_(-0.5, 0.5)
        self.down.clamp_(0, 1)
        self.up.clamp_(0, 1)

    def restored(self) -> Tensor:
        """The rounded weight, differentiable as if rounding were the identity."""
        q, parameters = self._codes()
        wide = spread(parameters, self.grid, self.weight.shape)
        return (q if wide.shift is None else q - wide.shift) * wide.scale

    def kept(self) -> QuantizedWeight:
        """The rounded weight."""
        q, parameters = self._codes()
        return self.grid.kept(q.detach().to(self.grid.dtype), parameters.map(Tensor.detach))

    def _codes(self) -> tuple[Tensor, Parameters]:
        low, high, steps = self.low * self.down, self.high * self.up, (1 << self.grid.bits) - 1
        span = 2 * torch.maximum(-low, high) if self.grid.symmetric else high - low
        exact = span / span.new_tensor(steps)
        scale = _through(exact, scales_in(exact.detach(), self.grid.scale_dtype).float())
        shift = None
        if not self.grid.symmetric:
            zero = -low / scale
            shift = _through(zero, zero.detach().round()).clamp(0, steps)
        parameters = Parameters(scale, shift)
        wide = spread(parameters, self.grid, self.weight.shape)
        moved = self.weight / wide.scale + self.offset
        q = _through(moved, moved.detach().round())
        return (q if wide.shift is None else q + wide.shift).clamp(self.grid.lowest, self.grid.highest), parameters


def _through(exact: Tensor, rounded: Tensor) -> Tensor:
    """A rounded value, bit for bit, with the gradient of the exact one."""
    return _Through.apply(exact, rounded)  # type: ignore[no-untyped-call,no-any-return]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
