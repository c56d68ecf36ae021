"""int8 x int8 -> bf16 with the four fused epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Call, Inputs, Operation, Unavailable, each, require, sample, worst
from epiloq.bench.operations.float8_mm import operands

OUT_DTYPE = torch.bfloat16
# torch._int_mm on CUDA refuses fewer than 17 rows.
INT_MM_ROWS = 32


def int8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    # Quantised normal values, as in layers: the power of a GEMM, and so the clock, depends on its operands' bits.
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    return values.mul_(127 / 4).round_().clamp_(-128, 127).to(torch.int8)


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    device = generator.device
    rand = partial(torch.rand, generator=generator, device=device)
    per_token = (1,) if case.variant == "azp" else (case.m, 1)
    inputs = {
        "a": int8((case.m, case.k), generator),
        "b": int8((case.n, case.k), generator).t(),
        "scale_a": 0.002 + 0.02 * rand(per_token),
        "scale_b": 0.002 + 0.02 * rand((case.n,)),
    }
    if case.variant == "bias":
        inputs["bias"] = (rand((case.n,)) - 0.5).to(OUT_DTYPE)
    if case.variant.startswith("azp"):
        azp = torch.randint(-128, 128, (case.m,), generator=generator, device=device, dtype=torch.int32)
        column_sums = inputs["b"].sum(0, dtype=torch.int32)
        if case.variant == "azp":
            inputs["azp_adj"] = azp[0] * column_sums
        else:
            inputs |= {"azp_adj": column_sums, "azp": azp}
    return inputs


def _ours(case: Case, sets: Sequence[Inputs]) -> Bound:
    if "azp_adj" in sets[0]:
        azp = partial(epiloq.scaled_mm_azp, out_dtype=OUT_DTYPE, constant_b=True)
        return Bound([partial(azp, *operands(s), s["azp_adj"], s.get("azp")) for s in sets])
    scaled = partial(epiloq.scaled_mm, out_dtype=OUT_DTYPE, constant_b=True)
    return Bound([partial(scaled, *operands(s), s.get("bias")) for s in sets])


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against sa sb (acc - azp adj) + bias in float64; tolerance: one ulp, and fp32's rounding of each term."""
    if result.shape != (case.m, case.n) or result.dtype != OUT_DTYPE:
        return float("inf")
    rows, columns = sample(case.m, 64, generator), sample(case.n, 64, generator)
    accumulator = inputs["a"][rows].double() @ inputs["b"][:, columns].double()
    if "azp_adj" in inputs:
        azp = inputs["azp"][rows, None].double() if "azp" in inputs else 1.0
        accumulator = accumulator - azp * inputs["azp_adj"][columns].double()
    scale_a = inputs["scale_a"][rows] if inputs["scale_a"].numel() > 1 else inputs["scale_a"]
    product = scale_a.double() * inputs["scale_b"][columns].double() * accumulator
    bias = inputs["bias"][columns].double() if "bias" in inputs else torch.zeros_like(product[0])
    reference = product + bias
    fp32 = torch.finfo(torch.float32).eps
    tolerance = torch.finfo(OUT_DTYPE).eps * reference.abs() + 4 * fp32 * (product.abs() + bias.abs()) + 1e-30
    return worst((result[rows][:, columns].double() - reference).abs(), tolerance)


def _dequantise(accumulate: Call, inputs: Inputs, m: int) -> torch.Tensor:
    accumulator = accumulate()
    assert isinstance(accumulator, torch.Tensor)
    accumulator = accumulator[:m]
    if "azp_adj" in inputs:
        azp = inputs["azp"][:, None] if "azp" in inputs else 1
        accumulator = accumulator - azp * inputs["azp_adj"]
    out = accumulator * inputs["scale_a"] * inputs["scale_b"]
    return (out + inputs["bias"] if "bias" in inputs else out).to(OUT_DTYPE)


def _int_mm(case: Case, sets: Sequence[Inputs]) -> Bound:
    if sets[0]["a"].device.type == "cpu":
        return Bound([partial(torch._int_mm, s["a"], s["b"]) for s in sets])
    if case.n % 8 or case.k % 8:
        raise Unavailable("torch._int_mm on CUDA needs N and K divisible by 8")
    if case.m > 16:
        return Bound([partial(torch._int_mm, s["a"], s["b"]) for s in sets])
    padding = (0, 0, 0, INT_MM_ROWS - case.m)
    note = f"M padded from {case.m} to {INT_MM_ROWS}"
    return Bound([partial(torch._int_mm, F.pad(s["a"], padding), s["b"]) for s in sets], note)


def _int_mm_dequantised(case: Case, sets: Sequence[Inputs]) -> Bound:
    plain = _int_mm(case, sets)
    return Bound([partial(_dequantise, call, s, case.m) for call, s in zip(plain.calls, sets, strict=True)], plain.note)


def _linear(inputs: Inputs, dtype: torch.dtype) -> partial[torch.Tensor]:
    bias = inputs["bias"].to(dtype) if "bias" in inputs else None
    return partial(F.linear, inputs["a"].to(dtype), inputs["b"].t().to(dtype), bias)


@each
def _fp32(case: Case, inputs: Inputs) -> partial[torch.Tensor]:
    if inputs["a"].device.type != "cpu":
        raise Unavailable("compared on the CPU only")
    return _linear(inputs, torch.float32)


def _vllm(case: Case, sets: Sequence[Inputs]) -> Bound:
    ops = require("vllm._custom_ops")
    if "azp_adj" in sets[0]:
        azp = ops.cutlass_scaled_mm_azp
        return Bound([partial(azp, *operands(s), OUT_DTYPE, s["azp_adj"], s.get("azp")) for s in sets])
    return Bound([partial(ops.cutlass_scaled_mm, *operands(s), OUT_DTYPE, s.get("bias")) for s in sets])


def _sgl_kernel(case: Case, sets: Sequence[Inputs]) -> Bound:
    int8_scaled_mm = require("sgl_kernel").int8_scaled_mm
    if "azp_adj" in sets[0]:
        raise Unavailable("sgl_kernel.int8_scaled_mm has no zero point")
    return Bound([partial(int8_scaled_mm, *operands(s), OUT_DTYPE, s.get("bias")) for s in sets])


OPERATION = Operation(
    name="scaled_mm",
    variants=("scaled", "bias", "azp", "azp_per_token"),
    inputs=_inputs,
    bind=_ours,
    error=_error,
    ceiling="int8",
    peers={
        "bf16": each(lambda case, inputs: _linear(inputs, torch.bfloat16)),
        "fp32": _fp32,
        "_int_mm": _int_mm,
        "_int_mm+dequant": _int_mm_dequantised,
        "vllm": _vllm,
        "sgl_kernel": _sgl_kernel,
    },
)
