"""Weights of tokens for guided Hessians: how much the final loss depends on each token's output of each layer.

A layer's output error d at token t increases the loss by about ``sum_i g_ti^2 d_ti^2``, where g is the gradient of the
final loss with respect to the layer's output. The mean of g^2 over a slice of the output rows is the token's weight in
``sum_t w_t x_t x_t^T`` (GuidedQuant, arXiv 2505.07004). Labels are sampled from the model's own prediction rather than
taken from the text, so the squared gradients estimate the curvature of the KL divergence from the model (Fisher
information; YAQA, arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epiloq.observers import evaluating
from epiloq.quantize.calibration.blocks import forwards_restored, parameter_device, without_cache, without_gradients
from epiloq.quantize.calibration.on_text import run_on_text

TokenWeights = Mapping[str, Tensor]
"""Weights of one window: float32 ``[tokens, slices]`` for each layer, by name."""


def token_weights(
    model: nn.Module,
    blocks: Collection[nn.Module],
    layers: Mapping[str, nn.Linear],
    windows: Sequence[Tensor],
    slices: int = 1,
) -> list[TokenWeights]:
    """The squared gradient of the final loss with respect to each token's output of each layer, averaged over slices of
    output rows.

    This is one backward pass through the floating-point model; each block is recomputed in it, so the activations of
    only one block are in memory. The result takes 4 bytes per token, layer and slice.

    Args:
        windows: int64 tokens ``[1, n]`` each; ``model(tokens).logits`` is ``[1, n, vocabulary]``.
        slices: number of slices of consecutive output rows per layer; with 1 all rows share the weights. An empty
            slice, of a layer with fewer rows, has weights of 0.

    Raises:
        ValueError: a model without logits, logits that are NaN, or a layer that does not process each token of a window
            exactly once and in order (such as a routed expert).
    """
    if slices < 1:
        raise ValueError(f"token_weights: slices: expected at least 1, got {slices}")
    # One tensor per window, allocated beforehand: small ones that outlive the window's activations fragment the heap.
    found = [torch.empty(len(layers), window.numel(), slices, dtype=torch.float32) for window in windows]
    device = parameter_device(model)
    with evaluating(model), without_cache(model), torch.enable_grad(), _differentiable(model, blocks):
        for window, kept in zip(windows, found, strict=True):
            weights: dict[str, Tensor] = {}
            with _watched(layers, partial(_note, weights, slices)):
                _loss(model, window.to(device)).backward()
            for name, place in zip(layers, kept, strict=True):
                if name not in weights or len(weights[name]) != window.numel():
                    raise ValueError(
                        f"calibrate: {name}: expected each token of a window to reach it once for guided Hessians, got "
                        f"{len(weights.get(name, ()))} of {window.numel()}: choose an algorithm that is not guided"
                    )
                place.copy_(weights[name])
    return [dict(zip(layers, kept, strict=True)) for kept in found]


def _note(weights: dict[str, Tensor], slices: int, name: str, gradient: Tensor) -> None:
    squares = gradient.detach().float().square().flatten(0, -2)
    # An empty slice, of a layer with fewer rows than slices, has weight 0.
    means = [part.mean(1) if part.shape[1] else part.sum(1) for part in squares.tensor_split(slices, 1)]
    found = torch.stack(means, 1).cpu()
    weights[name] = found if name not in weights else torch.cat((weights[name], found))


def _loss(model: nn.Module, window: Tensor) -> Tensor:
    """Negative log-likelihood of labels sampled from the prediction, summed over positions."""
    logits = getattr(run_on_text(model, window), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ValueError(
            f"calibrate: expected a model with logits [1, n, vocabulary] for guided Hessians, got "
            f"{type(model).__name__}: choose an algorithm that is not guided"
        )
    logarithms = logits[0].float().log_softmax(-1)
    if logarithms.isnan().any():
        raise ValueError(
            f"calibrate: {type(model).__name__}: expected finite logits for guided Hessians, got NaN or infinity"
        )
    # A window always has the same labels, on any rank and in any order.
    draw = torch.Generator().manual_seed(int(window.sum()))
    labels = torch.multinomial(logarithms.detach().exp().cpu(), 1, generator=draw).to(logits.device)
    return -logarithms.gather(1, labels).sum()


@contextmanager
def _differentiable(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[None]:
    """Compute gradients from the first block's input on, but not of weights; recompute blocks in the backward pass."""
    first = next(iter(blocks)).register_forward_pre_hook(_followed, with_kwargs=True)
    with first, forwards_restored(blocks), without_gradients(model):
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield


def _followed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def change(value: Any) -> Any:
        follows = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if follows else value

    return tuple(map(change, args)), {
        name: change(value) if name == "hidden_states" else value for name, value in kwargs.items()
    }


@contextmanager
def _watched(layers: Mapping[str, nn.Linear], note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``note(name, gradient)`` for the gradient of each layer's output."""

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def watch(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:  # unlike that of a layer that reads the encoder rather than the hidden states
                output.register_hook(partial(note, name))

        return watch

    with ExitStack() as handles:
        for name, layer in layers.items():
            handles.enter_context(layer.register_forward_hook(hook(name)))
        yield
