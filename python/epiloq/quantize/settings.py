"""The settings of a run of ``epiloq quantize``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epiloq.evaluation.text import SEED
from epiloq.quantize.algorithms.smoothquant import ALPHA
from epiloq.quantize.budget.amount import Budget


@dataclass(frozen=True)
class Settings:
    """What to do; `scheme`, `algorithm` and `layout` are names in TARGETS, ALGORITHMS and FORMATS.

    budget
        None, or what to choose a scheme for each layer by; `scheme` is `candidates.BASE` then.
    layout
        None: the first format that can hold the layers as the scheme has them.
    ignore
        Patterns of names of layers to leave in floating point; see `epiloq.layer_filter.ignored`.
    head, embedding
        Schemes for the output head and the input embedding, rounded to nearest; None leaves them in floating point.
    evaluation
        Text to measure perplexity on, before and after.
    force
        Whether to go on with too little text, or with text to evaluate on that calibration sees.
    command
        What the report says this was asked by.
    tune
        Steps of training scales and norms end to end after that; see `algorithms.tune`. 0 leaves them.
    rotate
        Whether to fold rotations into the weights first; see `algorithms.rotate`.
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

    @property
    def whole(self) -> bool:
        """Whether the model must be in memory as a whole, rather than block by block."""
        return self.rotate or self.budget is not None or self.tune > 0
