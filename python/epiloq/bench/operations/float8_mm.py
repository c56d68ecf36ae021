"""float8 x float8 -> bf16 with scales per row, or per group of 128."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Call, Inputs, Operation, Unavailable, note_of, require, sample, worst
from epiloq.bench.peers import deep_gemm

OUT_DTYPE = torch.bfloat16
GROUP = 128
# Tolerances relative to the root of the sum of squared terms; docs/numerics.md derives them.
ACCURATE = 2.0**-8
_FAST = 2.0**-10.5


def float8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    return values.mul_(448 / 4).clamp_(-448, 448).to(torch.float8_e4m3fn)


def _values(case: Case, generator: torch.Generator) -> Inputs:
    return {"a": float8((case.m, case.k), generator), "b": float8((case.n, case.k), generator).t()}


def scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return 0.002 + 0.02 * torch.rand(shape, generator=generator, device=generator.device)


def _row_inputs(case: Case, generator: torch.Generator) -> Inputs:
    scale_a, scale_b = scales(generator, case.m, 1), scales(generator, case.n)
    return {**_values(case, generator), "scale_a": scale_a, "scale_b": scale_b}


def _group_inputs(case: Case, generator: torch.Generator) -> Inputs:
    groups, padded = -(-case.k // GROUP), -(-case.m // 4) * 4
    return {
        **_values(case, generator),
        # M-major and padded, as the quantisers write it on request and DeepGEMM reads it.
        "scale_a": scales(generator, groups, padded).t()[: case.m],
        "scale_b": scales(generator, -(-case.n // GROUP), groups).t(),
    }


def operands(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return inputs["a"], inputs["b"], inputs["scale_a"], inputs["scale_b"]


def _rows(case: Case, sets: Sequence[Inputs]) -> Bound:
    scaled = partial(epiloq.scaled_mm, out_dtype=OUT_DTYPE, fast_accum=case.variant == "fast", constant_b=True)
    return Bound([partial(scaled, *operands(s)) for s in sets])


def _groups(case: Case, sets: Sequence[Inputs]) -> Bound:
    return Bound([partial(epiloq.groupwise_mm, *operands(s), out_dtype=OUT_DTYPE, constant_b=True) for s in sets])


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against the dequantised float64 product; tolerance: one output ulp, and a part of the terms' span."""
    if result.shape != (case.m, case.n) or result.dtype != OUT_DTYPE:
        return float("inf")
    rows, columns = sample(case.m, 64, generator), sample(case.n, 64, generator)
    a, b = inputs["a"][rows].double(), inputs["b"][:, columns].double()
    if inputs["scale_b"].ndim == 1:
        a, b = a * inputs["scale_a"][rows].double(), b * inputs["scale_b"][columns].double()
    else:
        k = torch.arange(case.k, device=rows.device) // GROUP
        a = a * inputs["scale_a"][rows][:, k].double()
        b = b * inputs["scale_b"][k][:, columns // GROUP].double()
    reference, span = a @ b, (a.square() @ b.square()).sqrt()
    part = _FAST * case.k**0.5 if case.variant == "fast" else ACCURATE
    tolerance = torch.finfo(OUT_DTYPE).eps * reference.abs() + part * span + 1e-30
    return worst((result[rows][:, columns].double() - reference).abs(), tolerance)


def _bf16(case: Case, sets: Sequence[Inputs]) -> Bound:
    return Bound([partial(F.linear, s["a"].to(OUT_DTYPE), s["b"].t().to(OUT_DTYPE)) for s in sets])


def _cublas(case: Case, sets: Sequence[Inputs]) -> Bound:
    if sets[0]["a"].device.type == "cpu":
        raise Unavailable("row-wise scales on a GPU only")
    multiply = partial(torch._scaled_mm, out_dtype=OUT_DTYPE, use_fast_accum=case.variant == "fast")
    return tried([partial(multiply, s["a"], s["b"], s["scale_a"], s["scale_b"].reshape(1, -1)) for s in sets])


def _cublas_groups(case: Case, sets: Sequence[Inputs]) -> Bound:
    kinds = getattr(F, "ScalingType", None)
    if kinds is None or sets[0]["a"].device.type == "cpu":
        raise Unavailable("block-wise scales need torch.nn.functional.scaled_mm and a GPU")

    def call(s: Inputs) -> partial[torch.Tensor]:
        tokens, weights = kinds.BlockWise1x128, kinds.BlockWise128x128
        scales = (s["scale_a"], tokens, s["scale_b"], weights)
        return partial(F.scaled_mm, s["a"], s["b"], *scales, output_dtype=OUT_DTYPE)

    return tried([call(s) for s in sets])


def _deep_gemm(case: Case, sets: Sequence[Inputs]) -> Bound:
    calls, outs = zip(*(deep_gemm.dense(s) for s in sets), strict=True)
    bound = tried(calls)
    error = _error(case, sets[0], outs[0], torch.Generator(outs[0].device).manual_seed(0))
    return replace(bound, note=note_of(error))


def tried(calls: Sequence[Call]) -> Bound:
    """Call a peer once, since its limits differ between releases; raises Unavailable with its own message."""
    try:
        calls[0]()
    except (RuntimeError, ValueError, TypeError) as error:
        raise Unavailable(str(error).splitlines()[0]) from error
    return Bound(calls)


def _triton(case: Case, sets: Sequence[Inputs]) -> Bound:
    if sets[0]["a"].device.type == "cpu":
        raise Unavailable("CUDA only")
    grouped = require("epiloq.bench.peers.triton_products").grouped

    def call(s: Inputs) -> partial[torch.Tensor]:
        offs = torch.tensor([case.m], dtype=torch.int32, device=s["a"].device)
        return partial(grouped, s["a"], s["b"][None], s["scale_a"], s["scale_b"][None], offs)

    return tried([call(s) for s in sets])


def _vllm(case: Case, sets: Sequence[Inputs]) -> Bound:
    scaled = require("vllm._custom_ops").cutlass_scaled_mm
    return Bound([partial(scaled, *operands(s), OUT_DTYPE) for s in sets])


ROWS = Operation(
    name="scaled_mm_fp8",
    variants=("fast", "accurate"),
    inputs=_row_inputs,
    bind=_rows,
    error=_error,
    ceiling="int8",  # the same rate
    peers={"bf16": _bf16, "_scaled_mm": _cublas, "vllm": _vllm},
)
GROUPS = Operation(
    name="groupwise_mm",
    variants=("group",),
    inputs=_group_inputs,
    bind=_groups,
    error=_error,
    ceiling="int8",
    peers={
        "bf16": _bf16,
        "scaled_mm blocks": _cublas_groups,
        "deep_gemm": _deep_gemm,
        "triton": _triton,
        "vllm": _vllm,
    },
)
