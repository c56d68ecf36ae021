"""A quantised layer on bf16 tokens: a quantiser, or a norm fused with it, and the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Call, Inputs, Operation, each
from epiloq.bench.operations import float8_mm, scaled_mm
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear

DTYPE = torch.bfloat16
EPS = 1e-6
# (tokens, weight of the fused norm if any) -> (quantised tokens, their scales)
Quantise = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kind:
    """A kind of layer: its quantiser and its product.

    Weights and the check of results are those of the operation `product`. `module` computes both in one call, with
    weight scales named `scales`; a layer with a fused `norm` has no module.
    """

    quantise: Quantise
    multiply: Callable[..., Tensor]
    product: Operation
    variant: str
    module: Callable[..., nn.Module]
    scales: str = "weight_scale"
    norm: bool = False


def _int8(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return epiloq.quantize_int8(x)[:2]


def _fp8(**kind: Any) -> Quantise:
    return lambda x, _: epiloq.quantize_fp8(x, **kind)


def _norm(**kind: Any) -> Quantise:
    return lambda x, weight: epiloq.rms_norm_quant(x, weight, EPS, **kind)


_SCALED_MM = partial(epiloq.scaled_mm, out_dtype=DTYPE, constant_b=True)
_GROUPWISE_MM = partial(epiloq.groupwise_mm, out_dtype=DTYPE, constant_b=True)
_GROUPS: dict[str, Any] = {"granularity": "group", "scale_layout": "column"}


_INT8 = Kind(_int8, _SCALED_MM, scaled_mm.OPERATION, "scaled", Int8Linear)
_FP8 = Kind(_fp8(granularity="token"), _SCALED_MM, float8_mm.ROWS, "accurate", Fp8Linear)
_FP8_GROUPS = Kind(_fp8(**_GROUPS), _GROUPWISE_MM, float8_mm.GROUPS, "group", Fp8BlockLinear, "weight_scale_inv")
KINDS = {
    "int8_token": _INT8,
    "fp8_token": _FP8,
    "fp8_group": _FP8_GROUPS,
    "norm_int8_token": replace(_INT8, quantise=_norm(), norm=True),
    "norm_fp8_group": replace(_FP8_GROUPS, quantise=_norm(dtype=torch.float8_e4m3fn, **_GROUPS), norm=True),
}


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    product = _product_case(case)
    drawn = KINDS[case.variant].product.inputs(product, generator)
    x = torch.randn((case.m, case.k), generator=generator, device=generator.device).to(DTYPE)
    return {"x": x, "norm": x.new_ones(case.k), "b": drawn["b"], "scale_b": drawn["scale_b"]}


def _product_case(case: Case) -> Case:
    kind = KINDS[case.variant]
    return replace(case, operation=kind.product.name, variant=kind.variant)


@each
def _ours(case: Case, s: Inputs) -> Call:
    kind = KINDS[case.variant]

    def call() -> Tensor:
        q, scale = kind.quantise(s["x"], s["norm"])
        return kind.multiply(q, s["b"], scale, s["scale_b"])

    if kind.norm:
        return partial(call)
    module: nn.Module = kind.module(case.k, case.n, bias=False, device=s["x"].device, dtype=DTYPE)
    module.load_state_dict({"weight": s["b"].t(), kind.scales: s["scale_b"].t()})
    return partial(module.__call__, s["x"])


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Check the product of the quantised tokens, as its own benchmark does."""
    kind = KINDS[case.variant]
    q, scale = kind.quantise(inputs["x"], inputs["norm"])
    return kind.product.error(_product_case(case), {**inputs, "a": q, "scale_a": scale}, result, generator)


@each
def _bf16(case: Case, s: Inputs) -> Call:
    """The layer in bf16, after the same norm; the values of its weights do not matter."""
    weight = s["b"].t().to(DTYPE).contiguous()
    if not KINDS[case.variant].norm:
        return partial(F.linear, s["x"], weight)
    return partial(lambda x, w, norm: F.linear(F.rms_norm(x, (case.k,), norm, EPS), w), s["x"], weight, s["norm"])


OPERATION = Operation(
    name="layer",
    variants=tuple(KINDS),
    inputs=_inputs,
    bind=_ours,
    error=_error,
    ceiling="int8",  # float8's rate is the same
    peers={"bf16": _bf16},
)
