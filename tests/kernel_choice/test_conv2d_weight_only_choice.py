"""Which kernel conv2d_weight_only takes on SM90, against times measured on an H200."""

from __future__ import annotations

import re
from statistics import geometric_mean
from typing import Any

import torch

import conv_reference
import epiloq
from epiloq.bench.convolutions import LAYERS
from sweeps import measured

WGMMA = re.compile(
    r"implicit product, wgmma (\d+) weight rows x (\d+) pixels, \d warpgroups?(?:, (\d) along K)?"
    r"(?:, K over clusters of (\d))?"
)


def name_in_sweep(explained: str) -> str | None:
    if explained.startswith("the pixels as rows of a product"):
        return None  # whose choice is weight_only_mm's
    if explained.startswith("dequantise"):
        return "dequantised, then cuDNN"
    found = WGMMA.fullmatch(explained)
    assert found, explained
    rows, pixels, ways, split = (int(number or 1) for number in found.groups())
    return f"wgmma {rows // 64},{ways},{pixels}" + (f" split {split}" if split > 1 else "")


def behind(row: dict[str, Any]) -> float | None:
    """Time of the chosen kernel over the fastest; None if it belongs to another operation or was not timed."""
    layer = LAYERS[row["layer"]]
    weight = conv_reference.packed(layer.outputs, (layer.kernel, layer.kernel), layer.channels, 4, 128, "none").packed
    x = torch.empty(row["batch"], layer.channels, *layer.image, dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    with epiloq.config(arch="sm90"):
        explained = epiloq.explain("conv2d_weight_only", x, weight, stride=layer.stride, padding=layer.padding)
    name = name_in_sweep(explained)
    return row["us"][name] / min(row["us"].values()) if name in row["us"] else None


def test_the_choice_is_near_the_fastest_that_was_measured() -> None:
    """The bounds are what was found."""
    found = [behind(row) for row in measured("conv2d_weight_only_h200")]
    ratios = [ratio for ratio in found if ratio is not None]
    assert len(ratios) == 6 and geometric_mean(ratios) <= 1.015 and max(ratios) <= 1.06
