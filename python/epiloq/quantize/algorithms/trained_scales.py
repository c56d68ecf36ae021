"""A quantised weight with trained scales: the product of a layer, and the gradient of each scale.

With codes ``c`` and scales ``s`` a layer computes ``y = x W^T`` with ``W[n, k] = s[n, g(k)] c[n, k]``, so

    dL/ds[n, g] = sum_{k in g} c[n, k] dL/dW[n, k],    dL/dW = dy^T x.

Both passes are computed by blocks of rows that fit a core's cache: neither the expanded scales nor the gradient of the
weight are written to memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epiloq._torch.dense import row_chunks
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Parameters, expand_parameters
from epiloq.weights.scales import scales_in

CACHED = 1 << 18
"""Elements of a weight that are computed at once on a CPU."""
TOKENS = 64
"""Tokens whose logits are compared at once."""


class TrainedScales:
    """A quantised weight whose scales are changed by a trained fraction."""

    def __init__(self, value: QuantizedWeight, device: torch.device) -> None:
        self.value, self.grid = value, value.grid
        parameters = Parameters(value.scale.to(device), None if value.zero is None else value.zero.to(device))
        self.scale, self.order = parameters.scale, None if value.perm is None else value.perm.to(device)
        zero = expand_parameters(parameters, self.grid, value.q.shape).shift
        self.codes = value.q.to(device).float() - (0 if zero is None else zero)
        self.change = torch.zeros_like(self.scale, requires_grad=True)

    def scales(self) -> Tensor:
        """The scales in the checkpoint's type."""
        exact = self.scale * (1 + self.change)
        return exact + (scales_in(exact.detach(), self.grid.scale_dtype).float() - exact).detach()

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``x W^T + bias`` for ``x […, K]``, computed and returned in `dtype`."""
        x = (x if self.order is None else x[..., self.order]).to(dtype)
        y: Tensor = _Product.apply(x, self.scales(), self.codes, self.grid)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias.to(dtype)

    def tuned_weight(self) -> QuantizedWeight:
        """The weight with the trained scales."""
        scale = self.scales().detach().to(self.value.scale.device)
        # The difference was rounded, so the scale is computed again.
        return replace(self.value, scale=scales_in(scale, self.grid.scale_dtype).float())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Tensor, codes: Tensor, grid: Grid) -> Tensor:
        weight = torch.empty_like(codes, dtype=x.dtype)
        for rows in _row_blocks(codes):
            _multiply_groups(codes[rows], scales[rows], grid, weight[rows])
        ctx.save_for_backward(x, codes, weight)
        ctx.grid = grid
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (dy,) = gradients
        x, codes, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        tokens, outputs = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]).t().contiguous()
        found = [
            _sum_of_groups((outputs[rows] @ tokens).float().mul_(codes[rows]), ctx.grid) for rows in _row_blocks(codes)
        ]
        return dx, torch.cat(found), None, None


def _row_blocks(codes: Tensor) -> Iterator[slice]:
    """Rows of a weight that are computed at once."""
    count, columns = codes.shape
    return row_chunks(count, columns, CACHED if codes.device.type == "cpu" else codes.numel())


def _multiply_groups(codes: Tensor, scales: Tensor, grid: Grid, out: Tensor) -> None:
    """Write codes ``[N, K]`` times the scales of their groups."""
    if codes.shape[1] % grid.length(codes.shape[1]) == 0:
        groups = (*scales.shape, -1)
        torch.mul(codes.view(groups), scales.unsqueeze(-1), out=out.view(groups))
    else:
        torch.mul(codes, expand_parameters(Parameters(scales), grid, codes.shape).scale, out=out)


def _sum_of_groups(values: Tensor, grid: Grid) -> Tensor:
    """The sums over each group of values ``[N, K]``, of which the last may be shorter: ``[N, G]``."""
    columns = values.shape[1]
    length = grid.length(columns)
    if columns % length:
        values = F.pad(values, (0, -columns % length))
    return values.view(len(values), -1, length).sum(-1)


class Divergence(torch.autograd.Function):
    """``KL(teacher || model)`` per token, in nats, of logits ``[T, V]``: a float32 scalar.

    Its gradient with respect to the model's logits is ``(softmax(logits) - softmax(teacher)) / T``.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor) -> Tensor:
        count, needed = len(logits), ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits, dtype=torch.float32) if needed else None
        total = logits.new_zeros((), dtype=torch.float32)
        for rows in (slice(begin, begin + TOKENS) for begin in range(0, count, TOKENS)):
            wanted = teacher[rows].float().log_softmax(-1)
            found = logits[rows].float().log_softmax(-1)
            likely = wanted.exp()
            total += (likely * wanted.sub_(found)).sum() / count
            if gradient is not None:
                torch.sub(found.exp_(), likely, out=gradient[rows]).div_(count)
        if gradient is not None:
            ctx.save_for_backward(gradient)
            ctx.dtype = logits.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.dtype), None
