"""When one kernel multiplies all experts of a mixture."""

from math import inf
from typing import Any

import torch
from torch import Tensor

from epiloq import _core

MANY_ROWS = 64
INTEGER_MULTIPLICATIONS, FP4_MULTIPLICATIONS = 5e9, 2.5e10
"""Of an expert's rows, up to which `mma.sync` tiles for all experts take less. Measured on an H200: separate products
of integers are twice as fast, but the host needs 36 us to launch those of an expert. FP4, which is dequantised first,
takes 57 us or more; one kernel is faster for 1.5e10, separate products are for 3e10."""
FLOAT8_MULTIPLICATIONS = 3e10
"""The same of WGMMA in bfloat16 and separate products in float8. Counted, not measured: at 680 TFLOP/s
(many_experts.json) and some 1,150 (w4a8.json, with unpacking) these gain a launch of 36 us from there on."""


def multiplications(is_fp4: bool, by_wgmma: bool, by_float8: bool) -> float:
    """Multiplications of an expert's rows up to which the kernel that multiplies all experts is faster than products of
    one expert after the other.

    `by_wgmma`: that kernel uses WGMMA for many rows. `by_float8`: separate products are of 8-bit activations.
    """
    if by_wgmma:
        return FLOAT8_MULTIPLICATIONS if by_float8 else inf
    return FP4_MULTIPLICATIONS if is_fp4 else INTEGER_MULTIPLICATIONS


def are_few(rows: float, n: int, k: int, most: float) -> bool:
    """Whether `rows` rows of an expert on average, times a matrix ``[n, k]`` of its own, take at most so many
    multiplications, or few rows."""
    return rows <= MANY_ROWS or rows * n * k <= most


def prefers_one_kernel(*, by_float8: bool = False, **problem: Any) -> bool:
    """Whether an expert has few rows on average, for a problem as `_core.has_expert_wgmma` takes it. `by_float8` as in
    `multiplications`."""
    rows = problem["m"] if problem.get("masked") else problem["m"] / problem["experts"]
    if rows <= MANY_ROWS:
        return True
    most = multiplications(problem["format"] != "int", _core.has_expert_wgmma(**problem), by_float8)
    return are_few(rows, problem["n"], problem["k"], most)


def takes_one_kernel(x: Tensor, n: int, experts: int, by_float8: bool = False, **weight: Any) -> bool:
    """Whether one kernel is to multiply rows ``[M, K]`` or ``[E, M, K]`` by matrices of `n` rows each: because it
    is faster, or because a CUDA graph is captured. `weight` is as for `prefers_one_kernel`."""
    problem = {"m": x.shape[-2], "n": n, "k": x.shape[-1], "experts": experts, "masked": x.ndim == 3, **weight}
    problem["dtype"] = str(torch.bfloat16 if by_float8 else x.dtype).removeprefix("torch.")
    # Rows in 8 bits are converted first, to rows that follow each other.
    problem["has_gaps"] = not by_float8 and x.ndim == 3 and x.stride(0) != x.shape[1] * x.stride(1)
    prefers = prefers_one_kernel(by_float8=by_float8, device=x.device.index or 0, **problem)
    return prefers or torch.cuda.is_current_stream_capturing()
