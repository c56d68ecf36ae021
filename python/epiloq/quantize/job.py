"""One run of ``epiloq quantize``: checks first, finished blocks are stored, the result is written atomically."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from shutil import rmtree
from typing import Any

from torch import nn

from epiloq.evaluation.perplexity import perplexity
from epiloq.files import check_free, held, named_failures, removed_if_failed
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import save
from epiloq.formats.layouts.base import Quantization
from epiloq.formats.table import FORMATS
from epiloq.models.mixtures import stacked
from epiloq.models.stacked_experts import reason_against
from epiloq.progress import Stage, unseen
from epiloq.quantize import report as page
from epiloq.quantize.algorithms.rotate import rotate_
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.algorithms.tuning import tuned
from epiloq.quantize.budget import search
from epiloq.quantize.budget.vocabulary import settle
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.joining import check_alike
from epiloq.quantize.calibration.ranks import Ranks
from epiloq.quantize.calibration.residence import Resident
from epiloq.quantize.calibration.static import Static
from epiloq.quantize.calibration.store import Store, check_resumable
from epiloq.quantize.calibration.tally import Tally
from epiloq.quantize.calibration.work import Block
from epiloq.quantize.checks import check_finite_weights, check_model, check_request, report_lock_holder
from epiloq.quantize.identity import facts, identity_of
from epiloq.quantize.measures import weight_bytes
from epiloq.quantize.plan import Plan
from epiloq.quantize.settings import Settings
from epiloq.quantize.streaming import kept_values, opened
from epiloq.quantize.targets import TARGETS, Target
from epiloq.quantize.texts import Texts, needs_text, read_windows
from epiloq.quantize.vocabulary import rounded_vocabulary
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.grid import Grid
from epiloq.weights.rounding import Codebook

LOCK = "lock"


@dataclass(frozen=True)
class Job:
    """Checked settings and the resulting plan for the model. Nothing has been written yet.

    residence
        Access to the model's blocks.
    texts
        Windows of tokens for calibration and evaluation.
    quantization
        How layers are quantised, for formats of integers; None for another grid.
    plan
        The layers to quantise, and those that are left.
    identity
        Settings and data, except the grid, that must be unchanged to resume a run.
    bytes_before
        Size of the model's weight files.
    seconds
        Time that opening the model took.
    ranks
        The processes of the run; the first writes.
    budget_sizes
        With a budget: the candidates and their sizes.
    choice
        With a budget: the chosen schemes, once they are known.
    """

    settings: Settings
    source: Checkpoint
    model: nn.Module
    residence: Resident
    texts: Texts
    grid: Codebook[Calibrated]
    quantization: Quantization | None
    identity: dict[str, Any]
    plan: Plan
    bytes_before: int
    seconds: float
    ranks: Ranks
    budget_sizes: search.BudgetSizes | None = None
    choice: search.Choice | None = None

    @property
    def target(self) -> Target:
        """The scheme."""
        return TARGETS[self.settings.scheme]

    @property
    def partial_directory(self) -> Path:
        """Directory of the run's unfinished blocks."""
        return _partial_directory(self.settings)

    @property
    def warnings(self) -> list[str]:
        """Warnings before the work, a sentence each."""
        budget_warnings = (
            [] if self.budget_sizes is None else search.warnings(self.settings, self.budget_sizes, self.plan)
        )
        return [*self.plan.notes, *self.texts.warnings, *_untied(self), *budget_warnings]

    @property
    def grids(self) -> Mapping[str, Grid]:
        """Grids of layers by name, with a budget."""
        return (
            {} if self.choice is None or self.budget_sizes is None else search.grids_of(self.choice, self.budget_sizes)
        )

    def grid_of(self, layer: str) -> Codebook[Calibrated]:
        """Grid of any layer."""
        return self.grids.get(layer, self.grid)

    @property
    def float_experts(self) -> dict[str, str]:
        """Experts that stay in floating point, by name, with the reason."""
        found = stacked(self.model).items()
        return {name: reason_against(module) or "stacked in files; format epiloq has them" for name, module in found}

    def perplexity(self, model: nn.Module, tally: Tally, title: str) -> float | None:
        """Perplexity on the evaluation text, if there is any."""
        windows = self.texts.evaluation
        if not windows:
            return None
        with tally.timed(title, len(windows)) as advance:
            return perplexity(model, windows, advance)

    def report(self, whole: Path, tally: Tally, before: float | None, start: float) -> dict[str, Any]:
        """Result of the run, given the directory that it wrote; the HTML page goes there too."""
        return page.finished(self, whole, tally, before, start)


