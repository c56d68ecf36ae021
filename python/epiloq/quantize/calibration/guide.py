"""How much the end loss depends on each token's output of each layer: weights of tokens for guided Hessians.

A layer's output error at token t costs the model about ``sum_i g_ti^2 d_ti^2``, g the gradient of the end loss by the
layer's output. Averaged over a slice of the output rows that is a weight of the token in ``sum_t w_t x_t x_t^T``
(GuidedQuant, arXiv 2505.07004). Labels are drawn from the model's own prediction, so the squared gradients estimate the
curvature of the divergence from the model (Fisher information), whatever the text says next (YAQA, arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epiloq.observers import evaluating
from epiloq.quantize.calibration.blocks import home_of, without_cache

TokenWeights = Mapping[str, Tensor]
"""Of one window: float32 ``[tokens, slices]`` for each layer by name."""


def token_weights(
    model: nn.Module,
    blocks: Collection[nn.Module],
    layers: Mapping[str, nn.Linear],
    windows: Sequence[Tensor],
    slices: int = 1,
) -> list[TokenWeights]:
    """The mean squared gradient of the end loss by each token's output of each layer, over slices of output rows.

    One backward pass through the floating-point model; each block runs again in it, so activations of one block at a
    time are held. The result takes 4 bytes for each token, layer and slice.

    Args:
        windows: int64 ``[1, n]`` tokens each; ``model(tokens).logits`` are ``[1, n, vocabulary]``.
        slices: of each layer's rows, neighbours; 1 weights all rows alike.

    Raises:
        ValueError: a model without logits; a layer that does not see each token of a window once, in order (a routed
            expert).
    """
    if slices < 1:
        raise ValueError(f"token_weights: slices: expected at least 1, got {slices}")
    found: list[TokenWeights] = []
    device = home_of(model)
    with evaluating(model), without_cache(model), torch.enable_grad(), _differentiable(model, blocks):
        for window in windows:
            weights: dict[str, Tensor] = {}
            with _watched(layers, partial(_note, weights, slices)):
                _loss(model, window.to(device)).backward()
            for name in layers:
                if name not in weights or len(weights[name]) != window.numel():
                    raise ValueError(
                        f"calibrate: {name}: expected each token of a window to reach it once for guided Hessians, got "
                        f"{len(weights.get(name, ()))} of {window.numel()}: choose an algorithm that is not guided"
                    )
            found.append(weights)
    return found


def _note(weights: dict[str, Tensor], slices: int, name: str, gradient: Tensor) -> None:
    squares = gradient.detach().float().square().flatten(0, -2)
    means = [part.mean(1) for part in squares.tensor_split(slices, 1)]
    found = torch.stack(means, 1).cpu()
    weights[name] = found if name not in weights else torch.cat((weights[name], found))


def _loss(model: nn.Module, window: Tensor) -> Tensor:
    """The negative log-likelihood of labels drawn from the prediction, summed over positions."""
    logits = getattr(model(window), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ValueError(
            f"calibrate: expected a model with logits [1, n, vocabulary] for guided Hessians, got "
            f"{type(model).__name__}: choose an algorithm that is not guided"
        )
    logarithms = logits[0].float().log_softmax(-1)
    # The same draw for a window wherever and after whatever it is seen.
    draw = torch.Generator().manual_seed(int(window.sum()))
    labels = torch.multinomial(logarithms.detach().exp().cpu(), 1, generator=draw).to(logits.device)
    return -logarithms.gather(1, labels).sum()


@contextmanager
def _differentiable(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[None]:
    """Follow gradients from the first block's input on, not to weights; run blocks again in the backward pass."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = [vars(block).get("forward") for block in blocks]
    first = next(iter(blocks)).register_forward_pre_hook(_followed, with_kwargs=True)
    try:
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        first.remove()
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward
        for parameter, needed in wanted:
            parameter.requires_grad_(needed)


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
        return lambda module, args, output: output.register_hook(partial(note, name)) and None

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
