"""bf16 activations quantised in blocks inside the call, times 8- or 4-bit weights in blocks -> bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Inputs, Operation, each, sample, worst

DTYPE = torch.bfloat16
# Variant -> bits and group size.
KINDS = {"w8g128": (8, 128), "w8g64": (8, 64), "w8g32": (8, 32), "w4g128": (4, 128), "w4g64": (4, 64), "w4g32": (4, 32)}


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    bits, group = KINDS[case.variant]
    device, blocks = generator.device, -(-case.k // group)
    x = torch.randn((case.m, case.k), generator=generator, device=device).add_(0.1).to(DTYPE)
    # Prepared values and parameters in the layout that kernels read; a block's sum follows from its values.
    shape = (case.n, case.k if bits == 8 else (case.k + 1) // 2)
    q = torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)
    scale = torch.rand((case.n, blocks), generator=generator, device=device).add_(0.1) / 2 ** (bits - 1)
    weight = epiloq.online_quant_weight(q, scale, group_size=group, bits=bits, in_features=case.k)
    return {"x": x, "values": weight.values, "parameters": weight.parameters}


def _weight(case: Case, inputs: Inputs) -> epiloq.BlockQuantWeight:
    bits, group = KINDS[case.variant]
    return epiloq.BlockQuantWeight(inputs["values"], inputs["parameters"], case.n, case.k, group, bits)


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against the dequantised float64 product; tolerance: one output ulp, and fp32's rounding of each term."""
    if result.shape != (case.m, case.n) or result.dtype != DTYPE:
        return float("inf")
    group = KINDS[case.variant][1]
    rows, columns = sample(case.m, 64, generator), sample(case.n, 64, generator)
    q, scale, offset, _ = epiloq.quantize_blockwise_int8(inputs["x"][rows].contiguous(), group)
    assert offset is not None
    block = torch.arange(case.k, device=rows.device) // group
    x = q.double() * scale.double()[:, block] + offset.double()[:, block]
    weight = _weight(case, inputs)
    of_rows = epiloq.BlockQuantWeight(
        weight.values[columns], weight.parameters[:, :, columns], len(columns), case.k, group, weight.bits
    ).dequantize(torch.float32)
    reference, magnitude = x @ of_rows.double().t(), x.abs() @ of_rows.double().abs().t()
    tolerance = torch.finfo(DTYPE).eps * reference.abs() + 16 * torch.finfo(torch.float32).eps * magnitude + 1e-30
    return worst((result[rows][:, columns].double() - reference).abs(), tolerance)


@each
def _scaled_mm(case: Case, inputs: Inputs) -> partial[torch.Tensor]:
    """The same product with scales per row and channel, which shows the cost of the finer blocks."""

    def call(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q_x, scale_x, _ = epiloq.quantize_int8(x, pad_to=16)
        return epiloq.scaled_mm(q_x, q, scale_x, scale, out_dtype=DTYPE)

    q, scale, _ = epiloq.quantize_int8(_weight(case, inputs).dequantize(), pad_to=16)
    return partial(call, inputs["x"], q.t(), scale)


OPERATION = Operation(
    name="online_quant_mm",
    variants=tuple(KINDS),
    inputs=_inputs,
    bind=each(lambda case, s: partial(epiloq.online_quant_mm, s["x"], _weight(case, s))),
    error=_error,
    ceiling="int8",
    peers={
        "bf16": each(lambda case, s: partial(F.linear, s["x"], _weight(case, s).dequantize(DTYPE))),
        "quantize_int8+scaled_mm": _scaled_mm,
        "staged": each(lambda case, s: partial(epiloq.online_quant_mm, s["x"], _weight(case, s), staged=True)),
    },
)
