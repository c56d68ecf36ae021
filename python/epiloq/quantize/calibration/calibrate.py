"""Quantise a model's weights block by block, each on the inputs that the quantised blocks before it produce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from epiloq.layer_filter import Filter, default_filter
from epiloq.observers import evaluating
from epiloq.quantize.algorithms.smoothquant import ALPHA, INT8
from epiloq.quantize.algorithms.table import Algorithm
from epiloq.quantize.calibration.blocks import Call, Recorded, find_blocks, linears_of, record, without_cache
from epiloq.quantize.calibration.guide import TokenWeights, token_weights
from epiloq.quantize.calibration.ranks import Ranks
from epiloq.quantize.calibration.residence import Resident
from epiloq.quantize.calibration.static import Static
from epiloq.quantize.calibration.work import Block, Runs, Work
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.computed import bake_
from epiloq.weights.grid import Grid
from epiloq.weights.rounding import Codebook


def calibrate(
    model: nn.Module,
    windows: Sequence[Tensor],
    grid: Codebook[Calibrated],
    algorithm: Algorithm,
    *,
    inputs: Codebook[Calibrated] = INT8,
    alpha: float = ALPHA,
    static: Static | None = None,
    grids: Mapping[str, Codebook[Calibrated]] | None = None,
    blocks: str | Sequence[str] | None = None,
    filter_fn: Filter | None = None,
    finished: Callable[[str], Block | None] = lambda name: None,
    device: torch.device | str | None = None,
    ranks: Ranks | None = None,
    residence: Resident | None = None,
) -> Iterator[Block]:
    """Quantise the linear layers in `model`'s blocks, yielding each block when it is done.

    The model itself ends with the weights dequantised (and folded), so it computes what the quantised one will, but
    for the quantisation of activations; computed weights (`torch.nn.utils.parametrize`, pruning) become parameters.
    Which layers share an input, what can be folded and what the blocks are is found by running the model. Beside the
    model this holds one block's inputs, ``[n, hidden]`` for each window, and for one block two ``[K, K]`` matrices for
    each distinct input and a few temporaries of a layer's size.

    Several ranks share the windows and the layers. Each ends with the same model and yields the same blocks, bit for
    bit those of one process (`ranks.STRANDS` says how) if all compute on the same kind of device and number of threads.

    Args:
        model: ``model(tokens)`` runs it, in evaluation mode, whatever modes its modules have before and after.
        windows: int64 ``[1, n]`` tokens each. Not looked at by algorithms without ``needs_inputs`` unless `static`.
        inputs: how the layers' inputs will be rounded, which the search for SmoothQuant's alpha looks at.
        alpha: of SmoothQuant, where it is not searched for; see `smooth_scale`.
        static: fix scales of the layers' int8 inputs too, as the quantised (and folded) blocks before make them.
        grids: layers by name that have another grid. With AWQ, those that read one input should have the same.
        blocks: the name of the ``ModuleList`` of blocks; the one with most weights to quantise, by default. Several
            where neither the algorithm nor `static` looks at inputs.
        filter_fn: as for `epiloq.quantize_`, within the blocks.
        finished: asked for each block's name; a Block that it returns (of an interrupted run) is used as it is.
            The first rank's is asked for all ranks.
        device: where a block is while it is worked on; by default where it is already.
        ranks: the processes that do this together, which all call it alike; by default this one alone.
        residence: where blocks are before and after; by default in memory. Of streamed ones the model has no values
            at the end.

    Raises:
        ValueError: no blocks found, blocks that are no chain, no windows, inputs with NaN or infinity, static scales
            beside weights that are not integers with zero points, or a weight that is computed in a way not known.
    """
    takes = default_filter(model) if filter_fn is None else filter_fn
    found = find_blocks(model, takes, blocks)
    chosen = {n: layer for name, block in found.items() for n, layer in linears_of(block, name, takes).items()}
    if not chosen:
        raise ValueError("calibrate: filter_fn: expected at least one linear layer in the blocks, got none")
    if not 0 <= alpha <= 1:
        raise ValueError(f"calibrate: alpha: expected 0 to 1, got {alpha}")
    if static is not None and not isinstance(grid, Grid):
        raise ValueError(f"calibrate: static: expected integers with zero points, got {grid}")
    if algorithm.learn and not isinstance(grid, Grid):
        raise ValueError(f"calibrate: {algorithm.name}: expected integers with zero points to learn, got {grid}")
    if algorithm.learn and ranks is not None and ranks.world > 1:
        raise ValueError(f"calibrate: {algorithm.name}: expected one process, got {ranks.world}")
    work = Work(grid, inputs, algorithm, alpha, static, ranks or Ranks(), grids or {})
    if work.needs_inputs and not windows:
        wish = algorithm.name if static is None else "static scales"
        raise ValueError(f"calibrate: windows: expected at least one for {wish}, got none")
    with evaluating(model):
        for n, layer in chosen.items():
            bake_(n, layer)
    return _walk(model, found, windows, takes, work, finished, device, residence or Resident())


@torch.no_grad()
def _walk(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    windows: Sequence[Tensor],
    takes: Filter,
    work: Work,
    finished: Callable[[str], Block | None],
    device: torch.device | str | None,
    residence: Resident,
) -> Iterator[Block]:
    recorded, ranks = Recorded([], [[] for _ in blocks]), work.ranks
    strands = ranks.strands(len(windows))
    own = [windows[window] for strand in strands for window in strand]
    if work.needs_inputs and own:
        with evaluating(model), residence.on_demand():
            recorded = record(model, list(blocks.values()), own)
    with residence.on_demand():
        guide = _guide(model, blocks, own, takes, work)
    exact = list(recorded.hidden) if work.algorithm.learn else None
    for index, (name, block) in enumerate(blocks.items()):
        done = ranks.share(finished(name) if ranks.rank == 0 else None)
        with residence.held(name, block, device) as place, evaluating(model), without_cache(model):
            layers, watch = linears_of(block, name, takes), None
            if exact is not None:
                _advance_(exact, block, recorded.calls[index], place)
            if done is None:
                runs = Runs(block, recorded.calls[index], recorded.hidden, strands, guide, exact)
                watch = work.watch(layers, runs)
                done = work.quantise(name, block, layers, runs)
            install_(block, layers, done)
            if watch is not None or index + 1 < len(blocks):
                with watch.attached() if watch else nullcontext():
                    _advance_(recorded.hidden, block, recorded.calls[index], place)
            if watch is not None:
                done = work.freeze(done, watch)
        recorded.calls[index].clear()
        yield done


def _advance_(hidden: list[Tensor], block: nn.Module, calls: Sequence[Call], place: torch.device) -> None:
    """Put a block's output in the place of its input, on the CPU, window by window."""
    for i, call in enumerate(calls):
        hidden[i] = call.run(block, hidden[i].to(place)).cpu()


def _guide(
    model: nn.Module, blocks: dict[str, nn.Module], windows: Sequence[Tensor], takes: Filter, work: Work
) -> list[TokenWeights] | None:
    """Weights of tokens in this rank's windows, if the algorithm asks for any."""
    if not work.slices:
        return None
    layers = {n: layer for name, block in blocks.items() for n, layer in linears_of(block, name, takes).items()}
    with work.ranks.together():
        return token_weights(model, list(blocks.values()), layers, windows, work.slices)


@torch.no_grad()
def install_(block: nn.Module, layers: dict[str, nn.Linear], done: Block) -> None:
    """Put a finished block's values, weights dequantised, into the model's. Raises ValueError if they do not fit."""
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
