"""SmoothQuant (Xiao et al., 2023): move the range of activations into weights, channel by channel, before W8A8.

A linear layer computes ``x W^T``. Dividing channel j of x by ``s_j`` in the preceding layer (a norm's weight, or the
rows of the linear layer before a gated product) and multiplying column j of W by it does not change the exact result,
and reduces the range that an int8 scale per token has to cover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from epiloq.layer_filter import check_callable, default_filter
from epiloq.observers import evaluating
from epiloq.quantize.calibration.channels import channel_map, reduce_by_channel, restored, widened
from epiloq.quantize.calibration.inputs import Calibrate, Observed, observe, outputs
from epiloq.quantize.calibration.static import input_grid, static_int8, token_error
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.computed import bake_, computed_parts
from epiloq.weights.grid import Grid
from epiloq.weights.rounding import Codebook, check_finite, rtn

SMALLEST = 1e-5
ALPHA = 0.5
# Linear layers before another that may feed it through attention: queries, keys and values, in any order.
NEAREST = 3
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
INT8 = Grid(8, symmetric=True)


@dataclass(frozen=True)
class Smoothed:
    """One folding: the producer of the input, the linear layers that read it, and ``s``, float32 ``[K]``."""

    producer: str
    consumers: tuple[str, ...]
    scale: Tensor


def smooth_scale(
    amax: Tensor, weights: Sequence[Tensor], alpha: float = ALPHA, channels: Tensor | None = None
) -> Tensor:
    """``s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)``, float32 ``[K]``; 1 for unused channels.

    Args:
        amax: ``[K]``, the largest magnitude in each channel of the inputs.
        weights: ``[N_i, K]``, one for every layer that reads them.
        alpha: how much of the range is moved into the weights, 0 to 1.
        channels: ``[K]``; channels with the same number share a scale (see `channel_map`).

    Raises:
        ValueError: `alpha` out of range, or NaN or infinity in `amax` or a weight.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"smooth_scale: alpha: expected 0 to 1, got {alpha}")
    check_finite("amax", amax)
    for weight in weights:
        check_finite("weight", weight)
    inputs = reduce_by_channel(amax.float(), channels, "amax")
    columns = torch.stack([weight.detach().abs().amax(0).float() for weight in weights]).amax(0)
    columns = reduce_by_channel(columns, channels, "amax")
    scale = inputs.clamp(min=SMALLEST) ** alpha / columns.clamp(min=SMALLEST) ** (1 - alpha)
    return torch.where((inputs > 0) & (columns > 0), scale.clamp(min=SMALLEST), torch.ones_like(scale))


@torch.no_grad()
def search_smooth_scale(
    x: Tensor,
    amax: Tensor,
    weights: Sequence[Tensor],
    static: bool = False,
    channels: Tensor | None = None,
    *,
    grid: Codebook[Calibrated] = INT8,
    inputs: Codebook[Calibrated] = INT8,
) -> Tensor:
    """`smooth_scale` with the alpha from `ALPHAS` whose quantised product is closest to the exact one on a sample.

    Args:
        x: ``[T, K]``, a sample of the inputs.
        amax, weights, channels: as for `smooth_scale`.
        static: use one scale and zero point for all tokens, which cover the sample and `amax`, and minimise
            `token_error`.
        grid, inputs: how weights and inputs are rounded; by default as in W8A8, with a scale per channel and token.

    Raises:
        ValueError: NaN or infinity in an argument, or products whose squares overflow float32.
    """
    check_finite("x", x)
    weight = torch.cat([weight.float() for weight in weights])
    tokens = x.reshape(-1, x.shape[-1]).float()
    exact = tokens @ weight.t()
    best, least = None, torch.inf
    for alpha in ALPHAS:
        scale = smooth_scale(amax, weights, alpha, channels)
        rounded = torch.cat([rtn(weight.float() * scale, grid).dequantize() for weight in weights])
        if static:
            reach = (amax / scale).max()
            error = token_error(tokens / scale, static_int8(tokens / scale, input_grid(-reach, reach)), rounded)
        else:
            error = float((rtn(tokens / scale, inputs).dequantize() @ rounded.t() - exact).square().sum())
        if error < least:
            best, least = scale, error
    if best is None:
        raise ValueError("search_smooth_scale: x: expected products whose squares are finite in float32, got others")
    return best


