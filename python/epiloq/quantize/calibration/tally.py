"""Figures accumulated over blocks for a run's report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from epiloq.progress import Advance, Stage, unseen
from epiloq.quantize.calibration.work import Block

LOWEST, HIGHEST, PER_OCTAVE = -24, 8, 4
"""The histogram of scales: from 2^-24 to 2^8, four columns for a factor of two."""


@dataclass
class Tally:
    """Errors by layer, how often scales of each size occur, and the seconds of each stage."""

    stage: Stage = unseen
    errors: dict[str, float] = field(default_factory=dict)
    input_errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    resumed: int = 0
    error_of: str = "weight"
    """Whether errors are relative to each layer's "weight" or "output"."""
    tuning: dict[str, float] | None = None
    """Steps of end-to-end tuning, and the KL divergence on calibration text before and after."""
    counts: Tensor = field(default_factory=lambda: torch.zeros((HIGHEST - LOWEST) * PER_OCTAVE, dtype=torch.int64))

    @contextmanager
    def timed(self, name: str, steps: int, title: str | None = None) -> Iterator[Advance]:
        """Time a stage of the run, given its name in the report."""
        start = time.perf_counter()
        with self.stage(title or name, steps) as advance:
            yield advance
        self.seconds[name] = time.perf_counter() - start

    def add(self, block: Block, resumed: bool) -> None:
        """Add a finished block."""
        self.errors |= block.errors
        self.input_errors |= {name: asdict(found) for name, found in block.input_errors.items()}
        self.blocks.append(block.name)
        self.resumed += resumed
        for weight in block.weights.values():
            self.count(weight.scale)

    def count(self, scale: Tensor) -> None:
        """Add a layer's scales to the histogram."""
        logarithms = scale.float().log2().clamp(LOWEST, HIGHEST).cpu()
        self.counts += torch.histc(logarithms, len(self.counts), LOWEST, HIGHEST).to(torch.int64)

    @property
    def dynamic(self) -> tuple[str, ...]:
        """Layers that keep a scale for each token."""
        return tuple(name for name, found in self.input_errors.items() if found["kept_dynamic"])

    @property
    def histogram(self) -> dict[str, Any]:
        """Counts from the first column that is not empty to the last, and the logarithms of their edges."""
        filled = self.counts.nonzero().flatten().tolist() or [0]
        first, last = filled[0], filled[-1] + 1
        edges = [LOWEST + index / PER_OCTAVE for index in range(first, last + 1)]
        return {"log2_edges": edges, "counts": self.counts[first:last].tolist()}
