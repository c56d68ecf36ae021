"""16-bit activations x weights of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Binder, Bound, Call, Inputs, Operation, each, note_of
from epiloq.bench.operations.packed import weights
from epiloq.bench.peers.weight_only import gemlite, humming, int4pack, machete, marlin, torchao


@dataclass(frozen=True)
class Variant:
    """Bits, columns per group, whether there are zero points, and the dtype of activations and scales."""

    bits: int
    group_size: int
    zeros: bool
    dtype: torch.dtype


VARIANTS = {
    "w4_g128": Variant(4, 128, False, torch.bfloat16),
    "w4_g128_fp16": Variant(4, 128, False, torch.float16),
    "w4_g32_zero": Variant(4, 32, True, torch.bfloat16),
    "w8": Variant(8, -1, False, torch.bfloat16),
}


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    v, device = VARIANTS[case.variant], generator.device
    groups = 1 if v.group_size == -1 else -(-case.k // v.group_size)
    low = 0 if v.zeros else -(1 << (v.bits - 1))
    draw = partial(torch.randint, generator=generator, device=device)
    q = draw(low, low + (1 << v.bits), (case.n, case.k), dtype=torch.int16)
    scale = 0.002 + 0.02 * torch.rand((case.n, groups), generator=generator, device=device)
    zero = draw(0, 1 << v.bits, (case.n, groups), dtype=torch.int16) if v.zeros else None
    packed = epiloq.pack_weight(q, scale.to(v.dtype), zero, bits=v.bits, group_size=v.group_size)
    x = torch.randn((case.m, case.k), generator=generator, device=device).to(v.dtype)
    return {"x": x, **packed.state_dict()}


def _packed(case: Case, inputs: Inputs) -> epiloq.PackedWeight:
    v, zero = VARIANTS[case.variant], inputs.get("zero")
    return epiloq.PackedWeight(inputs["q"], inputs["scale"], zero, None, None, v.bits, case.n, case.k, v.group_size)


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    dtype = VARIANTS[case.variant].dtype
    return weights.error(case, _packed(case, inputs), inputs["x"], result, generator, dtype)


def _peer(bind: Callable[[Inputs, epiloq.PackedWeight], Call]) -> Binder:
    def bound(case: Case, sets: Sequence[Inputs]) -> Bound:
        calls = [bind(s, _packed(case, s)) for s in sets]
        generator = torch.Generator(sets[0]["x"].device).manual_seed(0)
        error = _error(case, sets[0], calls[0](), generator)
        return Bound(calls, note_of(error))

    return bound


OPERATION = Operation(
    name="weight_only_mm",
    variants=tuple(VARIANTS),
    inputs=_inputs,
    bind=each(lambda case, s: partial(epiloq.weight_only_mm, s["x"], _packed(case, s))),
    error=_error,
    ceiling="half",
    peers={
        "dense": each(lambda case, s: partial(F.linear, s["x"], _packed(case, s).dequantize(s["x"].dtype))),
        "_weight_int4pack_mm": _peer(int4pack),
        "gemlite": _peer(gemlite),
        "humming": _peer(humming),
        "machete": _peer(machete),
        "marlin": _peer(marlin),
        "torchao": _peer(torchao),
    },
)
