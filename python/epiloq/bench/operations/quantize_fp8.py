"""bf16 -> FP8 with scales per tensor, token, group of 128 or block of 128 x 128, or with a given scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Inputs, Unavailable, require, sample
from epiloq.bench.operations.quantised import SMALLEST_SCALE, by_group, error, quantiser

GROUP = 128


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    x = torch.randn((case.m, case.k), generator=generator, device=generator.device)
    inputs = {"x": x.to(torch.bfloat16)}
    if case.variant == "static":
        inputs["scale"] = torch.full((1,), 4 / 448, device=generator.device)
    return inputs


def _choice(variant: str) -> dict[str, Any]:
    granularity, _, layout = variant.partition("_")
    granularity = "tensor" if granularity == "static" else granularity
    return {"granularity": granularity, "scale_layout": layout or "row"}


def _ours(case: Case, sets: Sequence[Inputs]) -> Bound:
    choice = _choice(case.variant)
    return Bound([partial(epiloq.quantize_fp8, s["x"], scale=s.get("scale"), **choice) for s in sets])


def _error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    q, scale = result
    if q.shape != (case.m, case.k) or q.dtype != torch.float8_e4m3fn:
        return float("inf")
    check = partial(error, measured=case.variant != "static", slack=2.0**-22)
    granularity, x = _choice(case.variant)["granularity"], inputs["x"]
    if granularity == "tensor":
        return check(x.double().flatten(), q.double().flatten().to(q.dtype), scale)
    if granularity == "block":
        row, col = (int(sample(count, 1, generator)[-1]) for count in scale.shape)
        part = slice(GROUP * row, GROUP * (row + 1)), slice(GROUP * col, GROUP * (col + 1))
        return check(x[part].double().flatten(), q[part].flatten(), scale[row, col].view(1))
    rows = sample(case.m, 64, generator)
    group = case.k if granularity == "token" else GROUP
    return check(by_group(x[rows], group), by_group(q[rows], group).to(q.dtype), scale[rows][..., None])


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _measure(amax: Tensor) -> Tensor:
    return (amax / 448).clamp_min(SMALLEST_SCALE)


def quantise_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _measure(x.abs().amax().float())
    return _codes(x.float(), scale), scale


def quantise_static(x: Tensor, scale: Tensor) -> Tensor:
    return _codes(x.float(), scale)


def quantise_token(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _measure(x.float().abs().amax(-1, keepdim=True))
    return _codes(x.float(), scale), scale


def quantise_group(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).view(x.shape[0], -1, GROUP)
    scale = _measure(groups.abs().amax(-1, keepdim=True))
    return _codes(groups, scale).view(x.shape[0], -1)[:, : x.shape[1]], scale[..., 0]


def quantise_group_column(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = quantise_group(x)
    return q, scale.t().contiguous()


def quantise_block(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -cols % GROUP, 0, -rows % GROUP))
    blocks = blocks.view(blocks.shape[0] // GROUP, GROUP, -1, GROUP)
    scale = _measure(blocks.abs().amax((1, 3), keepdim=True))
    q = _codes(blocks, scale).view(blocks.shape[0] * GROUP, -1)
    return q[:rows, :cols], scale[:, 0, :, 0]


IN_TORCH: Mapping[str, Callable[..., object]] = {
    "tensor": quantise_tensor,
    "static": quantise_static,
    "token": quantise_token,
    "group": quantise_group,
    "group_column": quantise_group_column,
    "block": quantise_block,
}


def _vllm(case: Case, sets: Sequence[Inputs]) -> Bound:
    if case.variant == "block":
        raise Unavailable("vllm does not quantise blocks")
    if case.variant.startswith("group"):
        module = require("vllm.model_executor.layers.quantization.utils.fp8_utils")
        quantise = partial(module.per_token_group_quant_fp8, group_size=GROUP, column_major_scales="_" in case.variant)
        return Bound([partial(quantise, s["x"]) for s in sets])
    quantise = partial(require("vllm._custom_ops").scaled_fp8_quant, use_per_token_if_dynamic=case.variant == "token")
    return Bound([partial(quantise, s["x"], s.get("scale")) for s in sets])


def _deep_gemm(case: Case, sets: Sequence[Inputs]) -> Bound:
    names = {"group": "per_token_cast_to_fp8", "block": "per_block_cast_to_fp8"}
    if case.variant not in names:
        raise Unavailable("deep_gemm quantises only groups and blocks")
    cast = getattr(require("deep_gemm.utils"), names[case.variant])
    return Bound([partial(cast, s["x"], use_ue8m0=False) for s in sets])


OPERATION = quantiser("quantize_fp8", _inputs, _ours, _error, IN_TORCH, {"vllm": _vllm, "deep_gemm": _deep_gemm})
