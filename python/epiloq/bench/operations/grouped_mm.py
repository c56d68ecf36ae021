"""float8 products of a mixture of experts in one call, M rows per expert on average, or in a call per expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import (
    Bound,
    Inputs,
    Operation,
    Unavailable,
    each,
    note_of,
    product_work,
    require,
    sample,
    worst,
)
from epiloq.bench.operations.float8_mm import ACCURATE, GROUP, OUT_DTYPE, float8, operands, scales, tried
from epiloq.bench.peers import deep_gemm


@dataclass(frozen=True)
class Variant:
    """``ragged``: experts have between one row and about three times the average. ``rows``: scales per row."""

    experts: int
    ragged: bool = False
    rows: bool = False

    @property
    def recipe(self) -> tuple[int, int, int]:
        return (1, 1, -1) if self.rows else (1, GROUP, GROUP)


VARIANTS = {
    "e8": Variant(8),
    "e8_ragged": Variant(8, ragged=True),
    "e8_rows": Variant(8, rows=True),
    "e32": Variant(32),
    "e32_ragged": Variant(32, ragged=True),
    "e32_rows": Variant(32, rows=True),
}


def ends_of(experts: int, m: int, ragged: bool, generator: torch.Generator) -> Tensor:
    """Draw the row at which each expert's rows end, for `m` rows per expert on average."""
    device, total = generator.device, experts * m
    share = torch.ones(experts, device=device)
    if ragged:
        share = torch.rand(experts, generator=generator, device=device).square_()
    counts = 1 + (share.double() / share.double().sum() * (total - experts)).floor().to(torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32)
    ends[-1] = total
    return ends


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    v, groups = VARIANTS[case.variant], -(-case.k // GROUP)
    total = v.experts * case.m
    if v.rows:
        scale_a, scale_b = scales(generator, total, 1), scales(generator, v.experts, 1, case.n)
    else:
        # M-major and padded, as the quantisers write it on request.
        scale_a = scales(generator, groups, -(-total // 4) * 4).t()[:total]
        scale_b = scales(generator, v.experts, -(-case.n // GROUP), groups).transpose(1, 2)
    return {
        "a": float8((total, case.k), generator),
        "b": float8((v.experts, case.n, case.k), generator).transpose(1, 2),
        "scale_a": scale_a,
        "scale_b": scale_b,
        "offs": ends_of(v.experts, case.m, v.ragged, generator),
    }


def _ours(case: Case, sets: Sequence[Inputs]) -> Bound:
    grouped = partial(epiloq.grouped_mm, recipe=VARIANTS[case.variant].recipe, out_dtype=OUT_DTYPE)
    return Bound([partial(grouped, *operands(s), offs=s["offs"]) for s in sets])


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against the dequantised float64 product; tolerance: one output ulp, and a part of the terms' span."""
    v = VARIANTS[case.variant]
    total = v.experts * case.m
    if result.shape != (total, case.n) or result.dtype != OUT_DTYPE:
        return float("inf")
    rows, columns = sample(total, 30, generator), sample(case.n, 30, generator)
    expert = torch.searchsorted(inputs["offs"], rows, right=True)
    a, scale_a = inputs["a"][rows].double(), inputs["scale_a"][rows].double()
    # [rows, columns, K]: each row with the weight of its expert.
    b = inputs["b"].transpose(1, 2)[expert[:, None], columns].double()
    scale_b = inputs["scale_b"].transpose(1, 2)[expert[:, None], columns if v.rows else columns // GROUP].double()
    block = torch.arange(case.k, device=rows.device) // (case.k if v.rows else GROUP)
    a, b = (a * scale_a[:, block])[:, None], b * scale_b[..., block]
    reference, span = (a * b).sum(-1), (a * b).square().sum(-1).sqrt()
    tolerance = torch.finfo(OUT_DTYPE).eps * reference.abs() + ACCURATE * span + 1e-30
    return worst((result[rows][:, columns].double() - reference).abs(), tolerance)


def in_turn(parts: Sequence[partial[Tensor]], out: Tensor) -> Tensor:
    """Call each expert's product, which writes its rows of ``out``."""
    for part in parts:
        part()
    return out


@each
def _separate(case: Case, s: Inputs) -> partial[Tensor]:
    """A call of `groupwise_mm` or `scaled_mm` per expert, with row counts known on the host."""
    multiply = epiloq.scaled_mm if VARIANTS[case.variant].rows else epiloq.groupwise_mm
    out = s["a"].new_empty((s["a"].shape[0], case.n), dtype=OUT_DTYPE)
    parts = []
    for e, (i, j) in enumerate(pairwise((0, *s["offs"].tolist()))):
        scale_b = s["scale_b"][e].squeeze(0) if VARIANTS[case.variant].rows else s["scale_b"][e]
        parts.append(partial(multiply, s["a"][i:j], s["b"][e], s["scale_a"][i:j], scale_b, out=out[i:j]))
    return partial(in_turn, parts, out)


def grouped_of_torch() -> Callable[..., Tensor]:
    """torch's grouped product of 16-bit experts."""
    grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        raise Unavailable("this torch has no grouped_mm")
    return grouped  # type: ignore[no-any-return]


def _bf16(case: Case, sets: Sequence[Inputs]) -> Bound:
    grouped, bf16 = grouped_of_torch(), torch.bfloat16
    # Converted without a change of memory order: the product requires dense columns.
    calls = [
        partial(grouped, s["a"].to(bf16), s["b"].transpose(1, 2).to(bf16).transpose(1, 2), offs=s["offs"]) for s in sets
    ]
    return tried(calls)


def _scaled_grouped(case: Case, sets: Sequence[Inputs]) -> Bound:
    grouped = getattr(torch, "_scaled_grouped_mm", None)
    if grouped is None or sets[0]["a"].device.type == "cpu":
        raise Unavailable("needs torch._scaled_grouped_mm and a GPU")

    def call(s: Inputs) -> partial[Tensor]:
        # It supports only scales per row; for a variant with scales per group only the time is comparable.
        scale_a, scale_b = s["scale_a"][:, 0].contiguous(), s["scale_b"].new_ones(s["b"].shape[::2])
        return partial(grouped, s["a"], s["b"], scale_a, scale_b, offs=s["offs"], out_dtype=OUT_DTYPE)

    note = "" if VARIANTS[case.variant].rows else "scales per row"
    return Bound(tried([call(s) for s in sets]).calls, note)


def _deep_gemm(case: Case, sets: Sequence[Inputs]) -> Bound:
    if VARIANTS[case.variant].rows:
        raise Unavailable("deep_gemm supports only scales per group")
    calls, outs, rows = zip(*(deep_gemm.grouped(s) for s in sets), strict=True)
    bound = tried(calls)
    generator = torch.Generator(outs[0].device).manual_seed(0)
    return replace(bound, note=note_of(_error(case, sets[0], outs[0][rows[0]], generator)))


def _triton(case: Case, sets: Sequence[Inputs]) -> Bound:
    if VARIANTS[case.variant].rows:
        raise Unavailable("the baseline supports only scales per group")
    if sets[0]["a"].device.type == "cpu":
        raise Unavailable("CUDA only")
    grouped = require("epiloq.bench.peers.triton_products").grouped
    return tried([partial(grouped, *operands(s), s["offs"]) for s in sets])


OPERATION = Operation(
    name="grouped_mm",
    variants=tuple(VARIANTS),
    inputs=_inputs,
    bind=_ours,
    error=_error,
    work=lambda case: VARIANTS[case.variant].experts * product_work(case),
    ceiling="int8",  # the same rate
    peers={
        "separate": _separate,
        "_grouped_mm": _bf16,
        "_scaled_grouped_mm": _scaled_grouped,
        "deep_gemm": _deep_gemm,
        "triton": _triton,
    },
)
