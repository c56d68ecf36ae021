"""Find a scheme for each layer within a budget, and the best results for other budgets."""

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
from epiloq.quantize.budget import knapsack
from epiloq.quantize.budget import vocabulary as budget_vocabulary
from epiloq.quantize.budget.amount import Budget, megabytes
from epiloq.quantize.budget.candidates import HEADER, Sizes, grids
from epiloq.quantize.budget.probe import in_float32
from epiloq.quantize.budget.sensitivity import Losses, losses
from epiloq.quantize.budget.vocabulary import VocabularyWeight
from epiloq.quantize.settings import Settings
from epiloq.quantize.vocabulary import rounded_vocabulary
from epiloq.weights.grid import Grid

if TYPE_CHECKING:
    from epiloq.quantize.job import Job
    from epiloq.quantize.plan import Plan

FILE = "schemes.json"
WINDOWS = 8
"""Maximum number of calibration windows used for the layers' inputs."""
PROBED, PROBED_TOKENS = 4, 128
"""Maximum number of other windows on which the divergence is measured, and the tokens used of each."""
LARGE = 0.25
"""Fraction of a budget above which a floating-point embedding and head cause a warning."""
POINTS = 24
"""Number of points of the frontier."""


@dataclass(frozen=True)
class BudgetSizes:
    """The sizes of a model's layers within a budget, in bytes of weight files.

    fixed_bytes
        Size of everything that stays in floating point; 0 if the budget does not count it.
    sizes
        Sizes of layers for each candidate.
    most
        Maximum total size of the quantised layers and of `vocabulary`.
    vocabulary
        The embedding and the head, if the budget chooses their schemes.
    float_vocabulary
        Size of the embedding and the head if they stay in floating point whatever the budget chooses.
    """

    fixed_bytes: int
    sizes: Sizes
    most: int
    vocabulary: Sequence[VocabularyWeight] = ()
    float_vocabulary: int = 0


