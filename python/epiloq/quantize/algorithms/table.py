"""What ``epiloq quantize --algorithm`` knows, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Algorithm:
    """How weights are prepared and rounded.

    fold
        What moves between a block's norms (or linear layers) and the linear layers that read them.
    compensate
        Round by GPTQ rather than each weight to its nearest point.
    clip
        The error that the clipping of ranges minimises: of each weight, weighted by its input, or of the output; see
        `fit`. None takes whole ranges.
    """

    name: str
    description: str
    fold: Literal["awq", "smoothquant", "smoothquant-search"] | None = None
    compensate: bool = False
    clip: Literal["mse", "weighted", "output"] | None = None

    @property
    def needs_inputs(self) -> bool:
        """Whether it looks at what the model computes."""
        return self.fold is not None or self.compensate or self.clip in ("weighted", "output")


_TABLE = (
    Algorithm("rtn", "round to nearest"),
    Algorithm("rtn-mse", "round to nearest, ranges clipped for the least squared error", clip="mse"),
    Algorithm("gptq", "compensate each column's rounding in the columns after it", compensate=True, clip="weighted"),
    Algorithm("awq", "scale channels by their inputs, clip ranges for the output", fold="awq", clip="output"),
    Algorithm("smoothquant", "move the range of activations into the weights", fold="smoothquant"),
    Algorithm("smoothquant-search", "the same by an alpha for each input", fold="smoothquant-search"),
    Algorithm("awq+gptq", "AWQ's scales, then GPTQ", fold="awq", compensate=True, clip="weighted"),
    Algorithm("smoothquant+gptq", "SmoothQuant, then GPTQ", fold="smoothquant", compensate=True, clip="weighted"),
)
ALGORITHMS = {algorithm.name: algorithm for algorithm in _TABLE}
