"""From a budget to a scheme for each layer, and the frontier of other budgets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from epiloq.files import write_text
from epiloq.formats.io.architecture import distinct
from epiloq.formats.table import FORMATS
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.budget import ends as budget_ends
from epiloq.quantize.budget import knapsack
from epiloq.quantize.budget.amount import Budget, megabytes
from epiloq.quantize.budget.candidates import HEADER, Sizes, grids
from epiloq.quantize.budget.ends import End
from epiloq.quantize.budget.probe import in_float32
from epiloq.quantize.budget.sensitivity import Losses, losses
from epiloq.quantize.ends import rounded_ends
from epiloq.quantize.settings import Settings
from epiloq.weights.grid import Grid

if TYPE_CHECKING:
    from epiloq.quantize.job import Job
    from epiloq.quantize.plan import Plan

FILE = "schemes.json"
WINDOWS = 8
"""At most so many of the calibration's windows, for the layers' inputs."""
PROBED, PROBED_TOKENS = 4, 128
"""So many others, if there are, to measure the divergence on, and so many tokens of each."""
LARGE = 0.25
"""The part of a budget from which on an embedding and a head in floating point are worth a warning."""
POINTS = 24
"""Of the frontier."""


@dataclass(frozen=True)
class Prices:
    """The sizes that a budget allows a model's layers, in bytes of weight files.

    kept
        Of what stays in floating point; 0 where the budget does not count it.
    sizes
        Of layers by each candidate.
    most
        What the quantised layers may take together, and the ends.
    ends
        Embedding and head, where the budget chooses their schemes.
    float_ends
        Bytes of those that stay in floating point whatever the budget chooses.
    """

    kept: int
    sizes: Sizes
    most: int
    ends: Sequence[End] = ()
    float_ends: int = 0


@dataclass(frozen=True)
class Choice:
    """The schemes that a budget buys.

    schemes
        A candidate for each layer by name.
    estimated
        The estimated KL divergence from the model in floating point, nats per token.
    size
        Bytes of the weight files, or of the quantised layers where the budget is in bits.
    frontier
        Bytes and estimated divergence of the best choice for other budgets, ascending.
    uniform
        The same of one candidate for all layers that can have it, the ends as they were chosen.
    ends
        Schemes of "head" and "embedding" where the budget chooses them, "float" for none.
    """

    schemes: Mapping[str, str]
    estimated: float
    size: int
    frontier: Sequence[tuple[int, float]]
    uniform: Mapping[str, tuple[int, float]]
    ends: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many layers each candidate has, most first."""
        return dict(Counter(self.schemes.values()).most_common())


def prices(settings: Settings, model: nn.Module, plan: Plan) -> Prices:
    """What a budget leaves for a model's layers, the model with values.

    Raises ValueError for one that no choice of candidates meets, with the least that is possible.
    """
    budget, layers, symmetric, layout = settings.budget, plan.layers, settings.symmetric, FORMATS[plan.layout]
    assert budget is not None
    in_bytes, dtype = budget.file_bytes is not None, next(model.parameters()).dtype
    sizes = Sizes(grids(budget.candidates, symmetric), layout.name, dtype, HEADER if in_bytes else 0)
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    kept, left, free = _outside(settings, model, plan, dtype) if in_bytes else (0, 0, [])
    most = budget.file_bytes - kept if budget.file_bytes is not None else int((budget.bits or 0) * weights / 8)
    each = {name: sizes.options({name: layer}) for name, layer in layers.items()}
    without = [name for name, found in each.items() if not found]
    if without:
        names = ", ".join(budget.candidates)
        raise ValueError(
            f"--candidates: {layout.name} can represent none of {names} for {without[0]}: add w8a16, which fits all"
        )
    least = sum(min(found.values()) for found in each.values()) + sum(min(end.sizes.values()) for end in free)
    largest = sum(max(found.values()) for found in each.values()) + sum(max(end.sizes.values()) for end in free)
    whole = sum(tensor.nbytes for tensor in distinct(model).values()) - kept
    if most > largest and most >= (whole if in_bytes else weights * dtype.itemsize):
        ends = (_amount(budget, amount, kept, weights) for amount in (least, largest))
        raise ValueError(
            f"{budget.said}: that is not less than the size of the floating-point model: expected "
            f"{' to '.join(ends)}, which is what {', '.join(budget.candidates)} can reach"
        )
    if most < least:
        possible = _amount(budget, least, kept, weights)
        beside = f", {kept / 1e6:.1f} MB of them for what stays in floating point" if in_bytes else ""
        raise ValueError(
            f"{budget.said}: the smallest of {', '.join(budget.candidates)} need {possible}{beside}; or add smaller "
            "--candidates, such as w3a16-g64"
        )
    return Prices(kept, sizes, most, free, left)


