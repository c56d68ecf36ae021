"""bf16 activations -> int8 with a scale, and a zero point, per token or given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Inputs, require, sample, worst
from epiloq.bench.operations.quantised import SMALLEST_SCALE, quantiser

# Rounding allows half a step; the fp32 quotient adds at most 256 * 2^-24 of a step.
HALF_STEP = 0.5 + 2.0**-16


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    x = torch.randn((case.m, case.k), generator=generator, device=generator.device)
    inputs = {"x": x.add_(0.25).to(torch.bfloat16)}
    if case.variant == "static":
        inputs["scale"] = torch.full((1,), 4 / 127, device=generator.device)
    return inputs


def _ours(case: Case, sets: Sequence[Inputs]) -> Bound:
    symmetric = case.variant != "token_azp"
    return Bound([partial(epiloq.quantize_int8, s["x"], scale=s.get("scale"), symmetric=symmetric) for s in sets])


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Check q within half a step of x / scale + azp, and scale and azp within fp32's rounding of their formulas."""
    q, scale, azp = result
    if q.shape != (case.m, case.k) or q.dtype != torch.int8:
        return float("inf")
    rows = sample(case.m, 64, generator)
    x = inputs["x"][rows].double()
    scale = (scale[rows] if scale.numel() > 1 else scale).double().reshape(-1, 1)
    zero = torch.zeros_like(scale) if azp is None else azp[rows].double()
    q_error = (q[rows].double() - (x / scale + zero).clamp(-128, 127)).abs()
    errors = [worst(q_error, torch.full_like(q_error, HALF_STEP))]
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    expected = {
        "token": torch.maximum(-low, high) / 127,
        "token_azp": (high - low) / 255,
        "static": inputs.get("scale", scale).double().reshape(-1, 1),
    }[case.variant].clamp(min=SMALLEST_SCALE)
    errors.append(worst((scale - expected).abs(), 2.0**-22 * expected))
    if case.variant == "token_azp":
        errors.append(worst((zero - (-128 - low / scale)).abs(), torch.full_like(zero, HALF_STEP)))
    return float(torch.tensor(errors).max())


def quantise_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(SMALLEST_SCALE)
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def quantise_token_azp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.float()
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 255).clamp_min(SMALLEST_SCALE)
    azp = (-128 - low / scale).round()
    return ((x / scale).round() + azp).clamp(-128, 127).to(torch.int8), scale, azp.to(torch.int32)


def quantise_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


IN_TORCH: Mapping[str, Callable[..., object]] = {
    "token": quantise_token,
    "token_azp": quantise_token_azp,
    "static": quantise_static,
}


def _vllm(case: Case, sets: Sequence[Inputs]) -> Bound:
    quantise = require("vllm._custom_ops").scaled_int8_quant
    symmetric = case.variant != "token_azp"
    return Bound([partial(quantise, s["x"], s.get("scale"), symmetric=symmetric) for s in sets])


OPERATION = quantiser("quantize_int8", _inputs, _ours, _error, IN_TORCH, {"vllm": _vllm})
