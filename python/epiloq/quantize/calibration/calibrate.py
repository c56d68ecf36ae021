"""Quantise a model's weights block by block, each on the inputs that the quantised blocks before it produce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from epiloq.layer_filter import Filter, default_filter
from epiloq.observers import evaluating
from epiloq.quantize.algorithms.awq import awq_scale, output_error
from epiloq.quantize.algorithms.gptq import gptq
from epiloq.quantize.algorithms.smoothquant import ALPHA, INT8, fold_, foldings, search_smooth_scale, smooth_scale
from epiloq.quantize.algorithms.table import Algorithm
from epiloq.quantize.calibration.blocks import Call, Recorded, find_blocks, linears_of, record, without_cache
from epiloq.quantize.calibration.inputs import input_groups, last_inputs, observe, shared
from epiloq.quantize.calibration.static import InputErrors, InputWatch, Static
from epiloq.quantize.calibration.statistics import InputStatistics
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Codebook, rtn


@dataclass(frozen=True)
class Block:
    """A finished block."""

    name: str
    weights: dict[str, Calibrated]
    """By layer, named as in the model."""
    state: dict[str, Tensor]
    """The block's other parameters and buffers, which folding may have changed, by their names in the block."""
    errors: dict[str, float]
    """Each layer's relative error: of its output on calibration inputs or, by algorithms that need none, of its
    weight (Frobenius)."""
    input_errors: dict[str, InputErrors] = field(default_factory=dict)
    """What quantising each layer's input costs, where static scales were asked for."""


def calibrate(
    model: nn.Module,
    windows: Sequence[Tensor],
    grid: Codebook[Calibrated],
    algorithm: Algorithm,
    *,
    inputs: Codebook[Calibrated] = INT8,
    alpha: float = ALPHA,
    static: Static | None = None,
    blocks: str | Sequence[str] | None = None,
    filter_fn: Filter | None = None,
    finished: Callable[[str], Block | None] = lambda name: None,
    device: torch.device | str | None = None,
) -> Iterator[Block]:
    """Quantise the linear layers in `model`'s blocks, yielding each block when it is done.

    The model itself ends with the weights de-quantised (and folded), so it computes what the quantised one will, but
    for the quantisation of activations. Which layers share an input, what can be folded and what the blocks are is
    found by running the model. Beside the model this holds one block's inputs, ``[n, hidden]`` for each window, and
    for one block a ``[K, K]`` matrix for each distinct input and a few temporaries of a layer's size.

    Args:
        model: ``model(tokens)`` runs it, in evaluation mode, whatever modes its modules have before and after.
        windows: int64 ``[1, n]`` tokens each. Not looked at by algorithms without ``needs_inputs`` unless `static`.
        inputs: how the layers' inputs will be rounded, which the search for SmoothQuant's alpha looks at.
        alpha: of SmoothQuant, where it is not searched for; see `smooth_scale`.
        static: fix scales of the layers' int8 inputs too, as the quantised (and folded) blocks before make them.
        blocks: the name of the ``ModuleList`` of blocks; the one with most weights to quantise, by default. Several
            where neither the algorithm nor `static` looks at inputs.
        filter_fn: as for `epiloq.quantize_`, within the blocks.
        finished: asked for each block's name; a Block that it returns (of an interrupted run) is used as it is.
        device: where a block is while it is worked on; by default where it is already.

    Raises:
        ValueError: no blocks found, blocks that are no chain, no windows, inputs with NaN or infinity, or static scales
            beside weights that are not integers with zero points.
    """
    takes = default_filter(model) if filter_fn is None else filter_fn
    found = find_blocks(model, takes, blocks)
    if not any(linears_of(block, name, takes) for name, block in found.items()):
        raise ValueError("calibrate: filter_fn: expected at least one linear layer in the blocks, got none")
    if not 0 <= alpha <= 1:
        raise ValueError(f"calibrate: alpha: expected 0 to 1, got {alpha}")
    if static is not None and not isinstance(grid, Grid):
        raise ValueError(f"calibrate: static: expected integers with zero points beside it, got {grid}")
    work = _Work(grid, inputs, algorithm, alpha, static)
    if work.needs_inputs and not windows:
        wish = algorithm.name if static is None else "static scales"
        raise ValueError(f"calibrate: windows: expected at least one for {wish}, got none")
    return _walk(model, found, windows, takes, work, finished, device)


