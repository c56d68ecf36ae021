"""One run of ``epiloq quantize``: everything is checked first, finished blocks are kept, the result appears whole."""

from __future__ import annotations

import hashlib
import platform
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq.demo.perplexity import perplexity
from epiloq.formats import epiloq_modules
from epiloq.formats.architecture import renamed
from epiloq.formats.checkpoint import Checkpoint
from epiloq.formats.layouts import Quantization
from epiloq.formats.model import load, load_float, save
from epiloq.formats.table import FORMATS
from epiloq.mixtures import reason_against, stacked, take_apart_
from epiloq.progress import Stage, unseen
from epiloq.quantize import report as page
from epiloq.quantize.algorithms import ALGORITHMS
from epiloq.quantize.blocks import find_blocks, linears_of
from epiloq.quantize.calibrate import Block, calibrate
from epiloq.quantize.codebooks import Calibrated
from epiloq.quantize.outputs import choose
from epiloq.quantize.rounding import Codebook
from epiloq.quantize.smoothquant import ALPHA
from epiloq.quantize.static import Static
from epiloq.quantize.store import Store
from epiloq.quantize.tally import Tally
from epiloq.quantize.targets import TARGETS, Target
from epiloq.quantize.text import SEED, load_tokenizer, read_texts, sample, windows
from epiloq.schemes import default_filter

# As `epiloq eval` has them unless told otherwise, so that both print the same figure.
EVALUATED_TOKENS, EVALUATED_LENGTH = 16384, 512


@dataclass(frozen=True)
class Settings:
    """What to do; `scheme`, `algorithm` and `layout` are names in TARGETS, ALGORITHMS and FORMATS.

    evaluation
        Text to measure perplexity on, before and after.
    command
        What the report says this was asked by.
    """

    model: Path
    output: Path
    scheme: str
    algorithm: str = "gptq"
    layout: str = "compressed-tensors"
    calibration: Path | None = None
    symmetric: bool = False
    count: int = 32
    length: int = 512
    seed: int = SEED
    alpha: float = ALPHA
    keep_dynamic: str | None = None
    blocks: str | None = None
    device: str = "cpu"
    evaluation: Path | None = None
    command: str = ""


@dataclass(frozen=True)
class Job:
    """Settings that were checked, and what they say of the model. Nothing was written yet.

    texts, evaluation
        Windows of tokens to calibrate and to evaluate on; they share none.
    quantization
        What formats of integers have words for; None for another grid.
    seconds
        That opening took.
    """

    settings: Settings
    source: Checkpoint
    model: nn.Module
    texts: list[Tensor]
    evaluation: list[Tensor]
    grid: Codebook[Calibrated]
    quantization: Quantization | None
    blocks: int
    seconds: float

    @property
    def target(self) -> Target:
        """The scheme."""
        return TARGETS[self.settings.scheme]

    @property
    def aside(self) -> Path:
        """Where the run keeps what is not finished."""
        return self.settings.output.with_name(f".{self.settings.output.name}.partial")

    @property
    def float_experts(self) -> dict[str, str]:
        """Experts by name that stay in floating point, and why."""
        found = stacked(self.model).items()
        return {name: reason_against(module) or "stacked in files; format epiloq has them" for name, module in found}

    def perplexity(self, model: nn.Module, tally: Tally, title: str) -> float | None:
        """Of the text to evaluate on, if there is any."""
        if not self.evaluation:
            return None
        with tally.timed(title, len(self.evaluation)) as advance:
            return perplexity(model, self.evaluation, advance)

    def report(self, whole: Path, tally: Tally, before: float | None, start: float) -> dict[str, Any]:
        """What came of the run, given the directory that it wrote; the page that shows it goes there too."""
        settings = self.settings
        found = {
            **{key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()},
            "calibration_tokens": sum(window.numel() for window in self.texts),
            "blocks": len(tally.blocks),
            "blocks_resumed": tally.resumed,
            "error_of": tally.error_of,
            "layer_errors": tally.errors,
            "input_errors": tally.input_errors,
            "float_experts": self.float_experts,
            "scales": tally.histogram,
            "bytes_before": _weight_bytes(settings.model),
            "bytes_after": _weight_bytes(whole),
            "perplexity": None,
        }
        if before is not None:
            after = self.perplexity(load(Checkpoint(whole))[0].to(settings.device), tally, "evaluate after")
            tokens = sum(window.numel() for window in self.evaluation)
            found["perplexity"] = {"before": before, "after": after, "tokens": tokens, "window": EVALUATED_LENGTH}
        found |= {
            "stages": tally.seconds,
            "seconds": time.perf_counter() - start,
            "peak_memory_bytes": peak_memory(),
            "environment": _environment(settings),
        }
        if not page.missing():
            (whole / page.FILE).write_text(page.render(found), encoding="utf-8")
        return found


