"""Checks of ``epiloq quantize`` before a model's weights are read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor, nn

from epiloq.files import Held
from epiloq.formats.io.architecture import skeleton
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import check_float
from epiloq.formats.io.safe_files import check_new
from epiloq.formats.layouts.base import FormatError
from epiloq.models.conv1d import TransposedConv1D, transpose_
from epiloq.quantize.algorithms.rotate import check_rotatable, untie_head_
from epiloq.quantize.algorithms.smoothquant import ALPHA
from epiloq.quantize.algorithms.table import ALGORITHMS, MOST_SLICES
from epiloq.quantize.budget.amount import Budget
from epiloq.quantize.budget.candidates import AUTO as CHOSEN
from epiloq.quantize.budget.candidates import LAYOUTS, grids
from epiloq.quantize.calibration.on_text import other_input
from epiloq.quantize.calibration.static import AUTO
from epiloq.quantize.outputs import choose
from epiloq.quantize.plan import Plan, plan
from epiloq.quantize.settings import Settings
from epiloq.quantize.targets import TARGETS
from epiloq.quantize.texts import needs_text
from epiloq.weights.computed import check_finite
from epiloq.weights.grid import Grid

SEEDS = 1 << 63
"""Number of seeds of torch's generators."""


def check_request(settings: Settings, world: int = 1) -> None:
    """Raise ValueError for settings invalid for any model or for so many ranks, or an output that cannot be created."""
    if settings.budget is not None:
        check_budget(settings.budget, settings.layout, settings.symmetric)
    choose(settings.scheme, settings.layout, settings.symmetric)
    output, target = settings.output, TARGETS[settings.scheme]
    if settings.budget is not None and ALGORITHMS[settings.algorithm].learn:
        raise ValueError(
            f"--algorithm {settings.algorithm}: expected --scheme, as it trains all layers of a block in one scheme, "
            "got a budget"
        )
    for option, scheme in (("--head", settings.head), ("--embedding", settings.embedding)):
        if scheme == CHOSEN and (settings.budget is None or settings.budget.file_bytes is None):
            raise ValueError(f"{option} {CHOSEN}: expected --bytes as well, which counts all weights")
    check_new(output, settings.model)
    if not 0 <= settings.seed < SEEDS:
        raise ValueError(f"seed: expected 0 to {SEEDS - 1}, got {settings.seed} (--seed)")
    if settings.keep_dynamic is not None and not target.static:
        raise ValueError(
            f"--keep-dynamic: expected a scheme with static scales, got {settings.scheme}; leave the option out"
        )
    if settings.symmetric and not isinstance(target.base, Grid):
        raise ValueError(
            f"--symmetric: expected a scheme of integers with zero points, got {settings.scheme}; leave the option out"
        )
    if ALGORITHMS[settings.algorithm].learn and not isinstance(target.base, Grid):
        raise ValueError(
            f"--algorithm {settings.algorithm}: expected a scheme of integers with zero points, got {settings.scheme}"
        )
    if ALGORITHMS[settings.algorithm].learn and world > 1:
        raise ValueError(
            f"--algorithm {settings.algorithm}: expected one process, as training is not divided among ranks, got "
            f"{world}; start it without a launcher, or use --algorithm gptq"
        )
    if settings.tune < 0:
        raise ValueError(f"--tune: expected at least 0 steps, got {settings.tune}")
    if settings.tune and not isinstance(target.base, Grid):
        raise ValueError(f"--tune: expected a scheme of integers, whose scales it trains, got {settings.scheme}")
    if not 0 <= settings.alpha <= 1:
        raise ValueError(f"alpha: expected 0 to 1, got {settings.alpha}")
    fixed = [name for name, algorithm in ALGORITHMS.items() if algorithm.fold == "smoothquant"]
    if settings.alpha != ALPHA and settings.algorithm not in fixed:
        raise ValueError(
            f"--alpha: expected an algorithm with one alpha ({', '.join(fixed)}), got {settings.algorithm}; leave the "
            "option out"
        )
    check_slices(settings)
    if needs_text(settings) and settings.calibration is None:
        reader = "--tune" if settings.tune else f"{settings.scheme} by {settings.algorithm}"
        without = replace(settings, algorithm="rtn")
        other = "" if needs_text(without) else "; --algorithm rtn needs none"
        raise ValueError(f"{reader} needs calibration text (--calibration FILE){other}")


