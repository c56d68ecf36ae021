"""quantize_fp8 against the definition."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import epiloq
from fp8_reference import (
    FLOATS,
    FORMATS,
    GRANULARITIES,
    NAN_CODE,
    SMALLEST,
    assert_defined,
    codes_of,
    nearest_codes,
    parts,
)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 100), (131, 576), (2, 4095), (2, 16384)])
def test_dynamic(
    seed: int, shape: tuple[int, ...], granularity: str, dtype: torch.dtype, x_dtype: torch.dtype, device: str
) -> None:
    x = (torch.randn(shape) * torch.randn(shape[-1]).exp()).to(x_dtype).to(device)
    if granularity == "block":
        x = x.reshape(-1, shape[-1])
    for g, pad_to, ue8m0 in ((128, 1, False), (64, 16, True), (48, 7, False)):
        q, scale = epiloq.quantize_fp8(
            x, granularity=granularity, group_size=g, dtype=dtype, pad_to=pad_to, ue8m0=ue8m0
        )
        assert q.dtype == dtype and q.shape == (*x.shape[:-1], -(-shape[-1] // pad_to) * pad_to)
        groups = -(-shape[-1] // g)
        assert (
            scale.shape
            == {
                "tensor": (1,),
                "token": (*x.shape[:-1], 1),
                "group": (*x.shape[:-1], groups),
                "block": (-(-x.shape[0] // g), groups),
            }[granularity]
        )
        assert_defined(x, q, scale, granularity, g, ue8m0)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
@settings(max_examples=200)
def test_any_finite_row(row: np.ndarray) -> None:
    """All of float32: subnormals, huge ranges, zeros; values come back within half of their codes' spacing."""
    x = torch.from_numpy(row)[None]
    for dtype, mantissa_bits, smallest in ((FORMATS[0], 3, 2.0**-9), (FORMATS[1], 2, 2.0**-16)):
        q, scale = epiloq.quantize_fp8(x, granularity="token", dtype=dtype)
        assert_defined(x, q, scale, "token", 0)
        error = (q.double() * scale.double() - x.double()).abs()
        spacing = torch.maximum(x.double().abs() * 2.0**-mantissa_bits, smallest * scale.double())
        assert (error <= 0.500001 * spacing).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_half_and_every_code(seed: int, device: str, dtype: torch.dtype) -> None:
    """Scale 1: torch's conversion of every clamped float16, and of float32 beside every middle between two codes."""
    one, largest = torch.ones(1, device=device), torch.finfo(dtype).max
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    middles = (codes[1:] + codes[:-1]) / 2
    around = torch.cat([middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1]), codes])
    for x in (halves, halves.float(), torch.cat([around, -around])):
        q, _ = epiloq.quantize_fp8(x.to(device), scale=one, dtype=dtype)
        expected = x.float().clamp(-largest, largest).to(dtype).view(torch.uint8)
        expected[x.isnan()] = NAN_CODE
        assert torch.equal(codes_of(q), expected)
        assert (codes_of(q)[x.isnan()] == NAN_CODE).all()


def test_power_of_two_scales(seed: int, device: str) -> None:
    """Rounded up, and not where they are one already; q is what the rounded scale makes."""
    exponents = torch.arange(-126, 100, device=device).double()
    for factor in (1.0, 1 + 2.0**-20, 1.5, 2 - 2.0**-20):
        x = (448 * factor * torch.exp2(exponents)).float()[:, None]
        q, scale = epiloq.quantize_fp8(x, granularity="token", ue8m0=True)
        assert torch.equal(scale.double()[:, 0], torch.exp2(exponents + (factor > 1)))
        static, _ = epiloq.quantize_fp8(x, granularity="token", scale=scale)
        assert torch.equal(codes_of(q), codes_of(static))


