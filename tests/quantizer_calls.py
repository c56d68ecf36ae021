"""Every operator that makes FP8, with each of its optional arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

OPS = torch.ops.epiloq


def quantizer_calls(x: Tensor) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    e4m3, bound = torch.float8_e4m3fn, x.new_ones(1)
    for granularity, layout in (("tensor", "row"), ("token", "row"), ("group", "row"), ("group", "column")):
        yield OPS.quantize_fp8_dynamic, (x, granularity, 4, bound, 0.0, True, layout, e4m3, 16), {}
    yield OPS.quantize_fp8_dynamic, (x, "block", 4, None, 0.5, False, "row", torch.float8_e5m2, 1), {}
    yield OPS.quantize_fp8_static, (x, bound, "tensor", 128, e4m3, 16), {}
    scale = x.new_ones(x.shape[0], 1)
    yield OPS.quantize_fp8_out, (x, torch.zeros_like(x, dtype=e4m3), scale, "token", 1, bound, 0.0, False, False), {}
    yield from fused_calls(x, torch.zeros_like(x, dtype=e4m3), scale)


def fused_calls(x: Tensor, q: Tensor, scale: Tensor) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    weight, pair = x.new_ones(x.shape[-1]), torch.cat([x, x], -1)
    for measure in (
        ("token", 128, False, "row", torch.int8, 16),
        ("group", 4, True, "column", torch.float8_e4m3fn, 1),
    ):
        yield OPS.rms_norm_quant, (x, weight, 1e-6, *measure), {}
        yield OPS.rms_norm_quant_add, (x, weight, 1e-6, x.flip(0), *measure), {}
        yield OPS.silu_and_mul_quant, (pair, *measure), {}
    into = (q, scale)
    yield OPS.rms_norm_quant_out, (x, weight, 1e-6, x.flip(0), *into, torch.zeros_like(x), "token", 128, False), {}
    yield OPS.silu_and_mul_quant_out, (pair, *into, "token", 128, False), {}
