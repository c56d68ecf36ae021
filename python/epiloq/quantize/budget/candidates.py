"""The schemes that a budget chooses from, and a layer's size in a checkpoint for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.formats.table import FORMATS, blank
from epiloq.weights.grid import Grid
from epiloq.weights.packed_weight import BITS

DEFAULT = ("w4a16", "w4a16-g128", "w4a16-g64", "w4a16-g32", "w8a16")
"""What GPU kernels and the other engines take; w3a16-* and w2a16-* for less."""
LAYOUTS = ("compressed-tensors", "epiloq")
"""Formats that support layers of several schemes."""
BASE = "w8a16"
"""The scheme that every layer can have, whose rules decide which layers are quantised."""
AUTO = "auto"
"""A scheme of the embedding or the head that a budget chooses."""
HEADER = 112
"""At most so many bytes beside its name describe a tensor in a file's header."""
_NAME = re.compile(r"w(\d+)a16(?:-g(\d+))?")


def grids(names: Sequence[str], symmetric: bool) -> dict[str, Grid]:
    """The grids of schemes such as w4a16-g64 (or w4a16, per channel). Raises ValueError for other names."""
    found = {}
    for name in names:
        match = _NAME.fullmatch(name)
        bits = int(match.group(1)) if match else 0
        if match is None or bits not in BITS or match.group(2) == "0":
            known = ", ".join(map(str, BITS))
            raise ValueError(
                f"--candidates: expected w<bits>a16 or w<bits>a16-g<size> with bits of {known}, got {name!r}"
            )
        # 8 bits lose little by the lack of zero points, and some readers know no others.
        found[name] = Grid(bits, int(match.group(2) or -1), symmetric or bits == 8)
    if not found:
        raise ValueError("--candidates: expected at least one scheme, got none")
    return found


class Sizes:
    """Bytes of layers in a format, the model's type known, with so many for each tensor's header beside its name."""

    def __init__(self, candidates: Mapping[str, Grid], layout: str, dtype: torch.dtype, header: int = 0) -> None:
        self.layout, self.dtype, self.header = FORMATS[layout], dtype, header
        scale_dtype = self.layout.scale_dtype(dtype, None)
        self.grids = {name: replace(grid, scale_dtype=scale_dtype) for name, grid in candidates.items()}
        self._known: dict[tuple[str, int, int], int | None] = {}

    def of(self, candidate: str, shape: tuple[int, int]) -> int | None:
        """Bytes of a layer ``[N, K]``, its tensors' headers included but for its name; None if it cannot be."""
        key = (candidate, *shape)
        if key not in self._known:
            quantization = Quantization(self.grids[candidate])
            try:
                found = self.layout.to_tensors(blank(quantization, shape), quantization, self.dtype)
            except FormatError:
                self._known[key] = None
            else:
                self._known[key] = sum(tensor.nbytes + self._header(part) for part, tensor in found.items())
        return self._known[key]

    def options(self, layers: Mapping[str, nn.Linear]) -> dict[str, int]:
        """The candidates that every one of some layers can have, and the bytes of all of them."""
        found = {}
        for name in self.grids:
            each = [self.of(name, (layer.out_features, layer.in_features)) for layer in layers.values()]
            names = sum(4 * len(layer) for layer in layers) if self.header else 0
            if None not in each:
                found[name] = sum(size for size in each if size is not None) + names
        return found

    def _header(self, part: str) -> int:
        return self.header + len(part) if self.header else 0