def test_bounds_of_amax(seed: int, device: str) -> None:
    """The floors and the upper bound as vLLM and DeepGEMM have them, to the bit."""
    x = torch.randn(40, 256, device=device) * torch.logspace(-9, 3, 40, device=device)[:, None]
    x[3] = 0
    # On the CPU, for torch's CUDA kernels multiply by the reciprocal of a number that they are to divide by.
    amax = x.abs().amax(-1, keepdim=True).cpu()
    upper = torch.tensor([1.75])
    bound = upper.to(device)
    vllm_token = torch.maximum(torch.minimum(amax, upper) / 448, torch.tensor(1 / (448 * 512)))
    for kwargs, on_cpu in (
        ({"scale_ub": bound, "eps": 1 / 512}, vllm_token),
        ({"eps": 1e-4}, amax.clamp(min=1e-4) / 448),
        ({"eps": 1e-10}, amax.clamp(min=1e-10) / 448),
        ({"scale_ub": bound}, torch.minimum(amax, upper).div(448).clamp(min=float(SMALLEST))),
    ):
        q, scale = epiloq.quantize_fp8(x, granularity="token", **kwargs)
        expected = on_cpu.to(device)
        assert torch.equal(scale, expected)
        assert torch.equal(q.float(), (x / expected).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    q, scale = epiloq.quantize_fp8(x, scale_ub=bound)
    assert torch.equal(scale.cpu(), torch.minimum(amax.max(), upper) / 448)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros(device: str, granularity: str) -> None:
    x = torch.zeros(130, 256, device=device)
    x[:, 200:] = -0.0
    q, scale = epiloq.quantize_fp8(x, granularity=granularity)
    assert (scale == float(SMALLEST)).all()
    assert (codes_of(q)[:, :200] == 0).all() and (codes_of(q)[:, 200:] == 128).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_non_finite_parts(seed: int, device: str, bad: float, dtype: torch.dtype, ue8m0: bool) -> None:
    """Everything computed from them is NaN, as a float product's would be; other parts are untouched."""
    x = torch.randn(256, 512, device=device)
    kwargs: dict[str, Any] = {"dtype": dtype, "ue8m0": ue8m0}
    wrong = x.clone()
    wrong[130, 140] = bad
    for granularity, place in (("token", (130, 0)), ("group", (130, 1)), ("block", (1, 1)), ("tensor", (0,))):
        q, scale = epiloq.quantize_fp8(x, granularity=granularity, **kwargs)
        wrong_q, wrong_scale = epiloq.quantize_fp8(wrong, granularity=granularity, **kwargs)
        bad_scale = wrong_scale[place].item()
        assert math.isnan(bad_scale) if math.isnan(bad) else bad_scale == math.inf
        same = torch.ones_like(scale, dtype=torch.bool)
        same[place] = False
        assert torch.equal(wrong_scale[same], scale[same])
        differs = codes_of(wrong_q) != codes_of(q)
        rows, cols, _ = next(part for part in parts(256, 512, granularity, 128) if part[2] == place)
        assert (codes_of(wrong_q)[130, 140] == NAN_CODE).all()
        restored = wrong_q.float()[rows, cols] * bad_scale
        assert restored.isnan().all()
        differs[rows, cols] = False
        assert not differs.any()


def test_static_values_that_are_not_finite(device: str) -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]], device=device)
    q, _ = epiloq.quantize_fp8(x, scale=torch.tensor([0.5], device=device))
    assert codes_of(q).tolist() == [[NAN_CODE, 0x7E, 0xFE, 0x40]]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_static(seed: int, device: str, granularity: str) -> None:
    x = torch.randn(200, 300, device=device)
    _, scale = epiloq.quantize_fp8(x, granularity=granularity)
    scale = scale * 1.37
    q, same = epiloq.quantize_fp8(x, granularity=granularity, scale=scale, pad_to=16)
    assert same is scale and q.shape == (200, 304) and (codes_of(q)[:, 300:] == 0).all()
    spread = scale
    if granularity in ("group", "block"):
        spread = spread.repeat_interleave(128, 1)[:, :300]
    if granularity == "block":
        spread = spread.repeat_interleave(128, 0)[:200]
    expected = nearest_codes((x / spread).cpu().numpy(), torch.float8_e4m3fn)
    np.testing.assert_array_equal(codes_of(q)[:, :300].numpy(), expected)


def test_column_layout(seed: int, device: str) -> None:
    for shape in ((7, 300), (8, 128), (1, 1000), (2, 3, 5, 256), (17,)):
        x = torch.randn(shape, device=device)
        q, scale = epiloq.quantize_fp8(x, granularity="group")
        column_q, column = epiloq.quantize_fp8(x, granularity="group", scale_layout="column")
        rows = math.prod(shape[:-1])
        assert column.shape == scale.shape and torch.equal(column, scale)
        assert torch.equal(codes_of(q), codes_of(column_q))
        assert column.stride(-1) == -(-rows // 4) * 4
        assert column.reshape(rows, -1).stride(0) == 1 or rows == 1 or column.shape[-1] == 1
        # Given back as a static scale, that layout is read as it lies.
        again, _ = epiloq.quantize_fp8(x, granularity="group", scale=column)
        assert torch.equal(codes_of(again), codes_of(q))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...], granularity: str) -> None:
    if granularity == "block" and len(shape) != 2:
        return
    q, scale = epiloq.quantize_fp8(torch.empty(shape, device=device), granularity=granularity, pad_to=16)
    assert q.shape[:-1] == shape[:-1] and (codes_of(q) == 0).all() and scale.isfinite().all()
    if granularity == "tensor":
        assert scale.item() == SMALLEST


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_out(seed: int, device: str, granularity: str) -> None:
    x = torch.randn(130, 300, device=device, dtype=torch.float16)
    q, scale = epiloq.quantize_fp8(x, granularity=granularity)
    wide = torch.full((130, 320), 99, dtype=torch.uint8, device=device)
    out = (wide.view(torch.float8_e4m3fn)[:, :308], torch.full_like(scale, math.nan))
    assert epiloq.quantize_fp8(x, granularity=granularity, out=out) is out
    assert torch.equal(codes_of(out[0])[:, :300], codes_of(q)) and torch.equal(out[1], scale)
    assert (wide[:, 300:308] == 0).all() and (wide[:, 308:] == 99).all()
    wide.fill_(99)
    epiloq.quantize_fp8(x, granularity=granularity, scale=scale, out=(out[0], scale))
    assert torch.equal(codes_of(out[0])[:, :300], codes_of(q)) and (wide[:, 308:] == 99).all()


def test_explain(device: str) -> None:
    x = torch.randn(256, 512, device=device)
    words = {epiloq.explain("quantize_fp8", x, granularity=name) for name in GRANULARITIES}
    assert len(words) == (1 if device == "cpu" else 3)
    ok, reason = epiloq.supports("quantize_fp8", x.to(torch.float64))
    assert not ok and "x: expected" in reason