def prepare(settings: Settings, ranks: Ranks | None = None) -> Job:
    """Check everything possible, then open the model. Raises ValueError before anything is written to disk.

    All ranks call this and `perform`; ValueError is also raised if they have different files, text or versions.
    """
    ranks = ranks or Ranks()
    with ranks.together():
        job = _prepared(settings, ranks)
    check_alike(ranks, facts(job.settings, job.identity, job.source, job.grid))
    return job


def _prepared(settings: Settings, ranks: Ranks) -> Job:
    start, target = time.perf_counter(), TARGETS[settings.scheme]
    source = Checkpoint(settings.model)
    check_request(settings, ranks.world)
    plan = check_model(settings, source)
    texts = read_windows(settings, source)
    identity = identity_of(settings, source, plan, texts.calibration)
    if ranks.rank == 0:
        with report_lock_holder(settings):
            check_free(_partial_directory(settings) / LOCK)
        check_resumable(_partial_directory(settings), identity)
    layout = FORMATS[plan.layout]
    model, residence = opened(source, layout.name, plan.lists, whole=settings.whole)
    some = None if needs_text(settings) else {*plan.layers, *plan.vocabulary.names}
    check_finite_weights(islice(residence.values(model), ranks.rank, None, ranks.world), some, source)
    if settings.rotate and rotate_(model, seed=settings.seed).untied:
        source.config["tie_word_embeddings"] = False
    options = settings.symmetric, layout.scale_dtype(next(model.parameters()).dtype, target.quantization())
    grid, quantization = target.grid(*options, layout.widens), target.quantization(*options)
    budget_sizes = None if settings.budget is None else search.budget_sizes(settings, model, plan)
    seconds = time.perf_counter() - start
    return Job(
        settings,
        source,
        model,
        residence,
        texts,
        grid,
        quantization,
        identity,
        plan,
        weight_bytes(settings.model),
        seconds,
        ranks,
        budget_sizes,
    )


def _untied(job: Job) -> list[str]:
    """Warning if a rotation unties the head from the embedding."""
    if not job.settings.rotate or "lm_head.weight" in job.source.files:
        return []
    size = sum(t.nbytes for n, t in job.model.state_dict().items() if n == "lm_head.weight") / 1e6
    return [f"rotated: the output head is no longer tied to the embedding, and takes {size:.1f} MB more"]


def _partial_directory(settings: Settings) -> Path:
    """Directory of a run's unfinished blocks."""
    return settings.output.with_name(f".{settings.output.name}.partial")


def perform(job: Job, stage: Stage = unseen) -> dict[str, Any] | None:
    """Quantise, write and report. An interrupted run resumes where it stopped, on any number of ranks.

    Returns the report on the first rank, which alone reads and writes finished blocks, and None on others.

    Raises ValueError, or OSError for disk errors. Finished blocks are kept in `job.partial_directory`, unless
    the model or a block is refused: a resumed run would then be refused too.
    """
    start, settings, tally = time.perf_counter() - job.seconds, job.settings, Tally(stage)
    tally.seconds["load"] = job.seconds
    tally.error_of = "output" if ALGORITHMS[settings.algorithm].needs_inputs else "weight"
    if job.ranks.rank:
        _quantise(_chosen(job, tally), None, tally)
        return None
    with report_lock_holder(settings), held(job.partial_directory / LOCK), named_failures(settings.output):
        if settings.output.exists():
            raise FileExistsError(f"{settings.output} was created in the meantime")
        return _performed(job, tally, start)