@dataclass(frozen=True)
class Choice:
    """The chosen schemes.

    schemes
        The candidate of each layer, by name.
    estimated
        Estimated KL divergence from the floating-point model, in nats per token.
    size
        Bytes of the weight files, or of the quantised layers alone if the budget is in bits.
    frontier
        Bytes and estimated divergence of the best choices for other budgets, ascending.
    uniform
        The same with one candidate for all layers that support it, and the chosen embedding and head.
    vocabulary
        Schemes of "head" and "embedding" if the budget chooses them; "float" for none.
    """

    schemes: Mapping[str, str]
    estimated: float
    size: int
    frontier: Sequence[tuple[int, float]]
    uniform: Mapping[str, tuple[int, float]]
    vocabulary: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers of each candidate, most frequent first."""
        return dict(Counter(self.schemes.values()).most_common())


def budget_sizes(settings: Settings, model: nn.Module, plan: Plan) -> BudgetSizes:
    """The sizes that a budget allows for the layers of a model, which must have values. Raises ValueError, which names
    the smallest possible budget, if no choice of candidates meets it.
    """
    budget, layers, symmetric, layout = settings.budget, plan.layers, settings.symmetric, FORMATS[plan.layout]
    assert budget is not None
    in_bytes, dtype = budget.file_bytes is not None, next(model.parameters()).dtype
    sizes = Sizes(grids(budget.candidates, symmetric), layout.name, dtype, HEADER if in_bytes else 0)
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    fixed_bytes, left, free = _other_bytes(settings, model, plan, dtype) if in_bytes else (0, 0, [])
    most = budget.file_bytes - fixed_bytes if budget.file_bytes is not None else int((budget.bits or 0) * weights / 8)
    each = {name: sizes.options({name: layer}) for name, layer in layers.items()}
    without = [name for name, found in each.items() if not found]
    if without:
        names = ", ".join(budget.candidates)
        raise ValueError(
            f"--candidates: {layout.name} can represent none of {names} for {without[0]}: add w8a16, which fits all"
        )
    least = sum(min(found.values()) for found in each.values()) + sum(min(part.sizes.values()) for part in free)
    largest = sum(max(found.values()) for found in each.values()) + sum(max(part.sizes.values()) for part in free)
    whole = sum(tensor.nbytes for tensor in distinct(model).values()) - fixed_bytes
    if most > largest and most >= (whole if in_bytes else weights * dtype.itemsize):
        reach = (_as_option(budget, amount, fixed_bytes, weights) for amount in (least, largest))
        raise ValueError(
            f"{budget.text}: expected less than the size of the floating-point model: "
            f"{' to '.join(reach)} for {', '.join(budget.candidates)}"
        )
    if most < least:
        possible = _as_option(budget, least, fixed_bytes, weights)
        kept = f", {fixed_bytes / 1e6:.1f} MB of them for what stays in floating point" if in_bytes else ""
        smaller = sizes.smaller(layers, symmetric)
        other = f"; or add smaller --candidates, such as {smaller}" if smaller else ""
        raise ValueError(f"{budget.text}: the smallest of {', '.join(budget.candidates)} need {possible}{kept}{other}")
    return BudgetSizes(fixed_bytes, sizes, most, free, left)


def _other_bytes(
    settings: Settings, model: nn.Module, plan: Plan, dtype: torch.dtype
) -> tuple[int, int, list[VocabularyWeight]]:
    """Bytes of everything other than the blocks' layers, the part of a floating-point embedding and head in it, and the
    embedding and head whose schemes are to be chosen."""
    assert settings.budget is not None
    layout, asked = FORMATS[plan.layout], {"head": settings.head, "embedding": settings.embedding}
    free = budget_vocabulary.free(model, plan.vocabulary, asked, settings.budget.candidates, layout, settings.symmetric)
    fixed = budget_vocabulary.settle(
        plan.vocabulary, {role: budget_vocabulary.FLOAT for part in free for role in part.roles}
    )
    rounded = {
        name: (weight, how) for name, weight, how in rounded_vocabulary(model, fixed, layout, settings.symmetric)
    }
    apart = {*plan.layers, *rounded, *plan.vocabulary.names, *(layer for part in free for layer in part.layers)}
    rest = {name: tensor for name, tensor in distinct(model).items() if name.removesuffix(".weight") not in apart}
    for layer, (weight, how) in rounded.items():
        rest |= {f"{layer}.{part}": tensor for part, tensor in layout.to_tensors(weight, how, dtype).items()}
    vocabulary = {*plan.vocabulary.found.embeddings, *plan.vocabulary.found.heads}
    left = sum(tensor.nbytes for name, tensor in rest.items() if name.removesuffix(".weight") in vocabulary)
    return sum(tensor.nbytes + HEADER + len(name) for name, tensor in rest.items()), left, free


def warnings(settings: Settings, found: BudgetSizes, plan: Plan) -> list[str]:
    """Warnings about a budget to issue before the work, one sentence each."""
    budget, layers, messages = settings.budget, plan.layers, []
    assert budget is not None
    largest = sum(max(found.sizes.options({name: layer}).values()) for name, layer in layers.items())
    largest += sum(max(part.sizes.values()) for part in found.vocabulary)
    if found.most > largest:
        weights = sum(layer.in_features * layer.out_features for layer in layers.values())
        enough = _as_option(budget, largest, found.fixed_bytes, weights)
        messages.append(f"{budget.text} is more than the largest candidates need: {enough} gives the same")
    if budget.file_bytes is not None and found.float_vocabulary > LARGE * budget.file_bytes:
        messages.append(
            f"{budget.text}: {found.float_vocabulary / 1e6:.1f} MB of it are the embedding and the output head in "
            "floating point; --head auto --embedding auto choose schemes for them too"
        )
    if plan.layout == "compressed-tensors" and not settings.symmetric:
        # transformers 5.24 with compressed-tensors 0.20 gives packed zero points a wrong shape; see its `config`.
        messages.append(
            "transformers without epiloq's integration cannot open several schemes with zero points: use --symmetric "
            "for it"
        )
    return messages


def _as_option(budget: Budget, count: int, fixed_bytes: int, weights: int) -> str:
    """The command-line option for a budget that gives the layers this number of bytes."""
    return (
        f"--bytes {megabytes(fixed_bytes + count)}"
        if budget.file_bytes
        else f"--bits {_rounded_up(8 * count / weights):g}"
    )


def _rounded_up(bits: float) -> float:
    """Bits per weight rounded up, so that the printed number suffices."""
    return -(-bits * 100 // 1) / 100


def choose_schemes(job: Job, advance: Callable[[], None] = lambda: None) -> Choice:
    """The schemes for a job with a budget; a resumed run uses those that were found before."""
    file = job.partial_directory / FILE
    if (resumed := _resumed(file)) is not None:
        return resumed
    assert job.budget_sizes is not None
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
            job.budget_sizes.sizes.grids,
            _reference(layers, job.budget_sizes),
            algorithm=ALGORITHMS[settings.algorithm],
            blocks=job.plan.lists,
            filter_fn=lambda module, name: name in layers,
            advance=advance,
        )
        vocabulary = budget_vocabulary.losses(
            job.model, job.budget_sizes.vocabulary, probed, settings.symmetric, advance
        )
    job.model.to(home)
    found = best_choice(lost, layers, job.budget_sizes, vocabulary)
    write_text(file, json.dumps(asdict(found), indent=1) + "\n")
    return found


def _resumed(file: Path) -> Choice | None:
    """The result of an interrupted run, if its file exists and is complete."""
    try:
        return Choice(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, TypeError, ValueError):
        return None


def steps(job: Job) -> int:
    """Number of calls of `advance` in `choose_schemes`."""
    return job.plan.blocks + (0 if job.budget_sizes is None else len(job.budget_sizes.vocabulary))


def _reference(layers: Mapping[str, nn.Linear], found: BudgetSizes) -> str:
    """The candidate with which all layers together come closest to the allowed size."""
    totals = dict.fromkeys(found.sizes.grids, 0)
    for layer in layers.values():
        smallest = min(found.sizes.options({"": layer}).values())
        for name in totals:
            totals[name] += found.sizes.of(name, (layer.out_features, layer.in_features)) or smallest
    return min(totals, key=lambda name: abs(totals[name] - found.most))


def best_choice(
    lost: Losses, layers: Mapping[str, nn.Linear], found: BudgetSizes, of_vocabulary: Sequence[Mapping[str, float]] = ()
) -> Choice:
    """The choice with the smallest loss, and the frontier. Raises ValueError if layers that must share a scheme allow
    no choice."""
    items = lost
    options = [found.sizes.options({name: layers[name] for name in names}) for names in items]
    bad = next((names for names, each in zip(items, options, strict=True) if not each), None)
    if bad is not None:
        raise ValueError(f"--candidates: expected one that {', '.join(bad)} can have together, got none: add w8a16")
    count = len(options)
    options += [dict(part.sizes) for part in found.vocabulary]
    values = [*items.values(), *of_vocabulary]
    sizes = [list(each.values()) for each in options]
    costs = [[value[name] for name in each] for each, value in zip(options, values, strict=True)]

    def best(most: int) -> tuple[list[int], int, float]:
        chosen = knapsack.choose(sizes, costs, most)
        total = sum(each[option] for each, option in zip(sizes, chosen, strict=True))
        return chosen, found.fixed_bytes + total, sum(each[option] for each, option in zip(costs, chosen, strict=True))

    least, largest = sum(map(min, sizes)), sum(map(max, sizes))
    if found.most < least:
        raise ValueError(
            f"the layers that share an input need {megabytes(found.fixed_bytes + least)} together; give more"
        )
    chosen, size, estimated = best(found.most)
    picked = [list(each)[option] for each, option in zip(options, chosen, strict=True)]
    names = {name: picked[i] for i, layers_of in enumerate(items) for name in layers_of}
    roles = {role: scheme for part, scheme in zip(found.vocabulary, picked[count:], strict=True) for role in part.roles}
    fixed = sum(sizes[i][chosen[i]] for i in range(count, len(options)))
    lost_by_vocabulary = sum(costs[i][chosen[i]] for i in range(count, len(options)))
    curve = [best(least + (largest - least) * i // (POINTS - 1))[1:] for i in range(POINTS)]
    uniform = {
        name: (
            found.fixed_bytes + fixed + sum(each[name] for each in options[:count]),
            lost_by_vocabulary + sum(value[name] for value in items.values()),
        )
        for name in found.sizes.grids
        if all(name in each for each in options[:count])
    }
    return Choice(names, estimated, size, sorted(set(curve)), uniform, roles)


def grids_of(choice: Choice, found: BudgetSizes) -> dict[str, Grid]:
    """The grid of each layer by name."""
    return {layer: found.sizes.grids[name] for layer, name in choice.schemes.items()}


def report(job: Job, choice: Choice, divergence: tuple[float, str]) -> dict[str, Any]:
    """The budget's section of the report; `divergence` was measured on the named text."""
    assert job.settings.budget is not None
    return {
        "asked": job.settings.budget.text,
        "counts_all": job.settings.budget.file_bytes is not None,
        "counts": choice.counts,
        "vocabulary": dict(choice.vocabulary),
        "bytes": choice.size,
        "estimated": choice.estimated,
        "measured": divergence[0],
        "measured_on": divergence[1],
        "frontier": choice.frontier,
        "uniform": choice.uniform,
        "schemes": choice.schemes,
    }
