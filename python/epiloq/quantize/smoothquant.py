"""SmoothQuant (Xiao et al., 2023): move the range of activations into weights, channel by channel, before W8A8.

A linear layer computes ``x W^T``. Dividing channel j of x by ``s_j`` where x is made (a norm's weight, or the rows of
the linear layer before a gated product) and multiplying column j of W by it changes nothing in real numbers, and evens
out what an int8 scale per token has to span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from epiloq.quantize.grid import Grid, rtn
from epiloq.quantize.inputs import Calibrate, Observed, observe, outputs
from epiloq.quantize.static import input_grid, static_int8, token_error
from epiloq.schemes import default_filter

SMALLEST = 1e-5
ALPHA = 0.5
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
INT8 = Grid(8, symmetric=True)


@dataclass(frozen=True)
class Smoothed:
    """One folding: the module that makes the input, the linear layers that read it, and ``s``, float32 ``[K]``."""

    producer: str
    consumers: tuple[str, ...]
    scale: Tensor


def smooth_scale(amax: Tensor, weights: Sequence[Tensor], alpha: float = ALPHA) -> Tensor:
    """``s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)``, float32 ``[K]``; 1 where a channel is never used.

    Args:
        amax: ``[K]``, the largest magnitude in each channel of the inputs.
        weights: ``[N_i, K]``, of every layer that reads them.
        alpha: how much of the difficulty moves into the weights, 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"smooth_scale: alpha: expected 0 to 1, got {alpha}")
    inputs = amax.float()
    columns = torch.stack([weight.detach().abs().amax(0).float() for weight in weights]).amax(0)
    scale = inputs.clamp(min=SMALLEST) ** alpha / columns.clamp(min=SMALLEST) ** (1 - alpha)
    return torch.where((inputs > 0) & (columns > 0), scale.clamp(min=SMALLEST), torch.ones_like(scale))


@torch.no_grad()
def search_smooth_scale(x: Tensor, amax: Tensor, weights: Sequence[Tensor], static: bool = False) -> Tensor:
    """`smooth_scale` with the alpha of `ALPHAS` whose int8 product is nearest to the exact one on a sample.

    Args:
        x: ``[T, K]``, some of the inputs; each token gets a scale, as in W8A8.
        amax, weights: as for `smooth_scale`.
        static: one scale and zero point, which span the sample and `amax`, for all tokens instead; nearest is then
            what has the least `token_error`.
    """
    weight = torch.cat([weight.float() for weight in weights])
    tokens = x.reshape(-1, x.shape[-1]).float()
    exact = tokens @ weight.t()
    best, least = torch.ones_like(amax), torch.inf
    for alpha in ALPHAS:
        scale = smooth_scale(amax, weights, alpha)
        rounded = rtn(weight * scale, INT8).dequantize()
        if static:
            reach = (amax / scale).max()
            error = token_error(tokens / scale, static_int8(tokens / scale, input_grid(-reach, reach)), rounded)
        else:
            error = float((rtn(tokens / scale, INT8).dequantize() @ rounded.t() - exact).square().sum())
        if error < least:
            best, least = scale, error
    return best


@torch.no_grad()
def fold_(producer: nn.Module, consumers: Sequence[nn.Linear], scale: Tensor) -> None:
    """Divide the producer's output channels by ``scale`` [K], multiply the consumers' input channels by it, in place.

    The producer has a weight ``[K]`` (a norm) or ``[K, ..]`` (a linear layer), and perhaps a bias ``[K]``.
    """
    weight, bias = producer.weight, getattr(producer, "bias", None)
    if not isinstance(weight, Tensor) or weight.shape[0] != scale.numel():
        raise ValueError(f"fold_: producer: expected a weight with {scale.numel()} rows, got {type(producer).__name__}")
    weight.div_(scale.to(weight.dtype).reshape(-1, *[1] * (weight.ndim - 1)))
    if isinstance(bias, Tensor):
        bias.div_(scale.to(bias.dtype))
    for consumer in consumers:
        consumer.weight.mul_(scale.to(consumer.weight.dtype))


def smoothquant_(
    model: nn.Module,
    calibrate: Calibrate,
    *,
    alpha: float = ALPHA,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> tuple[Smoothed, ...]:
    """Smooth every foldable input of `model`'s linear layers in place; then quantise it with `epiloq.quantize_`.

    What can be folded is found by running the model. A norm whose output is a linear layer's input, and a linear layer
    before a gated product, are candidates. A candidate is taken only if folding powers of two leaves the model's output
    the same bit for bit, so a norm that something else reads as well (a residual, another kind of layer) is left alone.

    Args:
        calibrate: ``calibrate(model)`` runs the model on sample inputs; its first call also serves as the probe.
        alpha: as for `smooth_scale`.
        filter_fn: ``filter_fn(module, name) -> bool``, which linear layers will be quantised; as for `quantize_`.

    Returns:
        What was folded, in the order of the model's run.

    Raises:
        ValueError: `calibrate` did not call the model, or `alpha` is out of range.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"smoothquant_: alpha: expected 0 to 1, got {alpha}")
    seen = observe(model, calibrate)
    takes = default_filter(model) if filter_fn is None else filter_fn
    done = []
    for producer, names in foldings(model, seen, takes):
        consumers = linears(model, names)
        amax = torch.stack([seen.amax[name] for name in names]).amax(0)
        scale = smooth_scale(amax, [linear.weight for linear in consumers], alpha)
        done.append((consumers, Smoothed(producer, names, scale)))
    for consumers, smoothed in done:
        fold_(model.get_submodule(smoothed.producer), consumers, smoothed.scale)
    return tuple(smoothed for _, smoothed in done)


@torch.no_grad()
def foldings(
    model: nn.Module, seen: Observed, takes: Callable[[nn.Module, str], bool]
) -> list[tuple[str, tuple[str, ...]]]:
    """The candidates of a run that can be folded exactly: a producer and every linear layer that reads it, by name.

    Those are left out of which no consumer is wanted, as ``takes(module, name)`` says.
    """
    before = outputs(model, seen)
    found = []
    for producer, names in seen.feeds.items():
        consumers = linears(model, names)
        if any(takes(consumer, name) for consumer, name in zip(consumers, names, strict=True)) and _foldable(
            model, seen, before, model.get_submodule(producer), consumers
        ):
            found.append((producer, tuple(names)))
    return found


def linears(model: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The linear layers of those names."""
    return [module for module in map(model.get_submodule, names) if isinstance(module, nn.Linear)]


def _foldable(
    model: nn.Module, seen: Observed, before: list[Tensor], producer: nn.Module, consumers: list[nn.Linear]
) -> bool:
    """Whether folding powers of two, which are exact in floating point, leaves every output bit as it was."""
    channels = consumers[0].in_features
    weight = consumers[0].weight
    powers = 2.0 ** (torch.arange(channels, device=weight.device) % 3 - 1)
    fold_(producer, consumers, powers)
    after = outputs(model, seen)
    fold_(producer, consumers, 1 / powers)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
