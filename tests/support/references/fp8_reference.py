"""FP8 quantisation from its definition, for the tests."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
GRANULARITIES = ["tensor", "token", "group", "block"]
SMALLEST = np.finfo(np.float32).tiny
NAN_CODE = 0x7F


def nearest_codes(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The codes of the nearest values of `dtype`, by looking through all of them; a tie takes the even code."""
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double().numpy()
    codes = codes[np.isfinite(codes)]
    middles = (codes[1:] + codes[:-1]) / 2
    magnitudes = np.minimum(np.abs(values.astype(np.float64)), codes[-1])
    below = np.searchsorted(middles, magnitudes, side="left")
    at_middle = (below < len(middles)) & (magnitudes == middles[np.minimum(below, len(middles) - 1)])
    below = below + (at_middle & (below % 2 == 1))
    return np.where(np.isnan(values), NAN_CODE, below | (np.signbit(values) << 7)).astype(np.uint8)


def define_part(x: np.ndarray, dtype: torch.dtype, ue8m0: bool = False) -> tuple[np.ndarray, np.float32]:
    """What shares one scale, all finite, in float32 arithmetic."""
    largest = np.float32(torch.finfo(dtype).max)
    scale = max(np.abs(x).max(initial=0) / largest, SMALLEST)
    if ue8m0:
        scale = np.float32(2.0 ** math.ceil(math.log2(float(scale))))
        assert scale >= np.abs(x).max(initial=0) / largest > scale / 2 or scale == SMALLEST
    with np.errstate(under="ignore"):
        return nearest_codes(x / scale, dtype), scale


def parts(rows: int, cols: int, granularity: str, g: int) -> list[tuple[slice, slice, tuple[int, ...]]]:
    """The rows and columns of each part that shares a scale, and the scale's place."""
    if granularity == "tensor":
        return [(slice(rows), slice(cols), (0,))]
    if granularity == "token":
        return [(slice(i, i + 1), slice(cols), (i, 0)) for i in range(rows)]
    high = g if granularity == "block" else 1
    return [
        (slice(i, i + high), slice(j, j + g), (i // high, j // g))
        for i in range(0, rows, high)
        for j in range(0, cols, g)
    ]


def codes_of(q: Tensor) -> Tensor:
    return q.cpu().view(torch.uint8)


def assert_defined(x: Tensor, q: Tensor, scale: Tensor, granularity: str, g: int, ue8m0: bool = False) -> None:
    values = x.float().cpu().reshape(-1, x.shape[-1]).numpy()
    codes = codes_of(q).reshape(-1, q.shape[-1]).numpy()
    scales = scale.cpu().reshape(-1, scale.shape[-1]).numpy() if granularity != "tensor" else scale.cpu().numpy()
    for rows, cols, place in parts(*values.shape, granularity, g):
        expected, expected_scale = define_part(values[rows, cols], q.dtype, ue8m0)
        assert scales[place] == expected_scale
        np.testing.assert_array_equal(codes[:, : values.shape[1]][rows, cols], expected)
    assert (codes[:, values.shape[1] :] == 0).all()


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    if a.element_size() == 1:
        return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def awkward_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Normal rows, zeros of both signs, constants, tiny and huge values, NaN and infinities."""
    x = torch.randn(rows, columns)
    x[0] = 0
    x[1] = -0.0
    x[2] = 3.25
    x[3] *= 1e-6
    x[4] *= 1e4
    x[5, columns // 2] = math.nan
    x[6, 0] = math.inf
    x[7, -1] = -math.inf
    x[8] = torch.finfo(dtype).tiny / 4
    x[9] = torch.finfo(dtype).max
    x[10, ::2] = 0
    x[11] *= torch.exp2(-20 * torch.rand(columns))
    x[12] = x[12].abs() * torch.finfo(dtype).tiny
    return x.to(dtype)
