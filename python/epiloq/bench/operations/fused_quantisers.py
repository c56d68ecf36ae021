"""Fused norm (with or without residual) or gate, and quantiser: bf16 -> int8 per token, FP8 per token or group; and
GPT-OSS's gate in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Call, Inputs, each, sample, worst
from epiloq.bench.operations.quantised import LARGEST, SMALLEST_SCALE, by_group, error, quantiser

GROUP, EPS = 128, 1e-6
ALPHA, LIMIT = 1.702, 7.0
CHOICES: Mapping[str, dict[str, Any]] = {
    "int8_token": {"dtype": torch.int8},
    "fp8_token": {"dtype": torch.float8_e4m3fn},
    "fp8_group": {"dtype": torch.float8_e4m3fn, "granularity": "group", "scale_layout": "column"},
}


def _choice(variant: str) -> dict[str, Any]:
    return CHOICES[variant.removeprefix("add_")]


def _quantise(values: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """The quantiser's definition in torch operations, for torch.compile."""
    choice = _choice(variant)
    parts = values.unflatten(-1, (-1, GROUP if "granularity" in choice else values.shape[-1]))
    largest = LARGEST[choice["dtype"]]
    scale = (parts.abs().amax(-1, keepdim=True) / largest).clamp_min(SMALLEST_SCALE)
    quotient = parts / scale
    if choice["dtype"] == torch.int8:
        quotient = quotient.round()
    return quotient.clamp(-largest, largest).to(choice["dtype"]).flatten(-2), scale[..., 0]


def norm_in_torch(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, variant: str) -> tuple[Tensor, ...]:
    total = x if residual is None else x + residual
    row = total.float()
    values = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + EPS) * weight.float()
    return (*_quantise(values, variant), *(() if residual is None else (total,)))


def gate_in_torch(x: Tensor, *, variant: str) -> tuple[Tensor, ...]:
    gate, up = x.float().chunk(2, -1)
    return _quantise(functional.silu(gate) * up, variant)


def gpt_oss_gate_in_torch(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(ALPHA * gate))


def _norm_inputs(case: Case, generator: torch.Generator) -> Inputs:
    draw = partial(torch.randn, generator=generator, device=generator.device)
    inputs = {"x": draw((case.m, case.k)), "weight": draw((case.k,)).abs()}
    if case.variant.startswith("add_"):
        inputs["residual"] = draw((case.m, case.k))
    return {name: part.to(torch.bfloat16) for name, part in inputs.items()}


def _gate_inputs(case: Case, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn((case.m, 2 * case.k), generator=generator, device=generator.device).to(torch.bfloat16)}


def _norm(case: Case, sets: Sequence[Inputs]) -> Bound:
    choice = _choice(case.variant)
    return Bound([partial(epiloq.rms_norm_quant, s["x"], s["weight"], EPS, **_residual(s), **choice) for s in sets])


def _residual(inputs: Inputs) -> dict[str, Tensor]:
    return {name: part for name, part in inputs.items() if name == "residual"}


def _gate(case: Case, sets: Sequence[Inputs]) -> Bound:
    return Bound([partial(epiloq.silu_and_mul_quant, s["x"], **_choice(case.variant)) for s in sets])


def _gpt_oss_gate(case: Case, sets: Sequence[Inputs]) -> Bound:
    options: dict[str, Any] = {"alpha": ALPHA, "limit": LIMIT, "offset": 1.0, "interleaved": True}
    return Bound([partial(epiloq.silu_and_mul, s["x"], **options) for s in sets])


def _codes_error(case: Case, values: Tensor, rows: Tensor, q: Tensor, scale: Tensor) -> float:
    choice = _choice(case.variant)
    if q.shape != (case.m, case.k) or q.dtype != choice["dtype"]:
        return float("inf")
    group = GROUP if "granularity" in choice else case.k
    codes = by_group(q[rows], group).to(q.dtype)
    return error(by_group(values, group), codes, scale[rows][..., None], measured=True, slack=2.0**-19)


def _norm_error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    rows = sample(case.m, 64, generator)
    total = inputs["x"]
    if "residual" in inputs:
        total = total + inputs["residual"]
        if not torch.equal(total, result[2]):
            return float("inf")
    row = total[rows].double()
    values = row / (row.square().mean(-1, keepdim=True) + EPS).sqrt() * inputs["weight"].double()
    return _codes_error(case, values, rows, *result[:2])


def _gate_error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    rows = sample(case.m, 64, generator)
    gate, up = inputs["x"][rows].double().chunk(2, -1)
    return _codes_error(case, functional.silu(gate) * up, rows, *result)


def _gpt_oss_gate_error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    if result.shape != (case.m, case.k) or result.dtype != inputs["x"].dtype:
        return float("inf")
    rows = sample(case.m, 64, generator)
    values = gpt_oss_gate_in_torch(inputs["x"][rows].double())
    # A rounding, and what fp32 may lose before it.
    tolerance = values.abs() * (torch.finfo(result.dtype).eps / 2 + 2.0**-16) + torch.finfo(result.dtype).tiny
    return worst((result[rows].double() - values).abs(), tolerance)


@each
def _unfused(case: Case, inputs: Inputs) -> Call:
    """torch's norm or gate in the input's dtype, followed by epiloq's quantiser."""
    choice = dict(_choice(case.variant))
    quantise: Callable[..., object] = epiloq.quantize_int8
    if choice.pop("dtype") != torch.int8:
        quantise = partial(epiloq.quantize_fp8, **{"granularity": "token", **choice})

    def call() -> object:
        x = inputs["x"]
        if "weight" not in inputs:
            gate, up = x.chunk(2, -1)
            return quantise(functional.silu(gate) * up)
        x = x + inputs["residual"] if "residual" in inputs else x
        return quantise(functional.rms_norm(x, x.shape[-1:], inputs["weight"], EPS))

    return call


def _variants(function: Callable[..., object], names: Iterable[str]) -> Mapping[str, Callable[..., object]]:
    def of(variant: str) -> Callable[..., object]:
        return lambda *tensors: function(*tensors, variant=variant)

    return {name: of(name) for name in names}


_NORMS = _variants(norm_in_torch, (*CHOICES, *(f"add_{variant}" for variant in CHOICES)))
_GATES = _variants(gate_in_torch, CHOICES)
NORM = quantiser("rms_norm_quant", _norm_inputs, _norm, _norm_error, _NORMS, {"unfused": _unfused})
GATE = quantiser("silu_and_mul_quant", _gate_inputs, _gate, _gate_error, _GATES, {"unfused": _unfused})
GPT_OSS_GATE = quantiser(
    "silu_and_mul", _gate_inputs, _gpt_oss_gate, _gpt_oss_gate_error, {"gpt_oss": gpt_oss_gate_in_torch}, {}
)
