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
