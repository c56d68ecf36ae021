"""Batched int8 and float8 products as in attention: M tokens, head size K (scores) or N (values)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Inputs, Operation, each, product_work, sample, worst
from epiloq.bench.operations.float8_mm import ACCURATE, OUT_DTYPE, float8, operands, scales
from epiloq.bench.operations.scaled_mm import int8

# Variant -> products per batch, and whether they are int8 (otherwise float8).
KINDS = {"int8_b32": (32, True), "int8_b128": (128, True), "fp8_b32": (32, False), "fp8_b128": (128, False)}


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    batch, is_int8 = KINDS[case.variant]

    def values(*shape: int) -> torch.Tensor:
        return (int8 if is_int8 else float8)(shape, generator)

    return {
        "a": values(batch, case.m, case.k),
        "b": values(batch, case.n, case.k).transpose(1, 2),
        "scale_a": scales(generator, batch, case.m, 1),
        "scale_b": scales(generator, batch, 1, case.n),
    }


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against float64; tolerance: one output ulp, fp32's rounding of scales, for float8 part of the span."""
    batch, is_int8 = KINDS[case.variant]
    if result.shape != (batch, case.m, case.n) or result.dtype != OUT_DTYPE:
        return float("inf")
    which = sample(batch, 4, generator)[:, None]
    rows, columns = sample(case.m, 30, generator), sample(case.n, 30, generator)
    a, b = inputs["a"][which, rows].double(), inputs["b"].transpose(1, 2)[which, columns].double().transpose(1, 2)
    scale_b = inputs["scale_b"].transpose(1, 2)[which, columns].double().transpose(1, 2)
    scale = inputs["scale_a"][which, rows].double() * scale_b
    # Scales are applied last, so that a sum of exactly zero stays zero.
    reference, span = (a @ b) * scale, (a.square() @ b.square()).sqrt() * scale
    rounding = torch.finfo(OUT_DTYPE).eps + 4 * torch.finfo(torch.float32).eps
    tolerance = rounding * reference.abs() + (0 if is_int8 else ACCURATE) * span + 1e-30
    part = result[which, rows][:, :, columns].double()
    return worst((part - reference).abs(), tolerance)


@each
def _bmm(case: Case, s: Inputs) -> partial[torch.Tensor]:
    bf16 = torch.bfloat16
    return partial(torch.bmm, s["a"].to(bf16), s["b"].transpose(1, 2).to(bf16).transpose(1, 2))


OPERATION = Operation(
    name="scaled_bmm",
    variants=tuple(KINDS),
    inputs=_inputs,
    bind=each(lambda case, s: partial(epiloq.scaled_bmm, *operands(s), out_dtype=OUT_DTYPE)),
    error=_error,
    work=lambda case: KINDS[case.variant][0] * product_work(case),
    ceiling="int8",  # float8's is the same rate
    peers={"bmm": _bmm},
)
