"""Mixtures of experts in float64, from the dequantised weights of their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def mixture_in_float64(experts: Sequence[Mapping[str, Any]], x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """``[T, H]`` of experts given as their layers gate, up and down, for `weights` and `ids` ``[T, top_k]``."""
    result, rows = torch.zeros(x.shape, dtype=torch.float64), x.double()
    for expert, layers in enumerate(experts):
        gate, up, down = (layer.dequantized_weight().double() for layer in layers.values())
        share = (weights.double() * (ids == expert)).sum(-1, keepdim=True)
        result += share * (nn.functional.silu(rows @ gate.t()) * (rows @ up.t()) @ down.t())
    return result


def error(found: Tensor, reference: Tensor) -> float:
    """The relative error in the Frobenius norm; 0 if there are no tokens."""
    return float((found.double() - reference).norm() / reference.norm()) if reference.numel() else 0.0
