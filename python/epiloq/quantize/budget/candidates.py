"""The candidate schemes of a budget, and the size of a layer in a checkpoint for each of them."""

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
"""Supported by GPU kernels and the other engines; w3a16-* and w2a16-* allow smaller files."""
SMALL = tuple(f"w{bits}a16{groups}" for bits in (3, 2) for groups in ("-g64", "-g32", ""))
"""Suggestions for a budget below the smallest candidates, in order of preference."""
LAYOUTS = ("compressed-tensors", "epiloq")
"""Formats that support layers of several schemes."""
BASE = "w8a16"
"""The scheme that every layer supports; its rules decide which layers are quantised."""
AUTO = "auto"
"""Value of --head and --embedding that lets the budget choose the scheme."""
HEADER = 112
"""Upper bound on the bytes that describe a tensor in a file's header, without its name."""
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
        # 8-bit weights lose little without zero points, and some readers support no others.
        found[name] = Grid(bits, int(match.group(2) or -1), symmetric or bits == 8)
    if not found:
        raise ValueError("--candidates: expected at least one scheme, got none")
    return found


class Sizes:
    """Bytes of layers in a format, given the model's dtype and the header bytes per tensor without its name."""

    def __init__(self, candidates: Mapping[str, Grid], layout: str, dtype: torch.dtype, header: int = 0) -> None:
        self.layout, self.dtype, self.header = FORMATS[layout], dtype, header
        scale_dtype = self.layout.scale_dtype(dtype, None)
        self.grids = {name: replace(grid, scale_dtype=scale_dtype) for name, grid in candidates.items()}
        self._known: dict[tuple[str, int, int], int | None] = {}

    def of(self, candidate: str, shape: tuple[int, int]) -> int | None:
        """Bytes of a layer ``[N, K]`` and its tensors' headers but names; None if the format cannot represent it."""
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
        """The candidates that all given layers support, each with the total bytes of these layers."""
        found = {}
        for name in self.grids:
            each = [self.of(name, (layer.out_features, layer.in_features)) for layer in layers.values()]
            names = sum(4 * len(layer) for layer in layers) if self.header else 0
            if None not in each:
                found[name] = sum(size for size in each if size is not None) + names
        return found

    def smaller(self, layers: Mapping[str, nn.Linear], symmetric: bool) -> str | None:
        """The first of `SMALL` that takes fewer bytes than the smallest candidates; None if none does."""
        least = sum(min(self.options({name: layer}).values()) for name, layer in layers.items())
        others = Sizes(grids(SMALL, symmetric), self.layout.name, self.dtype, self.header).options(layers)
        return next((name for name, size in others.items() if size < least), None)

    def _header(self, part: str) -> int:
        return self.header + len(part) if self.header else 0
