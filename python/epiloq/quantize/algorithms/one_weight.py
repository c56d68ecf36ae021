"""Rounding of one weight by an algorithm, after any folding; used for a model's layers and for a budget's costs."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq.quantize.algorithms.gptq import gptq
from epiloq.quantize.algorithms.refine import refine
from epiloq.quantize.algorithms.table import Algorithm
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.rounding import Codebook, rtn


def round_weight(
    weight: Tensor, grid: Codebook[Calibrated], algorithm: Algorithm, hessian: Tensor | None = None
) -> Calibrated:
    """Round the rows ``[N, K]`` of layers that share an input; `hessian` is the input's ``[K, K]``, if known."""
    if not algorithm.compensate:
        return rtn(weight, grid, clip_moments(weight, algorithm, hessian))
    assert hessian is not None  # `Algorithm.needs_inputs`
    best = algorithm.clip == "best"
    value: Calibrated = gptq(
        weight, hessian, grid, moments="best" if best else clip_moments(weight, algorithm, hessian)
    )
    return refine(value, weight, hessian) if algorithm.refine else value


def clip_moments(weight: Tensor, algorithm: Algorithm, hessian: Tensor | None) -> Tensor | None:
    """The `moments` by which an algorithm clips ranges; see `fit`. "best" is weighted by the Hessian's diagonal."""
    if algorithm.clip == "mse":
        return torch.ones(weight.shape[1], device=weight.device)
    if algorithm.clip is None or hessian is None:
        return None
    return hessian if algorithm.clip == "output" else hessian.diagonal()
