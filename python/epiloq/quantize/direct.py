"""Schemes that ``epiloq quantize`` applies at once, as `quantize_` does: they round, and compensate for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.checkpoint import Checkpoint, carry_over, written_whole
from epiloq.formats.comparison import weight_errors
from epiloq.formats.layers import Layers
from epiloq.formats.model import load_float
from epiloq.quantize.job import Settings, peak_memory
from epiloq.quantize.smoothquant import smoothquant_
from epiloq.quantize.text import load_tokenizer, read_texts, sample, windows
from epiloq.schemes import quantize_

ALGORITHMS = ("rtn", "smoothquant")


@dataclass(frozen=True)
class Job:
    """Settings that were checked, and what they say of the model. Nothing was written yet."""

    settings: Settings
    source: Checkpoint
    model: nn.Module
    texts: list[Tensor]


def prepare(settings: Settings) -> Job:
    """Load what a run needs and check all that can be. Raises ValueError, with nothing on the disk touched.

    `settings` name a scheme of `quantize_` and a format that can say it.
    """
    if settings.algorithm not in ALGORITHMS:
        raise ValueError(
            f"the scheme {settings.scheme} takes {' or '.join(ALGORITHMS)}, got {settings.algorithm}: its weights lie "
            "on no integer grid whose errors others could make up for"
        )
    if settings.output.exists() or settings.output.is_symlink():
        raise ValueError(f"{settings.output} exists already: choose another output, or move it away")
    source = Checkpoint(settings.model)
    texts: list[Tensor] = []
    if settings.algorithm == "smoothquant":
        if settings.calibration is None:
            raise ValueError("the algorithm smoothquant needs calibration text (--calibration FILE)")
        found = windows(load_tokenizer(settings.model), read_texts(settings.calibration), settings.length)
        texts = sample(found, settings.count, settings.seed)
    return Job(settings, source, load_float(source), texts)


def perform(job: Job, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Quantise, write, and report, calling `advance` when each of the two is done.

    Raises ValueError, or OSError when the disk fails; nothing is left then.
    """
    start, settings = time.perf_counter(), job.settings
    model = job.model.to(settings.device)
    if job.texts:
        smoothquant_(model, lambda m: _run(m, job.texts), alpha=settings.alpha)
    quantize_(model, settings.scheme).cpu()
    advance()
    with written_whole(settings.output) as aside:
        if settings.layout == "epiloq":
            epiloq_modules.write(model, job.source.config, aside)
        else:
            deepseek_fp8.write(model, job.source.config, aside)
        carry_over(settings.model, aside)
        errors = {} if job.texts else _errors(job.source, aside)
    advance()
    return {
        **{key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()},
        "calibration_tokens": sum(window.numel() for window in job.texts),
        "error_of": "weight",
        "layer_errors": errors,
        "bytes_before": _weight_bytes(settings.model),
        "bytes_after": _weight_bytes(settings.output),
        "peak_memory_bytes": peak_memory(),
        "seconds": time.perf_counter() - start,
    }


@torch.no_grad()
def _run(model: nn.Module, texts: list[Tensor]) -> None:
    device = next(model.parameters()).device
    for window in texts:
        model(window.to(device), use_cache=False)


def _errors(source: Checkpoint, folder: Path) -> dict[str, float]:
    written = Layers(Checkpoint(folder))
    return {
        found.name: found.relative for found in weight_errors(Layers(source), written) if found.name in written.readers
    }


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
