"""Quantise a model's weights block by block, each on the inputs that the preceding quantised blocks produce."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from epiloq.layer_filter import Filter, default_filter
from epiloq.models.mixtures import stacked
from epiloq.observers import evaluating
from epiloq.quantize.algorithms.smoothquant import ALPHA, INT8
from epiloq.quantize.algorithms.table import Algorithm
from epiloq.quantize.calibration.blocks import (
    Call,
    Recorded,
    find_blocks,
    linears_of,
    naming_other_lists,
    record,
    without_cache,
)
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

    Afterwards the model contains the dequantised (and folded) weights, so it computes the same as the quantised one
    except for the quantisation of activations; computed weights (`torch.nn.utils.parametrize`, pruning) become
    parameters. The blocks, the layers that share an input and the possible foldings are found by running the model.
    Memory in addition to the model: one block's inputs, ``[n, hidden]`` per window, and for one block two ``[K, K]``
    matrices per distinct input (guided algorithms: one more per layer and slice) and a few temporaries of a layer's
    size.

    Stacked experts stay in floating point, with a warning unless `filter_fn` is given. They are quantised as linear
    layers if ``epiloq.models.mixtures.unstack_experts_`` took them apart, as the output's format may need.

    Several ranks divide the windows and the layers among them. All obtain the same model and yield the same blocks,
    bit-identical to those of a single process (see `ranks.STRANDS`) if all use the same kind of device and number of
    threads.

    Args:
        model: ``model(tokens)`` runs it in evaluation mode; the modules' modes are restored afterwards.
        windows: int64 tokens ``[1, n]`` each. Not used by algorithms without ``needs_inputs`` unless `static`.
        inputs: how the layers' inputs will be rounded, for the search for SmoothQuant's alpha.
        alpha: of SmoothQuant, if it is not searched for; see `smooth_scale`.
        static: also calibrate static scales of the layers' int8 inputs, as computed by the preceding quantised (and
            folded) blocks.
        grids: grids of layers, by name, that differ from `grid`. With AWQ, layers that read the same input should have
            the same grid.
        blocks: the name of the ``ModuleList`` of blocks; by default the one with the most weights to quantise. Several
            are allowed if neither the algorithm nor `static` needs inputs.
        filter_fn: as for `epiloq.quantize_`, within the blocks.
        finished: called with each block's name; a Block that it returns (from an interrupted run) is used unchanged.
            Only the first rank's is called.
        device: device on which a block is processed; by default its own.
        ranks: the processes that calibrate together, which must call this with the same arguments; by default one
            process.
        residence: where blocks are stored before and after; by default in memory. A model with streamed blocks has no
            values afterwards.

    Raises:
        ValueError: no blocks found, blocks that do not form a chain, no or empty windows, inputs with NaN or infinity,
            static scales with weights that are not integers with zero points, several slices of rows that share scales,
            or a weight computed in an unsupported way.
    """
    takes = default_filter(model) if filter_fn is None else filter_fn
    found = find_blocks(model, takes, blocks)
    chosen = {n: layer for name, block in found.items() for n, layer in linears_of(block, name, takes).items()}
    if filter_fn is None:
        _warn_of_stacked_experts(found)
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
    if algorithm.slices > 1 and any(each.rows != 1 for each in (grid, *(grids or {}).values())):
        raise ValueError(
            f"calibrate: {algorithm.name}: slices: expected 1, as rows share scales, got {algorithm.slices}"
        )
    work = Work(grid, inputs, algorithm, alpha, static, ranks or Ranks(), grids or {})
    if work.needs_inputs and not windows:
        purpose = algorithm.name if static is None else "static scales"
        raise ValueError(f"calibrate: windows: expected at least one for {purpose}, got none")
    for window in windows if work.needs_inputs else ():
        if window.ndim != 2 or not window.numel() or window.is_floating_point():
            raise ValueError(
                f"calibrate: windows: expected int64 [1, n] with at least one token, got {window.dtype} "
                f"{list(window.shape)}"
            )
    with evaluating(model):
        for n, layer in chosen.items():
            bake_(n, layer)
    return _walk(model, found, windows, takes, work, finished, device, residence or Resident())


def _warn_of_stacked_experts(blocks: Mapping[str, nn.Module]) -> None:
    names = [f"{name}.{inner}" if inner else name for name, block in blocks.items() for inner in stacked(block)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"calibrate: left in floating point: the stacked experts of {names[0]}{more}: take them apart first by "
            "epiloq.models.mixtures.unstack_experts_(model)",
            stacklevel=3,
        )


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
        with evaluating(model), residence.on_demand(), naming_other_lists(model, takes, blocks):
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
    """Replace a block's input by its output, on the CPU, window by window."""
    for i, call in enumerate(calls):
        hidden[i] = call.run(block, hidden[i].to(place)).cpu()


def _guide(
    model: nn.Module, blocks: dict[str, nn.Module], windows: Sequence[Tensor], takes: Filter, work: Work
) -> list[TokenWeights] | None:
    """Weights of tokens in this rank's windows, if the algorithm uses any."""
    if not work.algorithm.guided:
        return None
    layers = {n: layer for name, block in blocks.items() for n, layer in linears_of(block, name, takes).items()}
    with work.ranks.together():
        return token_weights(model, list(blocks.values()), layers, windows, work.algorithm.slices)


@torch.no_grad()
def install_(block: nn.Module, layers: dict[str, nn.Linear], done: Block) -> None:
    """Copy a finished block's values, weights dequantised, into the model. Raises ValueError if they do not fit."""
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
