"""Random packed weights of 4 bits by the name of their kind, and what a product with them is compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Inputs, sample, worst

OUT_DTYPE = torch.bfloat16
Weight = epiloq.PackedWeight | epiloq.PackedFp4Weight

INTEGERS = {"g128": 128, "g64": 64, "channel": -1}
"""Columns per group of symmetric integers."""
FP4 = {"mxfp4": 32, "nvfp4": 16}
"""Columns per block."""


def draw_weight(kind: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a weight ``[N, K]``. Scales are FP8 numbers times a power of two, which every peer represents."""
    draw = partial(torch.randint, generator=generator, device=generator.device)
    size = INTEGERS.get(kind) or FP4[kind]
    groups = 1 if size == -1 else -(-k // size)
    codes_of_scales = draw(0x30, 0x40, (n, groups), dtype=torch.uint8)  # E4M3: 0.5 to 1.875
    scale = codes_of_scales.view(torch.float8_e4m3fn)
    packed: Weight
    if kind in INTEGERS:
        q = draw(-8, 8, (n, k), dtype=torch.int8)
        packed = epiloq.pack_weight(q, scale.to(OUT_DTYPE) / 64, bits=4, group_size=size)
        return {"q": packed.q, "scale": packed.scale}
    codes = draw(0, 256, (n, -(-k // 2)), dtype=torch.uint8)
    if kind == "mxfp4":
        packed = epiloq.pack_fp4_weight(codes, draw(119, 123, (n, groups), dtype=torch.uint8), in_features=k)
        return {"q": packed.q, "scale": packed.scale}
    factor = torch.full((1,), 2.0**-6, device=generator.device)
    packed = epiloq.pack_fp4_weight(codes, scale, in_features=k, global_scale=factor)
    return {"q": packed.q, "scale": packed.scale, "global_scale": factor}


def weight_of(case: Case, inputs: Inputs) -> Weight:
    q, scale = inputs["q"], inputs["scale"]
    if case.variant in INTEGERS:
        return epiloq.PackedWeight(q, scale, None, None, None, 4, case.n, case.k, INTEGERS[case.variant])
    return epiloq.PackedFp4Weight(q, scale, inputs.get("global_scale"), case.variant, case.n, case.k)


def error(
    case: Case, weight: Weight, x: Tensor, result: Any, generator: torch.Generator, dtype: torch.dtype = OUT_DTYPE
) -> float:
    """Error against float64; tolerance: an output ulp, and the roundings of tokens or weights and of fp32 sums."""
    if result.shape != (case.m, case.n) or result.dtype != dtype:
        return float("inf")
    rows, columns = sample(case.m, 64, generator), sample(case.n, 64, generator)
    dense, tokens = weight.dequantize()[columns].double(), x[rows].double()
    reference, size = tokens @ dense.t(), (tokens.square() @ dense.square().t()).sqrt()
    # Dequantising paths round every weight to 16 bits; the random sum of roundings stays within 2 eps of this root.
    tolerance = torch.finfo(dtype).eps * (reference.abs() + 2 * size) + 1e-30
    return worst((result[rows][:, columns].double() - reference).abs(), tolerance)
