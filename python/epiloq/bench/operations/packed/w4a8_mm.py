"""FP8 activations per token x 4-bit weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Inputs, Operation, Unavailable, each, note_of
from epiloq.bench.operations.float8_mm import tried
from epiloq.bench.operations.packed import weights
from epiloq.bench.operations.packed.weights import FP4, INTEGERS, OUT_DTYPE, weight_of
from epiloq.bench.peers.weight_only import cutlass_w4a8


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    x = torch.randn((case.m, case.k), generator=generator, device=generator.device)
    x_q, scale_a = epiloq.quantize_fp8(x, granularity="token")
    return {"x_q": x_q, "scale_a": scale_a, **weights.draw_weight(case.variant, case.n, case.k, generator)}


@each
def _ours(case: Case, s: Inputs) -> partial[Tensor]:
    return partial(epiloq.w4a8_mm, s["x_q"], weight_of(case, s), s["scale_a"], out_dtype=OUT_DTYPE)


def _tokens(inputs: Inputs) -> Tensor:
    return inputs["x_q"].float() * inputs["scale_a"]


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    return weights.error(case, weight_of(case, inputs), _tokens(inputs), result, generator)


@each
def _dense(case: Case, s: Inputs) -> partial[Tensor]:
    return partial(F.linear, _tokens(s).to(OUT_DTYPE), weight_of(case, s).dequantize(OUT_DTYPE))


@each
def _float8(case: Case, s: Inputs) -> partial[Tensor]:
    """The same activations times an FP8 weight with a scale per channel, twice the bytes."""
    b, scale_b = epiloq.quantize_fp8(weight_of(case, s).dequantize(), granularity="token")
    return partial(epiloq.scaled_mm, s["x_q"], b.t(), s["scale_a"], scale_b, out_dtype=OUT_DTYPE, constant_b=True)


@each
def _weight_only(case: Case, s: Inputs) -> partial[Tensor]:
    """The same weight times the activations in 16 bits."""
    x, weight = _tokens(s).to(OUT_DTYPE), weight_of(case, s)
    if isinstance(weight, epiloq.PackedFp4Weight):
        return partial(epiloq.packed_fp4_mm, x, weight)
    return partial(epiloq.weight_only_mm, x, weight)


def _vllm(case: Case, sets: Sequence[Inputs]) -> Bound:
    if case.variant != "g128":
        raise Unavailable("vLLM's W4A8 supports integers in groups of 128")
    bound = tried([cutlass_w4a8(s, weight_of(case, s)) for s in sets])  # type: ignore[arg-type]
    result = bound.calls[0]()
    generator = torch.Generator(sets[0]["x_q"].device).manual_seed(0)
    return Bound(bound.calls, note_of(_error(case, sets[0], result, generator)))


OPERATION = Operation(
    name="w4a8_mm",
    variants=(*INTEGERS, *FP4),
    inputs=_inputs,
    bind=_ours,
    error=_error,
    ceiling="int8",
    peers={"dense": _dense, "fp8 weights": _float8, "16-bit tokens": _weight_only, "vllm": _vllm},
)
