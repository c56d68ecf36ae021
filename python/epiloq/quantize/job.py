"""One run of ``epiloq quantize``: everything is checked first, finished blocks are kept, the result appears whole."""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq.formats.checkpoint import Checkpoint
from epiloq.formats.layouts import Quantization
from epiloq.formats.model import load_float, save
from epiloq.formats.table import FORMATS
from epiloq.quantize.blocks import find_blocks, linears_of
from epiloq.quantize.calibrate import ALGORITHMS, calibrate
from epiloq.quantize.smoothquant import ALPHA
from epiloq.quantize.static import InputErrors, Static
from epiloq.quantize.store import Store
from epiloq.quantize.targets import TARGETS
from epiloq.quantize.text import SEED, load_tokenizer, read_texts, sample, windows
from epiloq.schemes import default_filter


@dataclass(frozen=True)
class Settings:
    """What to do; `scheme`, `algorithm` and `layout` are names in TARGETS, ALGORITHMS and FORMATS."""

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


@dataclass(frozen=True)
class Job:
    """Settings that were checked, and what they say of the model. Nothing was written yet."""

    settings: Settings
    source: Checkpoint
    model: nn.Module
    texts: list[Tensor]
    quantization: Quantization
    blocks: int

    @property
    def aside(self) -> Path:
        """Where the run keeps what is not finished."""
        return self.settings.output.with_name(f".{self.settings.output.name}.partial")


def prepare(settings: Settings) -> Job:
    """Load what a run needs and check all that can be. Raises ValueError, with nothing on the disk touched."""
    algorithm, target = ALGORITHMS[settings.algorithm], TARGETS[settings.scheme]
    layout = FORMATS[settings.layout]
    if settings.output.exists():
        raise ValueError(f"{settings.output} exists already: choose another output, or move it away")
    source = Checkpoint(settings.model)
    texts: list[Tensor] = []
    if settings.keep_dynamic is not None and not target.static:
        raise ValueError(f"{target.name} has no static scales to keep any layer from (--keep-dynamic)")
    if algorithm.needs_inputs or target.static:
        if settings.calibration is None:
            wish = f"the scheme {target.name}" if target.static else f"the algorithm {algorithm.name}"
            raise ValueError(f"{wish} needs calibration text (--calibration FILE)")
        found = windows(load_tokenizer(settings.model), read_texts(settings.calibration), settings.length)
        texts = sample(found, settings.count, settings.seed)
    model = load_float(source)
    dtype = next(model.parameters()).dtype
    grid = target.grid(settings.symmetric, layout.scale_dtype(dtype, target.activations))
    quantization = Quantization(grid, target.activations)
    takes = default_filter(model)
    blocks = find_blocks(model, takes, settings.blocks)
    layers = [layer for name, block in blocks.items() for layer in linears_of(block, name, takes).values()]
    layout.check(quantization, {(layer.out_features, layer.in_features) for layer in layers}, dtype)
    return Job(settings, source, model, texts, quantization, len(blocks))


def perform(job: Job, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Quantise, write, and report, calling `advance` after each block. An interrupted run goes on where it stopped.

    Raises ValueError, or OSError when the disk fails; finished blocks stay in `job.aside`.
    """
    start, settings = time.perf_counter(), job.settings
    store = Store(job.aside, _identity(job), job.quantization.grid)
    errors: dict[str, float] = {}
    input_errors: dict[str, InputErrors] = {}
    names = []
    walk = calibrate(
        job.model,
        job.texts,
        job.quantization.grid,
        ALGORITHMS[settings.algorithm],
        alpha=settings.alpha,
        static=Static(settings.keep_dynamic) if TARGETS[settings.scheme].static else None,
        blocks=settings.blocks,
        finished=store.read,
        device=settings.device,
    )
    for block in walk:
        if not store.has(block.name):
            store.write(block)
        errors |= block.errors
        input_errors |= block.input_errors
        names.append(block.name)
        advance()
    whole = job.aside / "model"
    rmtree(whole, ignore_errors=True)
    finished = (block for block in map(store.read, names) if block is not None)
    dynamic = tuple(name for name, found in input_errors.items() if found.kept_dynamic)
    save(job.model, finished, job.source, whole, FORMATS[settings.layout], replace(job.quantization, dynamic=dynamic))
    whole.rename(settings.output)
    store.discard()
    return {
        **{key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()},
        "calibration_tokens": sum(window.numel() for window in job.texts),
        "blocks": len(names),
        "layer_errors": errors,
        "input_errors": {name: asdict(found) for name, found in input_errors.items()},
        "bytes_before": _weight_bytes(settings.model),
        "bytes_after": _weight_bytes(settings.output),
        "peak_memory_bytes": peak_memory(),
        "seconds": time.perf_counter() - start,
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
    grid = job.quantization.grid
    return {
        "epiloq": epiloq.__version__,
        "model": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()},
        "scheme": settings.scheme,
        "algorithm": settings.algorithm,
        "symmetric": grid.symmetric,
        "scale_dtype": str(grid.scale_dtype),
        "alpha": settings.alpha,
        "keep_dynamic": settings.keep_dynamic,
        "blocks": settings.blocks,
        "tokens": digest.hexdigest(),
        "torch": torch.__version__,
    }
