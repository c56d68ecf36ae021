"""DeepGEMM's products on epiloq's operands, converted to its layouts before timing."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from epiloq.bench.contract import Call, Inputs, require

OUT_DTYPE = torch.bfloat16


def dense(inputs: Inputs) -> tuple[Call, Tensor]:
    """Return the call and its output; ``scale_a`` must be M-major with rows padded to 4, or every call copies it."""
    library = require("deep_gemm")
    a, b = inputs["a"], inputs["b"].t()
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=OUT_DTYPE)
    # N and K are compile-time constants, which is DeepGEMM's default, but not that of its forks.
    multiply = partial(library.fp8_gemm_nt, compiled_dims="nk")
    return partial(multiply, (a, inputs["scale_a"]), (b, inputs["scale_b"].t()), out), out


def grouped(inputs: Inputs) -> tuple[Call, Tensor, Tensor]:
    """Return the call for `grouped_mm`'s operands with ``offs``, its output, and the output row of each row of ``a``.

    In its contiguous layout experts begin at multiples of 128 rows; padding rows are computed too.
    """
    library = require("deep_gemm")
    a, scale_a, ends = inputs["a"], inputs["scale_a"], inputs["offs"].long()
    step = library.get_mk_alignment_for_contiguous_layout()
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + step - 1) // step * step
    shift = (padded.cumsum(0) - padded) - (ends - counts)
    expert = torch.arange(len(ends), device=a.device).repeat_interleave(counts)
    rows = torch.arange(len(expert), device=a.device) + shift[expert]
    total = int(padded.sum())
    layout = torch.full((total,), -1, dtype=torch.int32, device=a.device)
    layout[rows] = expert.int()
    spread = a.new_zeros((total, a.shape[1]), dtype=torch.uint8)
    spread[rows] = a.view(torch.uint8)
    scales = scale_a.new_ones((scale_a.shape[1], total)).t()
    scales[rows] = scale_a
    out = a.new_empty((total, inputs["b"].shape[2]), dtype=OUT_DTYPE)
    weights = inputs["b"].mT, inputs["scale_b"].mT
    operands = (spread.view(a.dtype), scales), weights, out, layout
    return partial(library.m_grouped_fp8_gemm_nt_contiguous, *operands), out, rows
