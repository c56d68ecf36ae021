"""Cost of rounding each layer, measured as the KL divergence from the floating-point model.

Layers that must share a scheme are rounded with one reference candidate while everything else is exact, and the model
is run from their block onwards. The cost of other candidates is taken as proportional to the layers' own output error,
which one pass through the blocks measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from epiloq.layer_filter import Filter
from epiloq.observers import evaluating
from epiloq.quantize.algorithms.gptq import uncompensated
from epiloq.quantize.algorithms.one_weight import clip_moments, round_weight
from epiloq.quantize.algorithms.table import Algorithm
from epiloq.quantize.budget.probe import Probe
from epiloq.quantize.calibration.blocks import Call, find_blocks, linears_of, naming_other_lists, record, without_cache
from epiloq.quantize.calibration.inputs import InputGroup, input_groups
from epiloq.weights.grid import Grid
from epiloq.weights.rounding import rtn

ROWS = 128
"""Number of output channels of a layer that are rounded as a sample; the error is extrapolated to the others."""
LEAST = 1e-12
"""Nats per token, below float32's resolution: a lower bound of costs, so that smaller errors are still preferred."""
Losses = dict[tuple[str, ...], dict[str, float]]
"""Nats per token for each group of layers that share a scheme, by their names, and each candidate."""


@torch.no_grad()
def losses(
    model: nn.Module,
    windows: Sequence[Tensor],
    probed: Sequence[Tensor],
    candidates: Mapping[str, Grid],
    reference: str,
    *,
    algorithm: Algorithm,
    blocks: str | Sequence[str] | None,
    filter_fn: Filter,
    advance: Callable[[], None] = lambda: None,
) -> Losses:
    """The divergence that each candidate costs for each layer, or jointly for layers that must share a scheme.

    These are layers that read the same input and all experts of a mixture, because engines multiply the former as one
    matrix and the latter as one stack.

    windows
        int64 tokens ``[1, n]`` each, from which the layers' inputs are computed.
    probed
        The same, for measuring the divergence.
    reference
        The candidate with which the divergence is measured.
    algorithm
        How weights will be rounded. What it folds first or trains afterwards is left out.
    """
    found: Losses = {}
    chain = find_blocks(model, filter_fn, blocks)
    with evaluating(model), without_cache(model), naming_other_lists(model, filter_fn, chain):
        probe = Probe(model, list(chain.values()), probed)
        recorded = record(model, list(chain.values()), windows)
        for index, (name, block) in enumerate(chain.items()):
            layers = linears_of(block, name, filter_fn)
            walk = _Walk(block, recorded.calls[index], recorded.hidden)
            groups = input_groups(layers, [[partial(walk.run, window) for window in range(len(windows))]])
            for together in _groups(groups):
                trial = _Trial(layers, together, candidates, algorithm)
                found[trial.names] = trial.losses(reference, partial(probe.divergence, index))
            recorded.hidden = [walk.outputs[window] for window in range(len(windows))]
            recorded.calls[index].clear()
            probe.step(index)
            advance()
    return found


def _groups(groups: Sequence[InputGroup]) -> list[list[InputGroup]]:
    """Join a block's groups that must share a scheme."""
    found: dict[str, list[InputGroup]] = {}
    for group in groups:
        first = group.names[0]
        found.setdefault(first.partition(".experts.")[0] if ".experts." in first else first, []).append(group)
    return list(found.values())


class _Trial:
    """Layers that are rounded together, and their losses."""

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        groups: Sequence[InputGroup],
        candidates: Mapping[str, Grid],
        algorithm: Algorithm,
    ) -> None:
        self.layers, self.candidates, self.algorithm = layers, candidates, algorithm
        self.hessians = [(group.names, self._hessian(group)) for group in groups]
        self.measures = [uncompensated(hessian) if algorithm.compensate else hessian for _, hessian in self.hessians]
        self.names = tuple(name for group in groups for name in group.names)

    @staticmethod
    def _hessian(group: InputGroup) -> Tensor:
        assert group.statistics is not None  # one rank owns all groups
        return group.statistics.shrunk[0] / 2

    def losses(self, reference: str, divergence: Callable[[], float]) -> dict[str, float]:
        """Loss for each candidate: `divergence` with the layers rounded by the reference, scaled by the ratio of output
        errors."""
        errors = {candidate: self._error(grid) for candidate, grid in self.candidates.items()}
        if errors[reference] == 0:
            return dict.fromkeys(errors, 0.0)
        exact = {name: self.layers[name].weight.detach().clone() for name in self.names}
        try:
            for names, hessian in self.hessians:
                for name in names:
                    self.layers[name].weight.copy_(self._rounded(exact[name].float(), hessian, reference))
            measured = max(divergence(), LEAST)
        finally:
            for name, weight in exact.items():
                self.layers[name].weight.copy_(weight)
        return {candidate: measured * error / errors[reference] for candidate, error in errors.items()}

    def _rounded(self, weight: Tensor, hessian: Tensor, candidate: str) -> Tensor:
        return round_weight(weight, self.candidates[candidate], self.algorithm, hessian).dequantize()

    def _error(self, grid: Grid) -> float:
        """Squared output error of all layers, extrapolated from a sample of their rows."""
        total = 0.0
        for (names, hessian), measure in zip(self.hessians, self.measures, strict=True):
            diagonal = hessian.diagonal()
            for name in names:
                weight = self.layers[name].weight
                size = weight.float().square() @ diagonal
                rows = torch.linspace(0, len(weight) - 1, min(ROWS, len(weight)), device=weight.device).long()
                part = weight[rows].float()
                lost = rtn(part, grid, clip_moments(part, self.algorithm, hessian)).dequantize() - part
                errors = lost.square() @ measure if measure.ndim == 1 else (lost @ measure * lost).sum(1)
                whole = float(size[rows].sum())
                total += float(errors.sum()) * float(size.sum()) / whole if whole > 0 else 0.0
        return total


class _Walk:
    """Runs of one block that record its outputs, the inputs of the next block."""

    def __init__(self, block: nn.Module, calls: Sequence[Call], hidden: Sequence[Tensor]) -> None:
        self.block, self.calls, self.hidden = block, calls, hidden
        self.outputs: dict[int, Tensor] = {}

    def run(self, window: int) -> None:
        x = self.hidden[window].to(next(self.block.parameters()).device)
        self.outputs[window] = self.calls[window].run(self.block, x).cpu()