@torch.no_grad()
def fold_(producer: nn.Module, consumers: Sequence[nn.Linear], scale: Tensor, channels: Tensor | None = None) -> None:
    """Divide the producer's output channels by ``scale`` [K], multiply the consumers' input channels by it, in place.

    The producer has a weight ``[K]`` (a norm) or ``[K, …]`` (a linear layer), and optionally a bias ``[K]``. With
    `channels` (see `channel_map`) it has one row per distinct number, and each row is divided by the scale that the
    channels with its number share.

    Raises:
        ValueError: a producer that does not fit the scale, a computed weight, or weights that would no longer be finite
            in their type; nothing is changed then.
    """
    folded = _folded(producer, consumers, scale, channels)
    _check_finite("fold_", folded)
    _set(folded)


@torch.no_grad()
def _folded(
    producer: nn.Module, consumers: Sequence[nn.Linear], scale: Tensor, channels: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """The tensors that `fold_` changes, each with its new value."""
    if channels is not None:
        spread, scale = scale, torch.ones_like(scale[: int(channels.max()) + 1]).index_copy(0, channels, scale)
    else:
        spread = scale
    for module in (producer, *consumers):
        if parts := computed_parts(module):
            raise ValueError(
                f"fold_: {type(module).__name__}.{parts[0]}: expected a parameter, but it is computed anew from "
                "others: remove what computes it first, as torch.nn.utils.parametrize.remove_parametrizations does"
            )
    weight, bias = producer.weight, getattr(producer, "bias", None)
    if not isinstance(weight, Tensor) or weight.shape[0] != scale.numel():
        raise ValueError(f"fold_: producer: expected a weight with {scale.numel()} rows, got {type(producer).__name__}")
    changed = [(weight, weight / scale.to(weight.dtype).reshape(-1, *[1] * (weight.ndim - 1)))]
    if isinstance(bias, Tensor):
        changed.append((bias, bias / scale.to(bias.dtype)))
    changed += [(consumer.weight, consumer.weight * spread.to(consumer.weight.dtype)) for consumer in consumers]
    return changed


def _check_finite(where: str, folded: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in folded:
        if not torch.isfinite(value).all():
            raise ValueError(f"{where}: scale: expected scales that keep weights finite in {tensor.dtype}, got others")


def _set(folded: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in folded:
        tensor.copy_(value)


def smoothquant_(
    model: nn.Module,
    calibrate: Calibrate,
    *,
    alpha: float = ALPHA,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> tuple[Smoothed, ...]:
    """Smooth every foldable input of `model`'s linear layers in place; then quantise it with `epiloq.quantize_`.

    Foldable inputs are found by running the model. Candidates are a norm whose output is a linear layer's input, a
    linear layer before a gated product, and one whose channels attention sums over (values, also of grouped heads). A
    candidate is used only if folding powers of two leaves the model's output bit-identical, so a norm that is also
    read by others (a residual, another kind of layer) is not changed, nor one with a computed weight. Computed
    weights of selected linear layers (`torch.nn.utils.parametrize`, pruning) become parameters.

    Args:
        calibrate: ``calibrate(model)`` runs the model on sample inputs; its first call is also used as the probe.
        alpha: as for `smooth_scale`.
        filter_fn: ``filter_fn(module, name) -> bool``, selects the linear layers that will be quantised; as for
        `quantize_`.

    Returns:
        The foldings: norms and gated products in the order in which the model runs them, then values.

    Raises:
        ValueError: `calibrate` did not call the model, `alpha` is out of range, a selected layer's weight is computed
            in an unsupported way, or NaN or infinity occurred: in a layer's input (the message names the layer), in the
            model's output for the first sample, or in a weight after folding. No weight is changed then.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"smoothquant_: alpha: expected 0 to 1, got {alpha}")
    check_callable(filter_fn, "smoothquant_: filter_fn", "filter_fn(module, name)")
    check_callable(calibrate, "smoothquant_: calibrate", "calibrate(model)")
    takes = default_filter(model) if filter_fn is None else filter_fn
    with evaluating(model):
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and takes(module, name):
                bake_(name, module)
    seen = observe(model, calibrate)
    for name, amax in seen.amax.items():
        if amax.is_meta:
            raise ValueError(f"smoothquant_: calibrate: {name}: expected inputs with values, got tensors on meta")
        if not torch.isfinite(amax).all():
            raise ValueError(f"smoothquant_: calibrate: {name}: expected finite inputs, got NaN or infinity")
    done = []
    for folding in foldings(model, seen, takes):
        amax = torch.stack([seen.amax[name] for name in folding.consumers]).amax(0)
        weights = [linear.weight for linear in linears(model, folding.consumers)]
        done.append((folding, smooth_scale(amax, weights, alpha, folding.channels)))
    for (producer, names, channels), scale in done:  # before anything is changed
        folded = _folded(model.get_submodule(producer), linears(model, names), scale, channels)
        _check_finite(f"smoothquant_: {', '.join(names)}", folded)
    for (producer, names, channels), scale in done:
        fold_(model.get_submodule(producer), linears(model, names), scale, channels)
    return tuple(Smoothed(producer, names, scale) for (producer, names, _), scale in done)


class Folding(NamedTuple):
    """A producer and every linear layer that reads it, by name, and the `channels` for `fold_`."""

    producer: str
    consumers: tuple[str, ...]
    channels: Tensor | None = None


@torch.no_grad()
def foldings(model: nn.Module, seen: Observed, takes: Callable[[nn.Module, str], bool]) -> list[Folding]:
    """The exact foldings of a run: the candidates that were seen, and linear layers that attention sums over.

    Candidates without a consumer selected by ``takes(module, name)`` are left out. A float16 model is temporarily
    also held in float32, because in float16 halving rounds values below 2^-13, which most weights contain.

    Raises:
        ValueError: an output is NaN, with which every candidate would seem inexact.
    """
    wanted = {name for name in seen.amax if takes(model.get_submodule(name), name)}
    found = []
    with widened(model):
        wide = replace(seen, probe=tree_map(_widened, seen.probe))
        before = outputs(model, wide)
        if any(bool(output.isnan().any()) for output in before):
            raise ValueError("smoothquant: outputs of the first sample: expected numbers, got NaN")
        for producer, names in seen.feeds.items():
            folding = Folding(producer, tuple(names))
            if wanted.intersection(names) and _foldable(model, wide, before, folding):
                found.append(folding)
        folded = {name for folding in found for name in folding.consumers}
        alone = [name for name in seen.amax if name in wanted - folded]
        return found + [f for name in alone if (f := _mapped(model, wide, before, name)) is not None]


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value


def _mapped(model: nn.Module, seen: Observed, before: list[Tensor], name: str) -> Folding | None:
    """The folding into one of the linear layers that just ran before a layer, if its input is their channels."""
    ran = list(seen.amax)
    (consumer,) = linears(model, [name])
    for producer in reversed(ran[: ran.index(name)][-NEAREST:]):
        channels = channel_map(linears(model, [producer])[0], consumer, lambda: outputs(model, seen))
        if channels is not None:
            folding = Folding(producer, (name,), channels)
            return folding if _foldable(model, seen, before, folding) else None
    return None


def linears(model: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The linear layers with these names."""
    return [module for module in map(model.get_submodule, names) if isinstance(module, nn.Linear)]


def _foldable(model: nn.Module, seen: Observed, before: list[Tensor], folding: Folding) -> bool:
    """Whether folding powers of two, which are exact in floating point, leaves the output bit-identical."""
    producer, consumers = model.get_submodule(folding.producer), linears(model, folding.consumers)
    if any(computed_parts(module) for module in (producer, *consumers)):
        return False
    weight = consumers[0].weight
    numbers = torch.arange(weight.shape[1], device=weight.device) if folding.channels is None else folding.channels
    with restored([producer, *consumers]):
        _set(_folded(producer, consumers, 2.0 ** (numbers % 3 - 1), folding.channels))
        after = outputs(model, seen)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
