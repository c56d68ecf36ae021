"""Allocation of the outputs of quantising operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epiloq._torch.checks import expect_flags, expect_positive
from epiloq.weights.block_quant_weight import round_up
from epiloq.weights.tensor_checks import refuse

_FUSED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def expect_choice(operation: str, argument: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        refuse(operation, argument, " or ".join(map(str, choices)), value)


def expect_layout(operation: str, granularity: str, group_size: int, scale_layout: str, pad_to: int) -> None:
    """Check what decides the outputs' shapes and strides, before their allocation."""
    expect_choice(operation, "scale_layout", scale_layout, ("row", "column"))
    expect_positive(operation, group_size=group_size, pad_to=pad_to)
    if scale_layout == "column" and granularity != "group":
        refuse(operation, "scale_layout", f'"row" for granularity {granularity}', '"column"')


def expect_measure(
    operation: str,
    dtype: torch.dtype,
    granularity: str,
    group_size: int,
    ue8m0: bool,
    scale_layout: str,
    pad_to: int,
) -> None:
    """Check how the quantisers that are fused with another operation measure scales."""
    expect_choice(operation, "dtype", dtype, _FUSED_DTYPES)
    expect_choice(operation, "granularity", granularity, ("token", "group"))
    expect_layout(operation, granularity, group_size, scale_layout, pad_to)
    expect_flags(operation, ue8m0=ue8m0)


def empty_q(operation: str, x: Tensor, dtype: torch.dtype, columns: int, pad_to: int) -> Tensor:
    """``columns`` values for each row of ``x``, rounded up to a multiple of ``pad_to``."""
    if x.ndim == 0:
        refuse(operation, "x", "at least one dimension", "a scalar")
    return x.new_empty(*x.shape[:-1], round_up(columns, pad_to), dtype=dtype)


def empty_scale(x: Tensor, columns: int, granularity: str, group_size: int, scale_layout: str = "row") -> Tensor:
    """The scales of ``columns`` values for each row of ``x``; in the column layout, rows are neighbours."""
    leading = x.shape[:-1]
    if granularity == "tensor":
        return x.new_empty((1,), dtype=torch.float32)
    if granularity == "token":
        return x.new_empty(*leading, 1, dtype=torch.float32)
    groups = (columns + group_size - 1) // group_size
    if granularity == "block":
        return x.new_empty(((x.shape[0] + group_size - 1) // group_size, groups), dtype=torch.float32)
    if scale_layout == "row":
        return x.new_empty(*leading, groups, dtype=torch.float32)
    strides = [math.prod(leading[i + 1 :]) for i in range(len(leading))]
    pitch = max(round_up(math.prod(leading), 4), 1)
    return x.new_empty_strided((*leading, groups), (*strides, pitch), dtype=torch.float32)