@torch.no_grad()
def _walk(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    windows: Sequence[Tensor],
    takes: Filter,
    work: _Work,
    finished: Callable[[str], Block | None],
    device: torch.device | str | None,
) -> Iterator[Block]:
    recorded = Recorded([], [[]] * len(blocks))
    if work.needs_inputs:
        with evaluating(model):
            recorded = record(model, list(blocks.values()), windows)
    for index, (name, block) in enumerate(blocks.items()):
        home = next(block.parameters()).device
        block.to(device or home)
        layers = linears_of(block, name, takes)
        done, watch = finished(name), None
        with evaluating(model), without_cache(model):
            if done is None:
                watch = work.watch(block, layers, recorded.calls[index], recorded.hidden)
                done = work.quantise(name, block, layers, recorded.calls[index], recorded.hidden)
            install_(block, layers, done)
            if watch is not None or index + 1 < len(blocks):
                with watch.attached() if watch else nullcontext():
                    for i, call in enumerate(recorded.calls[index]):
                        recorded.hidden[i] = call.run(block, recorded.hidden[i].to(device or home)).cpu()
        if watch is not None:
            done = work.freeze(done, watch)
        recorded.calls[index].clear()
        block.to(home)
        yield done


@torch.no_grad()
def install_(block: nn.Module, layers: dict[str, nn.Linear], done: Block) -> None:
    """Put a finished block's values, weights de-quantised, into the model's. Raises ValueError if they do not fit."""
    if set(layers) != set(done.weights):
        raise ValueError(f"calibrate: finished: {done.name}: expected the layers {sorted(layers)}")
    for name, layer in layers.items():
        weight = done.weights[name].dequantize(layer.weight.dtype)
        if weight.shape != layer.weight.shape:
            raise ValueError(
                f"calibrate: finished: {name}: expected {list(layer.weight.shape)}, got {list(weight.shape)}"
            )
        layer.weight.copy_(weight)
    block.load_state_dict(done.state, strict=False)