def _outside(settings: Settings, model: nn.Module, plan: Plan, dtype: torch.dtype) -> tuple[int, int, list[End]]:
    """Bytes of files beside the blocks' layers, those of ends in floating point among them, and ends to choose."""
    assert settings.budget is not None
    layout, asked = FORMATS[plan.layout], {"head": settings.head, "embedding": settings.embedding}
    free = budget_ends.free(model, plan.ends, asked, settings.budget.candidates, layout, settings.symmetric)
    fixed = budget_ends.settle(plan.ends, {role: budget_ends.FLOAT for end in free for role in end.roles})
    ends = {name: (weight, how) for name, weight, how in rounded_ends(model, fixed, layout, settings.symmetric)}
    apart = {*plan.layers, *ends, *plan.ends.names, *(layer for end in free for layer in end.layers)}
    rest = {name: tensor for name, tensor in distinct(model).items() if name.removesuffix(".weight") not in apart}
    for layer, (weight, how) in ends.items():
        rest |= {f"{layer}.{part}": tensor for part, tensor in layout.to_tensors(weight, how, dtype).items()}
    vocabulary = {*plan.ends.found.embeddings, *plan.ends.found.heads}
    left = sum(tensor.nbytes for name, tensor in rest.items() if name.removesuffix(".weight") in vocabulary)
    return sum(tensor.nbytes + HEADER + len(name) for name, tensor in rest.items()), left, free


def warnings(settings: Settings, found: Prices, plan: Plan) -> list[str]:
    """Warnings about a budget before the work, a sentence each."""
    budget, layers, said = settings.budget, plan.layers, []
    assert budget is not None
    largest = sum(max(found.sizes.options({name: layer}).values()) for name, layer in layers.items())
    largest += sum(max(end.sizes.values()) for end in found.ends)
    if found.most > largest:
        weights = sum(layer.in_features * layer.out_features for layer in layers.values())
        enough = _amount(budget, largest, found.kept, weights)
        said.append(f"{budget.said} is more than the largest candidates need: {enough} gives the same")
    if budget.file_bytes is not None and found.float_ends > LARGE * budget.file_bytes:
        said.append(
            f"{budget.said}: {found.float_ends / 1e6:.1f} MB of it are the embedding and the output head in floating "
            "point; --head auto --embedding auto choose schemes for them too"
        )
    if plan.layout == "compressed-tensors" and not settings.symmetric:
        # transformers 5.24 with compressed-tensors 0.20 gives packed zero points a wrong shape; see its `config`.
        said.append(
            "transformers itself does not open several schemes with zero points (epiloq's integration does): take "
            "--symmetric for it"
        )
    return said


def _amount(budget: Budget, count: int, kept: int, weights: int) -> str:
    """The option that gives a budget's layers this number of bytes."""
    return f"--bytes {megabytes(kept + count)}" if budget.file_bytes else f"--bits {_up(8 * count / weights):g}"


