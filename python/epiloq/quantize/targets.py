"""What ``epiloq quantize`` can make of a model, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from epiloq.quantize.grid import Grid


@dataclass(frozen=True)
class Target:
    """A scheme: how weights and activations are stored.

    symmetric
        Of the weights; None where either will do.
    activations
        int8 for each token at run time, symmetric or with a zero point (azp), or with one scale and zero point for
        all tokens (static), from calibration; None leaves them as they are.
    """

    name: str
    description: str
    bits: int
    group_size: int
    symmetric: bool | None
    activations: Literal["int8", "int8-azp", "int8-static"] | None = None

    @property
    def static(self) -> bool:
        """Whether scales of activations come from calibration."""
        return self.activations == "int8-static"

    def grid(self, symmetric: bool = False, scale_dtype: torch.dtype = torch.float32) -> Grid:
        """The grid of its weights."""
        chosen = symmetric if self.symmetric is None else self.symmetric
        return Grid(self.bits, self.group_size, chosen, scale_dtype)


_TABLE = (
    Target("w4a16-g128", "int4 weights in groups of 128", 4, 128, None),
    Target("w4a16-g64", "int4 weights in groups of 64", 4, 64, None),
    Target("w4a16-g32", "int4 weights in groups of 32", 4, 32, None),
    Target("w8a16", "int8 weights per channel", 8, -1, True),
    Target("w8a8-int8", "int8 weights per channel, int8 activations per token", 8, -1, True, "int8"),
    Target("w8a8-int8-azp", "the same, activations with a zero point", 8, -1, True, "int8-azp"),
    Target("w8a8-int8-static", "the same, one scale and zero point for all tokens", 8, -1, True, "int8-static"),
)
TARGETS = {target.name: target for target in _TABLE}