def check_slices(settings: Settings) -> None:
    """Raise ValueError for a number of slices of output rows that the algorithm or the scheme does not support."""
    if settings.slices not in range(1, MOST_SLICES + 1):
        raise ValueError(f"--slices: expected 1 to {MOST_SLICES}, got {settings.slices}")
    if settings.slices == 1:
        return
    if not ALGORITHMS[settings.algorithm].guided:
        guided = ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.guided)
        raise ValueError(
            f"--slices: expected an algorithm with guided Hessians ({guided}), got {settings.algorithm}; leave the "
            "option out"
        )
    if TARGETS[settings.scheme].base.rows != 1:
        raise ValueError(
            f"--slices: expected a scheme whose rows have scales of their own, got {settings.scheme}; leave the option "
            "out"
        )


def check_budget(budget: Budget, layout: str | None, symmetric: bool) -> None:
    """Raise ValueError for an invalid budget."""
    if layout is not None and layout not in LAYOUTS:
        raise FormatError(f"{layout}: a budget gives layers different schemes; use --format {' or '.join(LAYOUTS)}")
    found = grids(budget.candidates, symmetric)
    if budget.bits is None:
        return
    least = min(grid.bits for grid in found.values())
    if not least <= budget.bits < math.inf:
        raise ValueError(
            f"--bits: expected at least {least}, the fewest of {', '.join(found)}, and the bits of its scales, got "
            f"{budget.bits:g}"
        )


def check_model(settings: Settings, source: Checkpoint) -> Plan:
    """Plan for a model's layers, after checking the settings against its outline, which has no values.

    Raises ValueError: a model that is already quantised, that has no perplexity although it is requested, no blocks
    or layers to quantise, a format that can represent few of them, or unknown names.
    """
    check_float(source)
    _ = source.other_files  # listed and checked before the work
    outline = transpose_(skeleton(source, "meta"))
    if settings.evaluation is not None or settings.budget is not None or settings.tune:
        check_generates(outline, settings.model)
    if settings.rotate:
        check_rotatable(outline)
        untie_head_(outline)
    found = plan(settings, outline)
    for name, layer in found.layers.items():
        entry = source.entries.get(f"{name}.weight")
        shape = tuple(layer.weight.shape[:: -1 if isinstance(layer, TransposedConv1D) else 1])
        if entry is not None and entry.shape != shape:
            raise FormatError(
                f"{source.where(f'{name}.weight')}: config.json disagrees with the tensors: "
                f"expected {list(shape)}, got {list(entry.shape)}"
            )
    pattern = settings.keep_dynamic
    if pattern is not None and pattern != AUTO and not any(fnmatchcase(name, pattern) for name in found.layers):
        raise ValueError(f"--keep-dynamic: expected {AUTO} or a pattern of layer names, no layer matches {pattern!r}")
    return found


def check_finite_weights(
    parameters: Iterable[tuple[str, Tensor]], layers: Collection[str] | None, source: Checkpoint
) -> None:
    """Raise ValueError, which names file and tensor, for NaN or infinity in a weight of these layers (None: of any)."""
    for name, parameter in parameters:
        if layers is not None and name.removesuffix(".weight") not in layers:
            continue
        check_finite(source.where(name), parameter)


def check_generates(model: nn.Module, folder: Path) -> None:
    """Raise ValueError unless the model is a causal language model, for which perplexity is defined: it generates from
    text alone."""
    can_generate = getattr(model, "can_generate", None)
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if can_generate is None or not can_generate() or two or other_input(model) is not None:
        raise ValueError(f"{folder}: expected a causal language model, got {type(model).__name__}")


@contextmanager
def report_lock_holder(settings: Settings) -> Iterator[None]:
    """Raise ValueError, which names the process, if another one is already writing the output."""
    try:
        yield
    except Held as error:
        raise ValueError(
            f"{settings.output}: {error}, is writing it: wait for that run to end, or choose another output"
        ) from None
