"""Dequantisation of packed weights as an operator, for compiled and transformed code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct
from epiloq._torch.library import register


def dequantize_weight(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantise the tensors of a `PackedWeight` to ``[n, k]``, with columns in packed order.

    Product and sum are each rounded to fp32, then to ``dtype``.
    """
    arguments = (q, scale, zero, offset, bits, n, k, group_size, dtype)
    if direct((q, scale), (zero, offset)):
        return _run(*arguments)
    result: Tensor = torch.ops.epiloq.dequantize_weight(*arguments)
    return result


def _run(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    out = scale.new_empty((n, k), dtype=dtype)
    _core.dequantize_weight(out, q, scale, zero, offset, bits, n, k, group_size)
    return out


def _fake(q: Tensor, scale: Tensor, zero: Tensor | None, offset: Tensor | None, *rest: Any) -> Tensor:
    _, n, k, _, dtype = rest
    return scale.new_empty((n, k), dtype=dtype)


register(
    "dequantize_weight",
    "dequantize_weight(Tensor q, Tensor scale, Tensor? zero, Tensor? offset, int bits, SymInt n, SymInt k, "
    "int group_size, ScalarType dtype) -> Tensor",
    _run,
    _fake,
)