def _performed(job: Job, tally: Tally, start: float) -> dict[str, Any]:
    """Perform a run while holding its lock."""
    settings = job.settings
    store = Store(job.partial_directory, {**job.identity, "grid": repr(job.grid)}, job.grid_of)
    try:
        with job.residence.on_demand():
            before = job.perplexity(job.model, tally, "evaluate before")
        job = _chosen(job, tally)
        store.grid_of = job.grid_of
        _quantise(job, store, tally)
    except ValueError:
        store.discard()
        raise
    whole = job.partial_directory / "model"
    rmtree(whole, ignore_errors=True)
    with removed_if_failed(whole, settings.output):
        _write(job, store, tally, whole)
        found = job.report(whole, tally, before, start)
        if settings.output.exists():
            raise FileExistsError(f"{settings.output} was created in the meantime")
        whole.rename(settings.output)
    store.discard()
    return found


def _write(job: Job, store: Store, tally: Tally, whole: Path) -> None:
    """Write the quantised model."""
    settings = job.settings
    read = tuned(job, store, tally) if settings.tune else store.read
    with tally.timed("write", 1) as advance:
        finished = (block.weights for block in map(read, tally.blocks) if block is not None)
        layout, all_of = FORMATS[job.plan.layout], job.quantization
        quantization = None if all_of is None else replace(all_of, dynamic=tally.dynamic, grids=job.grids)
        weights = (
            (name, job.target.stored_form(weight), None if quantization is None else quantization.of(name))
            for found in finished
            for name, weight in found.items()
        )
        vocabulary = job.plan.vocabulary
        rounded = rounded_vocabulary(job.model, vocabulary, layout, settings.symmetric)
        shared = vocabulary.shared if layout.shares else {}
        untie = vocabulary.found.tied and bool(vocabulary.names) and not layout.shares
        value = kept_values(store, tally.blocks)
        save(job.model, chain(weights, rounded), job.source, whole, layout, shared, untie=untie, value=value)
        advance()


def _chosen(job: Job, tally: Tally) -> Job:
    """The job with a scheme for each layer, if there is a budget; the first rank chooses."""
    if job.settings.budget is None:
        return job
    choice = None
    with job.ranks.together():
        if job.ranks.rank == 0:
            with tally.timed("choose schemes", search.steps(job)) as advance:
                choice = search.choose_schemes(job, advance)
    choice = job.ranks.share(choice)
    vocabulary = settle(job.plan.vocabulary, choice.vocabulary)
    return replace(job, choice=choice, plan=replace(job.plan, vocabulary=vocabulary))


def _quantise(job: Job, store: Store | None, tally: Tally) -> None:
    """Quantise the blocks; the first rank, which has the store, writes them."""
    settings = job.settings
    title = f"{settings.scheme}, {settings.algorithm}: blocks"
    if store is not None and store.kept:
        title += f" ({store.kept} of them kept of an interrupted run)"
    with tally.timed("quantise", job.plan.blocks, title) as advance:
        for block in _walk(job, store):
            resumed = store is not None and store.has(block.name)
            if store is not None and not resumed:
                store.write(block)
            tally.add(block, resumed)
            advance()


def _walk(job: Job, store: Store | None) -> Iterator[Block]:
    settings = job.settings
    return calibrate(
        job.model,
        job.texts.calibration,
        job.grid,
        settings.rounding,
        inputs=job.target.inputs,
        alpha=settings.alpha,
        static=Static(settings.keep_dynamic) if job.target.static else None,
        grids=job.grids,
        blocks=job.plan.lists,
        filter_fn=lambda module, name: name in job.plan.layers,
        finished=store.read if store is not None else lambda name: None,
        device=settings.device,
        ranks=job.ranks,
        residence=job.residence,
    )