@dataclass(frozen=True)
class _Work:
    """What is done to each block."""

    grid: Codebook[Calibrated]
    inputs: Codebook[Calibrated]
    algorithm: Algorithm
    alpha: float
    static: Static | None

    @property
    def needs_inputs(self) -> bool:
        return self.algorithm.needs_inputs or self.static is not None

    def watch(
        self, block: nn.Module, layers: dict[str, nn.Linear], calls: Sequence[Call], hidden: Sequence[Tensor]
    ) -> InputWatch | None:
        """What will look at the inputs of the block's layers, if scales are to be fixed by them."""
        if self.static is None:
            return None
        x = hidden[0].to(next(block.parameters()).device)
        return InputWatch(shared(layers, lambda: calls[0].run(block, x)), layers)

    def freeze(self, done: Block, watch: InputWatch) -> Block:
        """The block with static scales."""
        assert self.static is not None
        grids, errors = watch.freeze(done.weights, self.static)
        weights: dict[str, Calibrated] = {}
        for name, weight in done.weights.items():
            assert isinstance(weight, QuantizedWeight)  # `calibrate` refused other grids.
            weights[name] = replace(weight, inputs=grids.get(name))
        return replace(done, weights=weights, input_errors=errors)

    def quantise(
        self, name: str, block: nn.Module, layers: dict[str, nn.Linear], calls: Sequence[Call], hidden: Sequence[Tensor]
    ) -> Block:
        """Fold the block's layers in place, quantise them, and say what came of it."""
        for n, layer in layers.items():
            if not torch.isfinite(layer.weight).all():
                raise ValueError(f"{n}.weight: expected finite numbers, found NaN or infinity")
        weights: dict[str, Calibrated] = {}
        errors: dict[str, float] = {}
        if not self.algorithm.needs_inputs:
            for n, layer in layers.items():
                weights[n] = rtn(layer.weight, self.grid, self._moments(None, layer.weight))
                lost, whole = (weights[n].dequantize() - layer.weight.float()).norm(), layer.weight.float().norm()
                errors[n] = float(lost / whole) if whole else 0.0
        else:
            device = next(block.parameters()).device

            def run(window: int) -> Tensor:
                return calls[window].run(block, hidden[window].to(device))

            groups = input_groups(layers, [partial(run, window) for window in range(len(hidden))])
            self._fold(name, block, layers, groups, calls[0], hidden[0])
            for names, statistics in groups:
                # Rows that share scales are those of one layer.
                for stacked in [names] if self.grid.rows == 1 else [[n] for n in names]:
                    part, part_errors = self._round({n: layers[n] for n in stacked}, statistics)
                    weights |= part
                    errors |= part_errors
        left_out = {f"{n.removeprefix(name).lstrip('.')}.weight" for n in layers}
        state = {n: value.detach().clone() for n, value in block.state_dict().items() if n not in left_out}
        return Block(name, {n: weights[n] for n in layers}, state, errors)

    def _round(
        self, layers: dict[str, nn.Linear], statistics: InputStatistics
    ) -> tuple[dict[str, Calibrated], dict[str, float]]:
        """Layers that read one input, stacked, for their rows do not depend on each other."""
        try:
            hessian, _ = statistics.steady
        except ValueError as error:
            raise ValueError(f"calibrate: {', '.join(layers)}: {error}") from error
        weight = torch.cat([layer.weight.float() for layer in layers.values()])
        moments = self._moments(hessian, weight)
        if self.algorithm.compensate:
            value: Calibrated = gptq(weight, hessian, self.grid, moments=moments)
        else:
            value = rtn(weight, self.grid, moments)
        parts: Sequence[Calibrated] = value.split([layer.out_features for layer in layers.values()])
        errors = {}
        seen = statistics.hessian if statistics.tokens else hessian  # Errors are those on the inputs themselves.
        for (name, layer), part in zip(layers.items(), parts, strict=True):
            lost = output_error(part.dequantize() - layer.weight.float(), seen)
            whole = output_error(layer.weight.float(), seen)
            errors[name] = (lost / whole) ** 0.5 if whole else 0.0
        return dict(zip(layers, parts, strict=True)), errors

    def _moments(self, hessian: Tensor | None, weight: Tensor) -> Tensor | None:
        if self.algorithm.clip == "mse":
            return torch.ones(weight.shape[1], device=weight.device)
        if self.algorithm.clip is None or hessian is None:
            return None
        return hessian.diagonal() if self.algorithm.clip == "weighted" else hessian

    def _fold(
        self,
        prefix: str,
        block: nn.Module,
        layers: dict[str, nn.Linear],
        groups: Sequence[tuple[list[str], InputStatistics]],
        call: Call,
        hidden: Tensor,
    ) -> None:
        """Fold the scales of the algorithm where that is exact and all who read a producer share their input."""
        if self.algorithm.fold is None:
            return
        of_layer = {name: statistics for names, statistics in groups for name in names}
        x = hidden.to(next(block.parameters()).device)
        seen = observe(block, lambda m: call.run(m, x))
        seen.probe = call.filled(x)
        searches = self.algorithm.fold == "smoothquant-search"
        inputs = last_inputs(layers, lambda: call.run(block, x)) if searches else {}
        full = {n: f"{prefix}.{n}" for n in seen.amax}
        for producer, names, channels in foldings(block, seen, lambda module, n: f"{prefix}.{n}" in layers):
            consumers = [layers[full[n]] for n in names if full[n] in layers]
            statistics = of_layer[full[names[0]]] if full[names[0]] in layers else None
            if statistics is None or any(of_layer.get(full[n]) is not statistics for n in names):
                continue
            weights = [consumer.weight for consumer in consumers]
            if self.algorithm.fold == "awq":
                scale = awq_scale(weights, *statistics.steady, self.grid, channels=channels)
            elif self.algorithm.fold == "smoothquant":
                scale = smooth_scale(statistics.amax, weights, self.alpha, channels)
            else:
                x, static = inputs[full[names[0]]], self.static is not None
                scale = search_smooth_scale(
                    x, statistics.amax, weights, static, channels, grid=self.grid, inputs=self.inputs
                )
            fold_(block.get_submodule(producer), consumers, scale, channels)
            statistics.divide(scale)
