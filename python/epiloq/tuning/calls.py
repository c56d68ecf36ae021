"""Calls of a problem's kernels on a CUDA device, each with its own operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq.ops.online_quant_mm import run as run_online_quant
from epiloq.ops.weight_only_mm import run as run_weight_only
from epiloq.tuning.problems import Problem
from epiloq.weights.block_quant_weight import prepare
from epiloq.weights.packed_layout import depth_of

Call = Callable[[], Any]
PADDING, PANEL, LANE_BYTES = 128, 16, 16


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers of random bits, as zeros would draw less power. float8 without NaN and of moderate exponents."""
    if dtype == torch.float8_e4m3fn:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    return torch.randint(low, high, shape, dtype=dtype, device=device)


def _scales(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.rand(shape, device=device).mul_(0.01).add_(0.001).to(dtype)


def _scaled_mm(p: Problem, device: torch.device) -> Call:
    options = dict(p.options)
    dtype = getattr(torch, options["dtype"])
    a, b = _values((p.m, p.k), dtype, device), _values((p.n, p.k), dtype, device).t()
    scales = (_scales((p.m, 1), torch.float32, device), _scales((p.n,), torch.float32, device))
    out = torch.empty((p.m, p.n), dtype=torch.bfloat16, device=device)
    return partial(_core.scaled_mm, out, a, b, *scales, fast_accum=options.get("fast_accum", False), constant_b=True)


def _groupwise_mm(p: Problem, device: torch.device) -> Call:
    options = dict(p.options)
    rows = 1 if options.get("column_scales") else 128
    dtype, blocks = torch.float8_e4m3fn, -(-p.k // 128)
    a, b = _values((p.m, p.k), dtype, device), _values((p.n, p.k), dtype, device).t()
    # Scales of tokens one column after the other, their columns on 16 bytes, as quantize_fp8 writes them.
    scale_a = _scales((blocks, -(-p.m // 4) * 4), torch.float32, device)[:, : p.m].t()
    if options.get("whole_row_scales"):  # as w4a8_mm calls it
        scale_a = _scales((p.m, 1), torch.float32, device).expand(-1, blocks)
    scale_b = _scales((-(-p.n // rows), blocks), torch.float32, device).t()
    out = torch.empty((p.m, p.n), dtype=torch.bfloat16, device=device)
    return partial(_core.groupwise_mm, out, a, b, scale_a, scale_b, columns_per_scale=rows, constant_b=True)


def _packed(p: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A packed weight's values, scales, zero points and offsets (epiloq.PackedWeight)."""
    options = dict(p.options)
    bits, group = options.get("bits", 4), options["group_size"]
    padded_k, panels = -(-p.k // PADDING) * PADDING, -(-p.n // PANEL)
    shape = (panels, 1 if group == -1 else -(-padded_k // group), PANEL)
    dtype = torch.float32 if options.get("scale_bytes") == 4 else getattr(torch, options.get("dtype", "bfloat16"))
    q = _values((panels, padded_k // depth_of(bits), 32, LANE_BYTES), torch.uint8, device)
    zero = torch.full(shape, 1 << bits - 1, dtype=torch.uint8, device=device) if options.get("zeros") else None
    offset = _scales(shape, dtype, device) if options.get("offsets") else None
    return q, _scales(shape, dtype, device), zero, offset


def _weight_only_mm(p: Problem, device: torch.device) -> Call:
    options = dict(p.options)
    x = torch.randn((p.m, p.k), device=device).to(getattr(torch, options["dtype"]))
    numbers: tuple[Any, ...] = (options["bits"], p.n, p.k, options["group_size"], -inf, inf)
    return partial(run_weight_only, x, *_packed(p, device), None, None, *numbers, out=x.new_empty((p.m, p.n)))


def _w4a8_mm(p: Problem, device: torch.device) -> Call:
    x_q = _values((p.m, p.k), torch.float8_e4m3fn, device)
    scale_a = _scales((p.m,), torch.float32, device)
    scratch = x_q.new_empty((p.m, -(-p.k // PADDING) * PADDING), dtype=torch.uint8)
    out = torch.empty((p.m, p.n), dtype=torch.bfloat16, device=device)
    q, scale, zero, _ = _packed(p, device)
    group = dict(p.options)["group_size"]

    def call() -> None:
        if not _core.w4a8_mm(out, x_q, scale_a, q, scale, zero, scratch, None, p.n, p.k, group):
            raise NotImplementedError(f"epiloq.tune: no float8 kernel of w4a8_mm for groups of {group}")

    return call


def _online_quant_mm(p: Problem, device: torch.device) -> Call:
    options = dict(p.options)
    bits, group = options["bits"], options["group_size"]
    blocks = -(-p.k // group)
    x = torch.randn((p.m, p.k), device=device).to(torch.bfloat16)
    q = torch.randint(-(1 << bits - 1), 1 << bits - 1, (p.n, p.k), dtype=torch.int8, device=device)
    weight = prepare(q, _scales((p.n, blocks), torch.float32, device), None, group, bits)
    out = x.new_empty((p.m, p.n))
    numbers: tuple[Any, ...] = (p.k, group, bits, -inf, inf, False)
    return partial(run_online_quant, x, weight.values, weight.parameters, None, *numbers, out=out)


_BUILDERS: dict[str, Callable[[Problem, torch.device], Call]] = {
    "scaled_mm": _scaled_mm,
    "groupwise_mm": _groupwise_mm,
    "online_quant_mm": _online_quant_mm,
    "w4a8_mm": _w4a8_mm,
    "weight_only_mm": _weight_only_mm,
}


def calls_of(problem: Problem, device: torch.device, count: int) -> list[Call]:
    """Calls of the problem, each with its own operands, using the kernel that dispatch chooses."""
    return [_BUILDERS[problem.operation](problem, device) for _ in range(count)]
