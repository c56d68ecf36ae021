"""Layers by the schemes that engines run from directories in epiloq's own format, those of 2 and 3 bits included."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from epiloq.nn import WeightOnlyLinear
from epiloq.schemes import SCHEMES, available

FEW_BITS: dict[str, dict[str, Any]] = {
    f"w{bits}a16-g{group}": {"bits": bits, "group_size": group, "zeros": "zero"} for bits, group in ((2, 32), (3, 64))
}
"""Weights with fewer bits than any scheme has, as algorithms write them: the options of their layers."""
LAYERS_OF_ENGINES = (*available(), *FEW_BITS)


def converted(scheme: str, linear: nn.Linear) -> Any:
    """A layer of a scheme; the range of its inputs, for a static one, is an example."""
    if scheme in FEW_BITS:
        return WeightOnlyLinear.from_linear(linear, **FEW_BITS[scheme])
    seen = {"input_scale": 0.03125, "input_zero_point": -3} if SCHEMES[scheme].static else {}
    return SCHEMES[scheme].convert(linear, **seen)


def keeps_inputs(scheme: str) -> bool:
    """Whether activations stay in floating point."""
    return "a16" in scheme


def products_of(*layers: Any) -> int:
    """Products of merged layers of one scheme: one, unless NVFP4 weights have global scales of their own."""
    scales = [getattr(layer, "weight_global_scale", None) for layer in layers]
    first = scales[0]
    return 1 if first is None or all(torch.equal(first, scale) for scale in scales) else len(layers)
