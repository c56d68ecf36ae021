"""bfloat16 activations x FP4 weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Inputs, Operation, each
from epiloq.bench.operations.packed import weights
from epiloq.bench.operations.packed.weights import FP4, OUT_DTYPE


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    x = torch.randn((case.m, case.k), generator=generator, device=generator.device).to(OUT_DTYPE)
    return {"x": x, **weights.draw_weight(case.variant, case.n, case.k, generator)}


def _weight(case: Case, inputs: Inputs) -> epiloq.PackedFp4Weight:
    weight = weights.weight_of(case, inputs)
    assert isinstance(weight, epiloq.PackedFp4Weight)
    return weight


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    return weights.error(case, _weight(case, inputs), inputs["x"], result, generator)


OPERATION = Operation(
    name="packed_fp4_mm",
    variants=tuple(FP4),
    inputs=_inputs,
    bind=each(lambda case, s: partial(epiloq.packed_fp4_mm, s["x"], _weight(case, s))),
    error=_error,
    ceiling="half",
    peers={"dense": each(lambda case, s: partial(F.linear, s["x"], _weight(case, s).dequantize(OUT_DTYPE)))},
)
