"""bf16 activations -> int8 in blocks along K with a scale, an offset unless symmetric, and the sum of each block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Inputs, sample, worst
from epiloq.bench.operations.quantised import SMALLEST_SCALE, by_group, quantiser

# Variant -> values per block, and whether symmetric.
VARIANTS = {"g32": (32, False), "g128": (128, False), "g128_symmetric": (128, True)}
# Rounding allows half a step; the fp32 difference and quotient add about 2^-14 of a step here.
HALF_STEP = 0.5 + 2.0**-12


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    x = torch.randn((case.m, case.k), generator=generator, device=generator.device)
    return {"x": x.add_(0.25).to(torch.bfloat16)}


def _ours(case: Case, sets: Sequence[Inputs]) -> Bound:
    group, symmetric = VARIANTS[case.variant]
    return Bound([partial(epiloq.quantize_blockwise_int8, s["x"], group, symmetric=symmetric) for s in sets])


def _repeated(rows: Tensor, group: int) -> Tensor:
    """Reshape [M, K] to [M, ceil(K / group), group], padded with the last value, which changes no range."""
    last = rows[:, -1:].expand(-1, -rows.shape[1] % group)
    return torch.cat((rows, last), -1).double().view(rows.shape[0], -1, group)


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Check q within half a step of (x - offset) / scale, parameters within fp32's rounding, and exact sums."""
    group, symmetric = VARIANTS[case.variant]
    q, scale, offset, total = result
    if q.shape != (case.m, case.k) or q.dtype != torch.int8 or (offset is None) != symmetric:
        return float("inf")
    rows = sample(case.m, 64, generator)
    x, codes = _repeated(inputs["x"][rows], group), _repeated(q[rows], group)
    scale = scale[rows].double().unsqueeze(-1)
    zero = torch.zeros_like(scale) if offset is None else offset[rows].double().unsqueeze(-1)
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    reach, steps = (torch.maximum(high, -low), 127) if symmetric else (high - low, 255)
    constant = reach == 0  # a constant block has scale 1
    expected = torch.where(constant, 1.0, (reach / steps).clamp(min=SMALLEST_SCALE))
    q_error = (codes - ((x - zero) / scale).clamp(-128, 127)).abs()
    errors = [
        worst(q_error, torch.full_like(q_error, HALF_STEP)),
        worst((scale - expected).abs(), 2.0**-22 * expected),
        worst((total[rows].double() - by_group(q[rows], group).sum(-1)).abs(), torch.full_like(scale[..., 0], 0.5)),
    ]
    if not symmetric:
        offsets = torch.where(constant, high, high - 127 * scale)
        errors.append(worst((zero - offsets).abs(), 2.0**-22 * (high.abs() + 127 * scale)))
    return float(torch.tensor(errors).max())


OPERATION = quantiser("quantize_blockwise_int8", _inputs, _ours, _error, {}, {}, VARIANTS)
