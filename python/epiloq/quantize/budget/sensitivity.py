"""What rounding each layer costs the model: its part of the KL divergence from the model in floating point, estimated.

To second order the divergence per token is half the output error of each layer, weighted by the squares of the
gradients of the log-likelihood of tokens that the model itself draws (the Fisher information, its diagonal over the
layer's outputs).
Neither needs the quantised model: one backward pass for the gradients, one walk through the blocks for the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from epiloq.layer_filter import Filter
from epiloq.observers import evaluating
from epiloq.quantize.algorithms.gptq import inverse_factor, without_dead
from epiloq.quantize.calibration.blocks import Call, find_blocks, linears_of, record, without_cache
from epiloq.quantize.calibration.inputs import input_groups
from epiloq.weights.grid import Grid
from epiloq.weights.rounding import rtn

ROWS = 128
"""Output channels of a layer that are rounded on trial; the others are taken to lose as much for their size."""
DAMPENING = 0.01
Losses = dict[tuple[str, ...], dict[str, float]]
"""For layers that read one input, by name, and each candidate: nats per token."""


def squared_gradients(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    windows: Sequence[Tensor],
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Mean squares over tokens of the gradients at each layer's outputs, float32 ``[N]``.

    Of the log-likelihood of tokens drawn from the model's own predictions, on int64 ``[1, n]`` windows.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.zeros(layer.out_features) for name, layer in layers.items()}
    tokens = sum(window.numel() for window in windows)

    def note(name: str, gradient: Tensor) -> None:
        found[name] += gradient.detach().float().flatten(0, -2).square().sum(0).cpu()

    def watch(name: str) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
            output = output if output.requires_grad else output.detach().requires_grad_()
            output.register_hook(partial(note, name))
            return output

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        with evaluating(model), without_cache(model), _frozen(model), torch.enable_grad():
            for window in windows:
                logits = model(window.to(next(model.parameters()).device)).logits[0].float()
                drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator).to(logits.device)
                logits.log_softmax(-1).gather(1, drawn).sum().backward()
                advance()
    finally:
        for handle in handles:
            handle.remove()
    return {name: total / max(tokens, 1) for name, total in found.items()}


@torch.no_grad()
def losses(
    model: nn.Module,
    windows: Sequence[Tensor],
    candidates: Mapping[str, Grid],
    gradients: Mapping[str, Tensor],
    *,
    compensate: bool,
    blocks: str | Sequence[str] | None,
    filter_fn: Filter,
    device: torch.device | str | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Losses:
    """The estimated divergence of every candidate for every layer, those of one input together.

    compensate
        Whether GPTQ will round them: then of each column's error only what later columns cannot make up for counts.
    """
    found: Losses = {}
    chain = find_blocks(model, filter_fn, blocks)
    with evaluating(model), without_cache(model):
        recorded = record(model, list(chain.values()), windows)
        for index, (name, block) in enumerate(chain.items()):
            home = next(block.parameters()).device
            block.to(device or home)
            layers = linears_of(block, name, filter_fn)
            walk = _Walk(block, recorded.calls[index], recorded.hidden)
            groups = input_groups(layers, [[partial(walk.run, window) for window in range(len(windows))]])
            for group in groups:
                assert group.statistics is not None  # There is one rank.
                hessian = group.statistics.steady[0] / 2
                measure = _unrecoverable(hessian) if compensate else hessian
                of_layer = [_of_layer(layers[n].weight, candidates, gradients[n], measure) for n in group.names]
                found[tuple(group.names)] = {c: sum(each[c] for each in of_layer) for c in candidates}
            recorded.hidden = [walk.outputs[window] for window in range(len(windows))]
            recorded.calls[index].clear()
            block.to(home)
            advance()
    return found


class _Walk:
    """Runs of one block that keep what it gives to the next."""

    def __init__(self, block: nn.Module, calls: Sequence[Call], hidden: Sequence[Tensor]) -> None:
        self.block, self.calls, self.hidden = block, calls, hidden
        self.outputs: dict[int, Tensor] = {}

    def run(self, window: int) -> None:
        x = self.hidden[window].to(next(self.block.parameters()).device)
        self.outputs[window] = self.calls[window].run(self.block, x).cpu()


def _unrecoverable(hessian: Tensor) -> Tensor:
    """What a unit of each column's rounding error costs after GPTQ's compensation: ``[K]``, in the layer's order."""
    matrix = without_dead(hessian.double())
    order = matrix.diagonal().argsort(descending=True, stable=True)
    upper = inverse_factor(matrix[order][:, order], DAMPENING)
    return upper.diagonal().square().reciprocal()[order.argsort()].float()


def _of_layer(weight: Tensor, candidates: Mapping[str, Grid], gradient: Tensor, measure: Tensor) -> dict[str, float]:
    """Half the weighted output error by each candidate, from some of the rows, in proportion to their size."""
    diagonal = measure if measure.ndim == 1 else measure.diagonal()
    importance = gradient.to(weight.device)
    size = importance * (weight.float().square() @ diagonal)
    rows = torch.linspace(0, len(weight) - 1, min(ROWS, len(weight)), device=weight.device).long()
    part = weight[rows].float()
    share = size.sum() / size[rows].sum() if size[rows].sum() > 0 else size.new_ones(())
    found = {}
    for name, grid in candidates.items():
        lost = rtn(part, grid, diagonal).dequantize() - part
        errors = lost.square() @ measure if measure.ndim == 1 else (lost @ measure * lost).sum(1)
        found[name] = float((importance[rows] * errors).sum() * share / 2)
    return found


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Keep parameters from having gradients."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, requires in before:
            parameter.requires_grad_(requires)
