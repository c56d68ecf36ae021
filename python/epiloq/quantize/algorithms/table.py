"""Table of the algorithms of ``epiloq quantize --algorithm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_SLICES = 4
"""Largest `Algorithm.slices` of a run: each takes a Hessian for each layer of a block."""


@dataclass(frozen=True)
class Algorithm:
    """Preparation and rounding of weights.

    fold
        The factors or rotations that are folded between a block's norms (or linear layers) and the linear layers that
        read them.
    compensate
        Round by GPTQ rather than to nearest.
    clip
        The error that clipping of ranges minimises: of each weight ("mse"), of each weight times its input
        ("weighted"), of the output ("output"; see `fit`), or of the output after GPTQ's compensation, by trying
        several ("best"; see `gptq`). None uses whole ranges.
    refine
        Then refit scales and zero points, and change codes one by one; see `refine`.
    slices
        Number of slices of a layer's output rows, each with its own Hessian, in which tokens are weighted by the
        gradient of the final loss; see `guide`. 0 disables this.
    learn
        Number of steps in which rounding and ranges of a block's layers are then trained together; see `autoround`. 0
        disables this.
    """

    name: str
    description: str
    fold: Literal["awq", "smoothquant", "smoothquant-search"] | None = None
    compensate: bool = False
    clip: Literal["mse", "weighted", "output", "best"] | None = None
    refine: bool = False
    slices: int = 0
    learn: int = 0

    @property
    def guided(self) -> bool:
        """Whether its Hessians are weighted by the gradient of the final loss."""
        return self.slices > 0

    @property
    def needs_inputs(self) -> bool:
        """Whether it needs calibration inputs."""
        return self.fold is not None or self.compensate or self.learn > 0 or self.clip in ("weighted", "output")


_TABLE = (
    Algorithm("rtn", "round to nearest"),
    Algorithm("rtn-mse", "round to nearest, ranges clipped for the least squared error", clip="mse"),
    Algorithm("gptq", "compensate each column's rounding in the columns after it", compensate=True, clip="weighted"),
    Algorithm("gptq+ranges", "GPTQ with three ranges tried for each row", compensate=True, clip="best"),
    Algorithm(
        "gptq+refine",
        "GPTQ, then scales refitted and codes moved while the error falls",
        compensate=True,
        clip="weighted",
        refine=True,
    ),
    Algorithm(
        "gptq-guided",
        "the same, tokens weighted by the gradient of the end loss",
        compensate=True,
        clip="weighted",
        refine=True,
        slices=1,
    ),
    Algorithm("awq", "scale channels by their inputs, clip ranges for the output", fold="awq", clip="output"),
    Algorithm(
        "autoround",
        "GPTQ, then rounding and ranges trained block by block (slow)",
        compensate=True,
        clip="weighted",
        learn=200,
    ),
    Algorithm("smoothquant", "move the range of activations into the weights", fold="smoothquant"),
    Algorithm("smoothquant-search", "the same by an alpha for each input", fold="smoothquant-search"),
    Algorithm("awq+gptq", "AWQ's scales, then GPTQ", fold="awq", compensate=True, clip="weighted"),
    Algorithm(
        "awq+gptq-guided",
        "AWQ's scales, then gptq-guided",
        fold="awq",
        compensate=True,
        clip="weighted",
        refine=True,
        slices=1,
    ),
    Algorithm("smoothquant+gptq", "SmoothQuant, then GPTQ", fold="smoothquant", compensate=True, clip="weighted"),
    Algorithm(
        "smoothquant-search+gptq",
        "smoothquant-search, then GPTQ",
        fold="smoothquant-search",
        compensate=True,
        clip="weighted",
    ),
)
ALGORITHMS = {algorithm.name: algorithm for algorithm in _TABLE}
