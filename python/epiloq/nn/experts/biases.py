"""Biases of stacked experts, one row each, and their addition to products with rows sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from epiloq._torch.parameters import FrozenParameter
from epiloq.nn.base.stored_tensors import expected

BIAS = "bias"
NAMES = ("gate_up_bias", "down_bias")


def register(
    module: nn.Module,
    dtype: torch.dtype | None,
    shapes: tuple[tuple[int, int], ...],
    device: torch.device | str | None,
) -> None:
    """Register zero biases of `dtype` for both products, or None if `dtype` is None."""
    for name, shape in zip(NAMES, shapes, strict=True):
        tensor = None if dtype is None else torch.zeros(shape, dtype=dtype, device=device)
        module.register_parameter(name, None if tensor is None else FrozenParameter(tensor))


def fitting_bias(part: str, given: Tensor, held: Tensor, rows: int) -> Tensor | str:
    """The bias of one layer for loading, or an error text."""
    fits = given.is_floating_point() and given.shape == held.shape
    return given if fits else expected(held, given)


def added(y: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Add to products ``[R, N]`` the bias of each row's expert; `ends` are the ends of the experts' rows.

    Rows after the last end get the last expert's bias, and are not used.
    """
    if bias is None:
        return y
    rows = torch.arange(y.shape[0], device=y.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, rows, right=True).clamp_(max=bias.shape[0] - 1)
    return y + bias[expert].to(y.dtype)