def prepare(settings: Settings) -> Job:
    """Load what a run needs and check all that can be. Raises ValueError, with nothing on the disk touched."""
    start, target = time.perf_counter(), TARGETS[settings.scheme]
    layout = FORMATS[choose(settings.scheme, settings.layout, settings.symmetric)]
    if settings.output.exists() or settings.output.is_symlink():
        raise ValueError(f"{settings.output} exists already: choose another output, or move it away")
    if settings.keep_dynamic is not None and not target.static:
        raise ValueError(f"{settings.scheme} has no static scales to keep a layer from (--keep-dynamic)")
    source = Checkpoint(settings.model)
    texts, evaluation = _texts(settings, target.static or ALGORITHMS[settings.algorithm].needs_inputs)
    model = renamed(load_float(source), source)
    if layout.name == epiloq_modules.METHOD:
        take_apart_(model)
    if evaluation:
        check_generates(model, settings.model)
    dtype = next(model.parameters()).dtype
    wish = settings.symmetric, layout.scale_dtype(dtype, target.activations)
    grid, quantization = target.grid(*wish), target.quantization(*wish)
    takes = default_filter(model)
    blocks = find_blocks(model, takes, settings.blocks)
    layers = [layer for name, block in blocks.items() for layer in linears_of(block, name, takes).values()]
    if quantization is not None:
        layout.check(quantization, {(layer.out_features, layer.in_features) for layer in layers}, dtype)
    seconds = time.perf_counter() - start
    return Job(settings, source, model, texts, evaluation, grid, quantization, len(blocks), seconds)


def _texts(settings: Settings, calibrated: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Windows to calibrate and to evaluate on, as far as they are asked for."""
    texts: list[Tensor] = []
    evaluation: list[Tensor] = []
    if calibrated:
        if settings.calibration is None:
            raise ValueError(f"{settings.scheme} by {settings.algorithm} needs calibration text (--calibration FILE)")
        found = windows(load_tokenizer(settings.model), read_texts(settings.calibration), settings.length)
        texts = sample(found, settings.count, settings.seed)
    if settings.evaluation is not None:
        found = windows(load_tokenizer(settings.model), read_texts(settings.evaluation), EVALUATED_LENGTH)
        evaluation = found[: EVALUATED_TOKENS // EVALUATED_LENGTH]
        seen = {tuple(window.flatten().tolist()) for window in texts}
        if any(tuple(window.flatten().tolist()) in seen for window in evaluation):
            raise ValueError(f"{settings.evaluation}: expected text that calibration does not see, found some of it")
    return texts, evaluation


def perform(job: Job, stage: Stage = unseen) -> dict[str, Any]:
    """Quantise, write, and report. An interrupted run goes on where it stopped.

    Raises ValueError, or OSError when the disk fails; finished blocks stay in `job.aside`.
    """
    start, settings, tally = time.perf_counter() - job.seconds, job.settings, Tally(stage)
    tally.seconds["load"] = job.seconds
    tally.error_of = "output" if ALGORITHMS[settings.algorithm].needs_inputs else "weight"
    store = Store(job.aside, _identity(job), job.grid)
    before = job.perplexity(job.model, tally, "evaluate before")
    with tally.timed("quantise", job.blocks, f"{settings.scheme}, {settings.algorithm}: blocks") as advance:
        for block in _walk(job, store):
            resumed = store.has(block.name)
            if not resumed:
                store.write(block)
            tally.add(block, resumed)
            advance()
    whole = job.aside / "model"
    rmtree(whole, ignore_errors=True)
    with tally.timed("write", 1) as advance:
        finished = (block.weights for block in map(store.read, tally.blocks) if block is not None)
        weights = ((name, job.target.said(weight)) for found in finished for name, weight in found.items())
        quantization = None if job.quantization is None else replace(job.quantization, dynamic=tally.dynamic)
        save(job.model, weights, job.source, whole, FORMATS[settings.layout], quantization)
        advance()
    found = job.report(whole, tally, before, start)
    if settings.output.exists():
        raise FileExistsError(f"{settings.output} appeared meanwhile")
    whole.rename(settings.output)
    store.discard()
    return found


def _walk(job: Job, store: Store) -> Iterator[Block]:
    settings = job.settings
    return calibrate(
        job.model,
        job.texts,
        job.grid,
        ALGORITHMS[settings.algorithm],
        inputs=job.target.inputs,
        alpha=settings.alpha,
        static=Static(settings.keep_dynamic) if job.target.static else None,
        blocks=settings.blocks,
        finished=store.read,
        device=settings.device,
    )


def check_generates(model: nn.Module, folder: Path) -> None:
    """Raise ValueError unless the model is a causal language model, which perplexity is measured of."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        raise ValueError(f"{folder}: expected a causal language model, got {type(model).__name__}")


def _environment(settings: Settings) -> dict[str, str]:
    """Versions and the machine, for a reader."""
    processor: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    device = settings.device
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor.get("cpu_name", "")
    return {
        "versions": f"epiloq {epiloq.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{where or platform.machine()}, {torch.get_num_threads()} threads",
    }


def peak_memory() -> int:
    """The most memory that this process has held, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _identity(job: Job) -> dict[str, Any]:
    """Whatever decides the values of a finished block."""
    settings, digest = job.settings, hashlib.sha256()
    for window in job.texts:
        digest.update(window.numpy().tobytes() + b"|")
    files = sorted({"config.json", *job.source.files.values()})
    stats = {file: (settings.model / file).stat() for file in files}
    return {
        "epiloq": epiloq.__version__,
        "model": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()},
        "scheme": settings.scheme,
        "algorithm": settings.algorithm,
        "grid": repr(job.grid),
        "alpha": settings.alpha,
        "keep_dynamic": settings.keep_dynamic,
        "blocks": settings.blocks,
        "tokens": digest.hexdigest(),
        "torch": torch.__version__,
    }
