"""The work on one block of a model: fold, quantise, fix scales; divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from epiloq.models.multiplied_as_one import together
from epiloq.quantize.algorithms.autoround import autoround
from epiloq.quantize.algorithms.awq import awq_scale, output_error
from epiloq.quantize.algorithms.one_weight import round_weight
from epiloq.quantize.algorithms.refine import joined
from epiloq.quantize.algorithms.smoothquant import Folding, fold_, foldings, search_smooth_scale, smooth_scale
from epiloq.quantize.algorithms.table import Algorithm
from epiloq.quantize.calibration.blocks import Call, first
from epiloq.quantize.calibration.guide import TokenWeights
from epiloq.quantize.calibration.inputs import InputGroup, input_groups, last_inputs, naming, observe, shared
from epiloq.quantize.calibration.ranks import Ranks, balanced
from epiloq.quantize.calibration.static import InputErrors, InputWatch, Static
from epiloq.quantize.calibration.statistics import InputStatistics
from epiloq.weights.codebooks import Calibrated, Fp4Grid
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Codebook


@dataclass(frozen=True)
class Block:
    """A finished block."""

    name: str
    weights: dict[str, Calibrated]
    """Calibrated weights by the layer's name in the model."""
    state: dict[str, Tensor]
    """The block's other parameters and buffers by their names in the block; folding may have changed them."""
    errors: dict[str, float]
    """Each layer's relative error: of its output on calibration inputs or, for algorithms without inputs, of its weight
    (Frobenius norm)."""
    input_errors: dict[str, InputErrors] = field(default_factory=dict)
    """Output error caused by quantising each layer's input, if static scales were requested."""


