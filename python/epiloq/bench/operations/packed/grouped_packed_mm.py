"""16-bit or FP8 activations x 4-bit weights of a mixture of experts in one call, M rows per expert on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Inputs, Operation, each, product_work, sample, worst
from epiloq.bench.operations.float8_mm import tried
from epiloq.bench.operations.grouped_mm import ends_of, grouped_of_torch, in_turn

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Variant:
    """``ragged``: experts have one row to about three times the average; ``float8``: FP8 rows with a scale each."""

    experts: int
    group_size: int = 128
    ragged: bool = False
    float8: bool = False


VARIANTS = {
    "e8": Variant(8),
    "e8_fp8": Variant(8, float8=True),
    "e32_g32": Variant(32, 32),
    "e128": Variant(128),
    "e128_ragged": Variant(128, ragged=True),
}


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    v, device = VARIANTS[case.variant], generator.device
    draw = partial(torch.randint, generator=generator, device=device)
    q = draw(-8, 8, (v.experts * case.n, case.k), dtype=torch.int8)
    groups = -(-case.k // v.group_size)
    scale = 0.002 + 0.02 * torch.rand((v.experts * case.n, groups), generator=generator, device=device)
    packed = epiloq.pack_weight(q, scale.to(DTYPE), bits=4, group_size=v.group_size)
    x = torch.randn((v.experts * case.m, case.k), generator=generator, device=device)
    rows = {"x": x.to(DTYPE)}
    if v.float8:
        rows["x"], rows["scale_a"] = epiloq.quantize_fp8(x, granularity="token")
    return rows | {"offs": ends_of(v.experts, case.m, v.ragged, generator), "q": packed.q, "scale": packed.scale}


def _tokens(inputs: Inputs) -> Tensor:
    """The rows that are multiplied."""
    return inputs["x"].float() * inputs["scale_a"] if "scale_a" in inputs else inputs["x"]


def _packed(case: Case, inputs: Inputs) -> epiloq.PackedWeight:
    v = VARIANTS[case.variant]
    numbers = (4, v.experts * case.n, case.k, v.group_size)
    return epiloq.PackedWeight(inputs["q"], inputs["scale"], None, None, None, *numbers)


def _ours(case: Case, sets: Sequence[Inputs]) -> Bound:
    multiply = epiloq.grouped_packed_mm
    return Bound([partial(multiply, s["x"], _packed(case, s), s.get("scale_a"), offs=s["offs"]) for s in sets])


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against float64; tolerance: one output ulp, and the roundings of weights and of fp32 sums."""
    total = VARIANTS[case.variant].experts * case.m
    if result.shape != (total, case.n) or result.dtype != DTYPE:
        return float("inf")
    rows, columns = sample(total, 30, generator), sample(case.n, 30, generator)
    expert = torch.searchsorted(inputs["offs"], rows, right=True)
    dense = _packed(case, inputs).dequantize().view(-1, case.n, case.k)
    # [rows, columns, K]: each row with the weight of its expert.
    products = _tokens(inputs)[rows].double()[:, None] * dense[expert[:, None], columns].double()
    reference, size = products.sum(-1), products.square().sum(-1).sqrt()
    tolerance = torch.finfo(DTYPE).eps * (reference.abs() + 2 * size) + 1e-30
    return worst((result[rows][:, columns].double() - reference).abs(), tolerance)


@each
def _separate(case: Case, s: Inputs) -> partial[Tensor]:
    """A call of `weight_only_mm` or `w4a8_mm` per expert, with row counts known on the host."""
    out, packed = s["x"].new_empty((s["x"].shape[0], case.n), dtype=DTYPE), _packed(case, s)
    parts: list[partial[Tensor]] = []
    for e, (i, j) in enumerate(pairwise((0, *s["offs"].tolist()))):
        weight = packed.row_slice(e * case.n, (e + 1) * case.n)
        if "scale_a" in s:
            parts.append(partial(epiloq.w4a8_mm, s["x"][i:j], weight, s["scale_a"][i:j], out=out[i:j]))
        else:
            parts.append(partial(epiloq.weight_only_mm, s["x"][i:j], weight, out=out[i:j]))
    return partial(in_turn, parts, out)


def _bf16(case: Case, sets: Sequence[Inputs]) -> Bound:
    grouped = grouped_of_torch()

    def bind(s: Inputs) -> partial[Tensor]:
        dense = _packed(case, s).dequantize(DTYPE).view(-1, case.n, case.k)
        return partial(grouped, _tokens(s).to(DTYPE), dense.transpose(1, 2), offs=s["offs"])

    return tried([bind(s) for s in sets])


OPERATION = Operation(
    name="grouped_packed_mm",
    variants=tuple(VARIANTS),
    inputs=_inputs,
    bind=_ours,
    error=_error,
    work=lambda case: VARIANTS[case.variant].experts * product_work(case),
    ceiling="half",
    peers={"separate": _separate, "_grouped_mm": _bf16},
)
