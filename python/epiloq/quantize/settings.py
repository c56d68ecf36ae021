"""The settings of a run of ``epiloq quantize``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from epiloq.evaluation.text import SEED
from epiloq.quantize.algorithms.smoothquant import ALPHA
from epiloq.quantize.algorithms.table import ALGORITHMS, Algorithm
from epiloq.quantize.budget.amount import Budget


@dataclass(frozen=True)
class Settings:
    """Settings of a run; `scheme`, `algorithm` and `layout` are names in TARGETS, ALGORITHMS and FORMATS.

    budget
        Budget by which a scheme is chosen for each layer, or None; `scheme` is then `candidates.BASE`.
    layout
        None: the first format that can represent the layers.
    ignore
        Patterns of names of layers to leave in floating point; see `epiloq.layer_filter.ignored`.
    head, embedding
        Schemes for the output head and the input embedding, rounded to nearest; None leaves them in floating point.
    evaluation
        Text for measuring perplexity before and after.
    force
        Whether to continue with too little text, or with evaluation text that overlaps the calibration text.
    command
        The command shown in the report.
    tune
        Number of steps of subsequent end-to-end training of scales and norms; see `algorithms.tune`.
    rotate
        Whether to first fold rotations into the weights; see `algorithms.rotate`.
    slices
        For guided algorithms: number of slices of each layer's output rows with Hessians of their own, 1 to
        `MOST_SLICES`; see `calibration.guide`.
    """

    model: Path
    output: Path
    scheme: str
    algorithm: str = "gptq"
    layout: str | None = None
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
    force: bool = False
    ignore: tuple[str, ...] = ()
    command: str = ""
    head: str | None = None
    embedding: str | None = None
    rotate: bool = False
    budget: Budget | None = None
    tune: int = 0
    slices: int = 1

    @property
    def rounding(self) -> Algorithm:
        """The algorithm, if it is guided with the number of slices of these settings."""
        found = ALGORITHMS[self.algorithm]
        return replace(found, slices=self.slices) if found.guided else found

    @property
    def whole(self) -> bool:
        """Whether the model must be in memory as a whole, rather than block by block."""
        return self.rotate or self.budget is not None or self.tune > 0