@dataclass(frozen=True)
class Runs:
    """This rank's runs of a block, one per window."""

    block: nn.Module
    calls: Sequence[Call]
    hidden: Sequence[Tensor]
    strands: Sequence[range]
    guide: Sequence[TokenWeights] | None = None
    """Weights of tokens in each window, for guided Hessians."""
    targets: Sequence[Tensor] | None = None
    """Outputs of the exact model's block in each window, for algorithms that train."""

    def run(self, window: int, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """A block's output for one of this rank's windows, counted from 0; `weights` replace those of their names."""
        if weights is None:
            return self.calls[window].run(self.block, self.input(window))
        args, kwargs = self.calls[window].filled(self.input(window))
        return first(functional_call(self.block, dict(weights), args, kwargs))

    def input(self, window: int) -> Tensor:
        """The block's hidden states, where the block is."""
        return self.hidden[window].to(next(self.block.parameters()).device)

    def by_strand(self) -> list[list[Callable[[], Tensor]]]:
        """All runs, by strand."""
        return [[partial(self.run, window - self.strands[0][0]) for window in strand] for strand in self.strands]


@dataclass(frozen=True)
class Work:
    """The processing of each block."""

    grid: Codebook[Calibrated]
    inputs: Codebook[Calibrated]
    algorithm: Algorithm
    alpha: float
    static: Static | None
    ranks: Ranks
    grids: Mapping[str, Codebook[Calibrated]] = field(default_factory=dict)
    """Grids of layers, by name, that differ from `grid`."""

    def grid_of(self, layer: str) -> Codebook[Calibrated]:
        """The grid of a layer."""
        return self.grids.get(layer, self.grid)

    @property
    def needs_inputs(self) -> bool:
        return self.algorithm.needs_inputs or self.static is not None

    def watch(self, layers: dict[str, nn.Linear], runs: Runs) -> InputWatch | None:
        """The observer of the layers' inputs, if static scales are to be calibrated."""
        if self.static is None:
            return None
        return InputWatch(
            self.ranks.share(shared(layers, lambda: runs.run(0)) if self.ranks.rank == 0 else None), layers
        )

    def freeze(self, done: Block, watch: InputWatch) -> Block:
        """The block with static scales."""
        assert self.static is not None
        watch.collect(self.ranks)
        found = None
        with self.ranks.together():
            if self.ranks.rank == 0:
                found = watch.freeze(done.weights, self.static)
        grids, errors = self.ranks.share(found)
        weights: dict[str, Calibrated] = {}
        for name, weight in done.weights.items():
            assert isinstance(weight, QuantizedWeight)  # `calibrate` refused other grids.
            weights[name] = replace(weight, inputs=grids.get(name))
        return replace(done, weights=weights, input_errors=errors)

    def quantise(self, name: str, block: nn.Module, layers: dict[str, nn.Linear], runs: Runs) -> Block:
        """Fold the block's layers in place, quantise them, and report the result."""
        with self.ranks.together():
            for n, layer in layers.items():
                if not torch.isfinite(layer.weight).all():
                    raise ValueError(f"{n}.weight: expected finite numbers, found NaN or infinity")
        if self.algorithm.needs_inputs:
            groups = input_groups(layers, runs.by_strand(), self.ranks, runs.guide)
            self._fold(name, layers, groups, runs)
            with self.ranks.together():
                own = self._compensated(layers, groups)
                if self.algorithm.learn:
                    own = self._learned(name, layers, groups, runs, own[0])
        else:
            with self.ranks.together():
                own = self._nearest(layers)
        weights: dict[str, Calibrated] = {}
        errors: dict[str, float] = {}
        for owner in range(self.ranks.world):
            found, found_errors = self.ranks.share(own if owner == self.ranks.rank else None, owner)
            weights |= found
            errors |= found_errors
        left_out = {f"{n.removeprefix(name).lstrip('.')}.weight" for n in layers}
        state = {n: value.detach().clone() for n, value in block.state_dict().items() if n not in left_out}
        return Block(name, {n: weights[n] for n in layers}, state, {n: errors[n] for n in layers})

    def _nearest(self, layers: dict[str, nn.Linear]) -> tuple[dict[str, Calibrated], dict[str, float]]:
        """Quantise this rank's layers by an algorithm without inputs."""
        weights: dict[str, Calibrated] = {}
        errors: dict[str, float] = {}
        owners = balanced([layer.weight.numel() for layer in layers.values()], self.ranks.world)
        grids = self._shared_grids(layers)
        for (name, layer), owner in zip(layers.items(), owners, strict=True):
            if owner == self.ranks.rank:
                weights[name] = round_weight(layer.weight, grids[name], self.algorithm)
                lost = (weights[name].dequantize() - layer.weight.float()).norm()
                whole = layer.weight.float().norm()
                errors[name] = float(lost / whole) if whole else 0.0
        return weights, errors

    def _shared_grids(self, layers: Mapping[str, nn.Linear]) -> dict[str, Codebook[Calibrated]]:
        """Each layer's grid. For FP4 with the global scale, shared by weights that engines multiply as one matrix."""
        grids = {name: self.grid_of(name) for name in layers}
        for names in together(layers):
            grid = grids[names[0]]
            if isinstance(grid, Fp4Grid) and all(grids[name] == grid for name in names):
                grids |= dict.fromkeys(names, grid.for_weight(*(layers[name].weight for name in names)))
        return grids

    def _compensated(
        self, layers: dict[str, nn.Linear], groups: Sequence[InputGroup]
    ) -> tuple[dict[str, Calibrated], dict[str, float]]:
        """Quantise this rank's layers using the statistics of their inputs."""
        weights: dict[str, Calibrated] = {}
        errors: dict[str, float] = {}
        for group in groups:
            if group.statistics is not None:
                for stacked in self._stacks(group.names):
                    part, part_errors = self._round({n: layers[n] for n in stacked}, group)
                    weights |= part
                    errors |= part_errors
        return weights, errors

    def _learned(
        self,
        prefix: str,
        layers: dict[str, nn.Linear],
        groups: Sequence[InputGroup],
        runs: Runs,
        start: Mapping[str, Calibrated],
    ) -> tuple[dict[str, Calibrated], dict[str, float]]:
        """Train a block's layers together, starting from the result of another algorithm."""
        assert isinstance(self.grid, Grid)  # `calibrate` refused other grids, and several ranks.
        own = {name: f"{name.removeprefix(prefix).lstrip('.')}.weight" for name in layers}

        def run(weights: Mapping[str, Tensor], window: int) -> Tensor:
            return runs.run(window, {own[name]: weight for name, weight in weights.items()})

        weights: dict[str, Calibrated] = {}
        exact = {n: layer.weight.detach() for n, layer in layers.items()}
        known = {name: value for name, value in start.items() if isinstance(value, QuantizedWeight)}
        steps, windows = self.algorithm.learn, len(runs.hidden)
        weights |= autoround(run, exact, windows, self.grid, targets=runs.targets, start=known, steps=steps)
        errors: dict[str, float] = {}
        for group in groups:
            assert group.statistics is not None
            members = {name: layers[name] for name in group.names}
            errors |= _errors(members, [weights[name] for name in members], group.statistics)
        return weights, errors

    def _stacks(self, names: Sequence[str]) -> list[list[str]]:
        """Group layers of one input that can be rounded together: rows that share scales must belong to one layer."""
        if self.grid.rows != 1:
            return [[name] for name in names]
        stacks: dict[Codebook[Calibrated], list[str]] = {}
        for name in names:
            stacks.setdefault(self.grid_of(name), []).append(name)
        return list(stacks.values())

    def _round(self, layers: dict[str, nn.Linear], group: InputGroup) -> tuple[dict[str, Calibrated], dict[str, float]]:
        """Round layers that read the same input, stacked, because their rows are independent."""
        statistics, grid = group.statistics, self.grid_of(next(iter(layers)))
        assert statistics is not None
        with naming(list(layers)):
            hessian, _ = statistics.shrunk
            guided = statistics.weighted if self.algorithm.guided else None
        if guided is None:
            stacked = torch.cat([layer.weight.float() for layer in layers.values()])
            whole = round_weight(stacked, grid, self.algorithm, hessian)
            parts: Sequence[Calibrated] = whole.split([layer.out_features for layer in layers.values()])
        else:
            of_layer = dict(zip(group.names, guided.chunk(len(group.names)), strict=True))
            parts = [self._guided(layer.weight.float(), of_layer[name], grid) for name, layer in layers.items()]
        return dict(zip(layers, parts, strict=True)), _errors(layers, parts, statistics)

    def _guided(self, weight: Tensor, hessians: Tensor, grid: Codebook[Calibrated]) -> Calibrated:
        """Round a layer's weight, each slice of rows with its own Hessian."""
        slices, grid = weight.tensor_split(len(hessians)), grid.for_weight(weight)
        pairs = zip(slices, hessians, strict=True)
        return joined([round_weight(part, grid, self.algorithm, own) for part, own in pairs if len(part)])

    def _fold(self, prefix: str, layers: dict[str, nn.Linear], groups: Sequence[InputGroup], runs: Runs) -> None:
        """Fold the algorithm's scales where that is exact and all readers of a producer share their input."""
        if self.algorithm.fold is None:
            return
        searches = self.algorithm.fold == "smoothquant-search"
        samples: dict[str, Tensor] = {}
        found: list[Folding] | None = None
        with self.ranks.together(), naming([prefix]):
            if self.ranks.rank == 0:
                found = self._foldings(prefix, layers, runs)
                samples = last_inputs(layers, lambda: runs.run(0)) if searches else {}
        of_layer = {name: group for group in groups for name in group.names}
        for producer, names, channels in self.ranks.share(found):
            full = [f"{prefix}.{n}" for n in names]
            group = of_layer.get(full[0])
            if group is None or any(of_layer.get(name) is not group for name in full):
                continue
            weights = [layers[name].weight for name in full]
            x = self.ranks.move(samples.get(full[0]), 0, group.owner) if searches else None
            with self.ranks.together(), naming(full):
                scale = None
                if group.statistics is not None:
                    scale = self._scale(group.statistics, weights, channels, x, self.grid_of(full[0]))
            scale = self.ranks.share(scale, group.owner)
            with naming(full):
                fold_(runs.block.get_submodule(producer), [layers[name] for name in full], scale, channels)
            if group.statistics is not None:
                group.statistics.divide(scale)

    def _foldings(self, prefix: str, layers: dict[str, nn.Linear], runs: Runs) -> list[Folding]:
        """The possible foldings of a block, found in its first run."""
        block, x = runs.block, runs.input(0)
        seen = observe(block, lambda m: runs.calls[0].run(m, x))
        seen.probe = runs.calls[0].filled(x)
        return foldings(block, seen, lambda module, n: f"{prefix}.{n}" in layers)

    def _scale(
        self,
        statistics: InputStatistics,
        weights: Sequence[Tensor],
        channels: Tensor | None,
        x: Tensor | None,
        grid: Codebook[Calibrated],
    ) -> Tensor:
        """The scale by which the layers' inputs are divided; `x` is a sample of them, for a search."""
        if self.algorithm.fold == "awq":
            return awq_scale(weights, *statistics.shrunk, grid, channels=channels)
        if self.algorithm.fold == "smoothquant":
            return smooth_scale(statistics.amax, weights, self.alpha, channels)
        assert x is not None
        static = self.static is not None
        return search_smooth_scale(x, statistics.amax, weights, static, channels, grid=grid, inputs=self.inputs)


def _errors(
    layers: Mapping[str, nn.Linear], parts: Sequence[Calibrated], statistics: InputStatistics
) -> dict[str, float]:
    """Relative errors of the layers' outputs on the calibration inputs, if any."""
    seen = statistics.hessian if statistics.tokens else statistics.shrunk[0]
    errors = {}
    for (name, layer), part in zip(layers.items(), parts, strict=True):
        lost = output_error(part.dequantize() - layer.weight.float(), seen)
        size = output_error(layer.weight.float(), seen)
        errors[name] = (lost / size) ** 0.5 if size else 0.0
    return errors