def _up(bits: float) -> float:
    """Bits per weight rounded up, so that the printed number suffices."""
    return -(-bits * 100 // 1) / 100


def find(job: Job, advance: Callable[[], None] = lambda: None) -> Choice:
    """The schemes for a job that has a budget; of an interrupted run, those that it found."""
    file = job.aside / FILE
    if (kept := _kept(file)) is not None:
        return kept
    assert job.prices is not None
    settings, windows = job.settings, job.texts.calibration
    layers = {name: m for name, m in job.model.named_modules() if isinstance(m, nn.Linear) and name in job.plan.layers}
    probed = [window[:, :PROBED_TOKENS] for window in (windows[WINDOWS:] or windows)[:PROBED]]
    home = next(job.model.parameters()).device
    job.model.to(settings.device)
    with in_float32(job.model):
        lost = losses(
            job.model,
            windows[:WINDOWS],
            probed,
            job.prices.sizes.grids,
            _reference(layers, job.prices),
            compensate=ALGORITHMS[settings.algorithm].compensate,
            blocks=job.plan.lists,
            filter_fn=lambda module, name: name in layers,
            advance=advance,
        )
        ends = budget_ends.losses(job.model, job.prices.ends, probed, settings.symmetric, advance)
    job.model.to(home)
    found = buy(lost, layers, job.prices, ends)
    write_text(file, json.dumps(asdict(found), indent=1) + "\n")
    return found


def _kept(file: Path) -> Choice | None:
    """What an interrupted run found, if its file is there and whole."""
    try:
        return Choice(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, TypeError, ValueError):
        return None


def steps(job: Job) -> int:
    """How often `find` advances."""
    return job.plan.blocks + (0 if job.prices is None else len(job.prices.ends))


def _reference(layers: Mapping[str, nn.Linear], found: Prices) -> str:
    """The candidate whose layers together take about what they may."""
    totals = dict.fromkeys(found.sizes.grids, 0)
    for layer in layers.values():
        smallest = min(found.sizes.options({"": layer}).values())
        for name in totals:
            totals[name] += found.sizes.of(name, (layer.out_features, layer.in_features)) or smallest
    return min(totals, key=lambda name: abs(totals[name] - found.most))


def buy(
    lost: Losses, layers: Mapping[str, nn.Linear], found: Prices, of_ends: Sequence[Mapping[str, float]] = ()
) -> Choice:
    """The choice of least loss, and the frontier. Raises ValueError where layers of one input leave none."""
    items = lost
    options = [found.sizes.options({name: layers[name] for name in names}) for names in items]
    bad = next((names for names, each in zip(items, options, strict=True) if not each), None)
    if bad is not None:
        raise ValueError(f"--candidates: expected one that {', '.join(bad)} can have together, got none: add w8a16")
    count = len(options)
    options += [dict(end.sizes) for end in found.ends]
    values = [*items.values(), *of_ends]
    sizes = [list(each.values()) for each in options]
    costs = [[value[name] for name in each] for each, value in zip(options, values, strict=True)]

    def best(most: int) -> tuple[list[int], int, float]:
        chosen = knapsack.choose(sizes, costs, most)
        total = sum(each[option] for each, option in zip(sizes, chosen, strict=True))
        return chosen, found.kept + total, sum(each[option] for each, option in zip(costs, chosen, strict=True))

    least, largest = sum(map(min, sizes)), sum(map(max, sizes))
    if found.most < least:
        raise ValueError(f"the layers that share an input need {megabytes(found.kept + least)} together; give more")
    chosen, size, estimated = best(found.most)
    picked = [list(each)[option] for each, option in zip(options, chosen, strict=True)]
    names = {name: picked[i] for i, layers_of in enumerate(items) for name in layers_of}
    roles = {role: scheme for end, scheme in zip(found.ends, picked[count:], strict=True) for role in end.roles}
    fixed = sum(sizes[i][chosen[i]] for i in range(count, len(options)))
    lost_by_ends = sum(costs[i][chosen[i]] for i in range(count, len(options)))
    curve = [best(least + (largest - least) * i // (POINTS - 1))[1:] for i in range(POINTS)]
    uniform = {
        name: (
            found.kept + fixed + sum(each[name] for each in options[:count]),
            lost_by_ends + sum(value[name] for value in items.values()),
        )
        for name in found.sizes.grids
        if all(name in each for each in options[:count])
    }
    return Choice(names, estimated, size, sorted(set(curve)), uniform, roles)


def grids_of(choice: Choice, found: Prices) -> dict[str, Grid]:
    """The grid of every layer."""
    return {layer: found.sizes.grids[name] for layer, name in choice.schemes.items()}


def report(job: Job, choice: Choice, divergence: tuple[float, str]) -> dict[str, Any]:
    """What the report says of the budget; `divergence` was measured, on what text."""
    assert job.settings.budget is not None
    return {
        "asked": job.settings.budget.said,
        "counts_all": job.settings.budget.file_bytes is not None,
        "counts": choice.counts,
        "ends": dict(choice.ends),
        "bytes": choice.size,
        "estimated": choice.estimated,
        "measured": divergence[0],
        "measured_on": divergence[1],
        "frontier": choice.frontier,
        "uniform": choice.uniform,
        "schemes": choice.schemes,
    }
