"""AWQ (Lin et al., 2023): scale up the weights of channels with large inputs to reduce the effect of rounding them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epiloq.quantize.algorithms.hessians import check_hessian
from epiloq.quantize.calibration.channels import reduce_by_channel
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.rounding import Codebook, Rounded, check_finite, rtn

RATIOS = 20
SMALLEST = 1e-4


@torch.no_grad()
def awq_scale(
    weights: Sequence[Tensor],
    hessian: Tensor,
    mean_abs: Tensor,
    grid: Codebook[Calibrated],
    *,
    ratios: int = RATIOS,
    channels: Tensor | None = None,
) -> Tensor:
    """The scale ``s``, float32 ``[K]``, for layers that share an input: ``W s`` should be quantised.

    ``s = mean|x|^r``, normalised to ``sqrt(max s * min s) = 1``; among r = 0, 1/ratios, … the value with the least
    output error ``sum_i |x (Q(W_i s) / s - W_i)^T|^2`` of round-to-nearest is chosen. r = 0 means no scaling, so the
    result is never worse on the calibration inputs. Fold it with ``fold_(producer, consumers, s)``.

    Args:
        weights: ``[N_i, K]``, one for every layer that reads the input.
        hessian: ``[K, K]``, ``sum x x^T`` in any scale.
        mean_abs: ``[K]``, the mean magnitude of each input channel.
        channels: ``[K]``; channels with the same number share a scale (see `channel_map`).

    Raises:
        ValueError: `ratios` out of range, a Hessian that `check_hessian` refuses, NaN or infinity, or output errors
            that overflow float32.
    """
    if ratios < 1:
        raise ValueError(f"awq_scale: ratios: expected at least 1, got {ratios}")
    check_hessian("awq_scale", hessian, mean_abs.numel())
    check_finite("mean_abs", mean_abs)
    magnitudes = reduce_by_channel(mean_abs.float(), channels, "mean")
    best, least = None, torch.inf
    for step in range(ratios):
        scale = magnitudes.pow(step / ratios).clamp_(min=SMALLEST)
        scale /= (scale.max() * scale.min()).sqrt()
        # Layers are rounded one by one, since their rows do not share scales.
        error = sum(
            output_error(rtn(weight.float() * scale, grid).dequantize().div_(scale).sub_(weight), hessian)
            for weight in weights
        )
        if error < least:
            best, least = scale, error
    if best is None:
        raise ValueError("awq_scale: hessian: expected output errors that are finite in float32, got others")
    return best


@torch.no_grad()
def awq(weight: Tensor, hessian: Tensor, grid: Codebook[Rounded]) -> Rounded:
    """Round an already scaled weight ``[N, K]`` to nearest, with each group's range clipped by AWQ's search.

    Args:
        hessian: ``[K, K]``, ``sum x x^T`` of the scaled inputs, in any scale.

    Raises:
        ValueError: mismatching shapes, non-finite numbers, or a Hessian that `check_hessian` refuses.
    """
    if weight.ndim != 2:
        raise ValueError(f"awq: weight: expected two dimensions [N, K], got {list(weight.shape)}")
    check_hessian("awq", hessian, weight.shape[1])
    return rtn(weight, grid, hessian)


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """``trace(D H D^T)``: the squared output error of a weight with the error D ``[N, K]``, in the Hessian's scale."""
    # In this order, so that NaN stays NaN.
    return max(float(((difference @ hessian.to(difference.dtype)) * difference).sum()), 0.0)
