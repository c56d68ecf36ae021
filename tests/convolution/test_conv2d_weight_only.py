"""Convolutions with low-bit weights against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import conv_reference
import epiloq
from conv_reference import Packed, Place
from reference import poisoned, ulp

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WEIGHT_ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def image(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Tensor:
    """``[B, H, W, C]`` made, ``[B, C, H, W]`` in channels_last memory given."""
    return torch.randn(shape).to(dtype).to(device).permute(0, 3, 1, 2)


def assert_close(
    out: Tensor,
    x: Tensor,
    w: Packed,
    bias: Tensor | None,
    place: Place,
    clamp: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    """docs/numerics.md's bound; where the GPU dequantises, weights are rounded to x's dtype."""
    pixels = x.permute(0, 2, 3, 1)
    offset = torch.zeros(1, dtype=torch.float64) if bias is None else bias.double().cpu()
    exact = (conv_reference.sums(pixels, w.exact, place) + offset).clamp(*clamp)
    terms = conv_reference.sums(pixels.abs(), w.exact.abs(), place) + offset.abs()
    products = w.exact[0].numel() if w.exact.numel() else 1
    limit = ulp(exact, out.dtype) + 2.0**-23 * math.sqrt(products) * terms + 2.0**-22 * terms
    if x.is_cuda:
        limit += WEIGHT_ROUNDING[x.dtype] * terms
    error = (out.permute(0, 2, 3, 1).double().cpu() - exact).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    assert (error <= limit).all(), f"worst element {float((error / limit).max()):.2f} times the bound"


def run(x: Tensor, w: Packed, bias: Tensor | None, place: Place, **options: Any) -> Tensor:
    out = epiloq.conv2d_weight_only(x, w.packed, bias, **place.arguments, **options)
    assert out.dtype == x.dtype and out.permute(0, 2, 3, 1).is_contiguous()
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "zero", "offset"])
@pytest.mark.parametrize("group_size", [-1, 32, 64])
def test_blocks_and_zeros(seed: int, device: str, bits: int, zeros: str, group_size: int) -> None:
    for dtype, channels, kernel in itertools.product(DTYPES, (3, 32, 48, 100), ((1, 1), (3, 3))):
        w = conv_reference.packed(17, kernel, channels, bits, group_size, zeros, device=device)
        x, bias = image((2, 6, 5, channels), dtype, device), torch.randn(17, device=device).to(dtype)
        place = Place(padding=(kernel[0] // 2,) * 4)
        assert_close(run(x, w, bias, place), x, w, bias, place)


@pytest.mark.parametrize(("stride", "padding", "dilation"), list(itertools.product((1, 2), (0, 2), (1, 2))))
@pytest.mark.parametrize("groups", [1, 2, 16])
def test_every_geometry(seed: int, device: str, stride: int, padding: int, dilation: int, groups: int) -> None:
    place = Place((stride, stride), (padding,) * 4, (dilation, dilation), groups)
    for kernel, dtype in itertools.product(((1, 1), (3, 3), (2, 5)), DTYPES):
        w = conv_reference.packed(32, kernel, 16 // groups, 4, 8, device=device)
        x = image((1, 11, 12, 16), dtype, device)
        assert_close(run(x, w, None, place, clamp=(0.0, 6.0)), x, w, None, place, (0.0, 6.0))


@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**31))
def test_any_problem(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    draw = data.draw
    groups, channels = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    place = Place(draw(pair), draw(st.tuples(*(st.integers(0, 2) for _ in range(4)))), draw(pair), groups)
    size = (draw(st.integers(1, 8)), draw(st.integers(1, 8)))
    bits, group_size = draw(st.sampled_from((2, 3, 4, 8))), draw(st.sampled_from((-1, 8, 16)))
    w = conv_reference.packed(groups * draw(st.integers(0, 4)), kernel, channels, bits, group_size)
    x = image((draw(st.integers(0, 2)), *size, groups * channels), torch.float32, "cpu")
    if draw(st.booleans()):
        x = x.contiguous()
    if place.fits(size, kernel):
        assert_close(run(x, w, None, place), x, w, None, place)
    else:
        with pytest.raises(ValueError, match=r"conv2d_weight_only: x: expected a (height|width) of at least"):
            run(x, w, None, place)


def test_dequantize_is_the_weight(seed: int, device: str) -> None:
    for channels, kernel, group_size in ((1, (3, 3), -1), (24, (3, 2), 16), (24, (1, 1), 16), (5, (2, 2), -1)):
        for zeros in ("none", "zero", "offset"):
            w = conv_reference.packed(9, kernel, channels, 4, group_size, zeros, device=device)
            restored = w.packed.dequantize().permute(0, 2, 3, 1).double().cpu()
            assert (restored - w.exact).abs().max() <= 2.0**-23 * 2
            assert w.packed.shape == w.exact.shape


def test_out_and_memory_orders(seed: int, device: str) -> None:
    w = conv_reference.packed(8, (3, 3), 6, 8, -1, device=device)
    x = image((2, 7, 6, 6), torch.float32, device)
    expected = run(x, w, None, Place())
    for other in (x.contiguous(), x.flip(3).flip(3), torch.cat([x, x], 1)[:, :6]):
        assert torch.equal(run(other, w, None, Place()), expected)
    out = poisoned((2, 5, 4, 8), torch.float32, device).permute(0, 3, 1, 2)
    assert epiloq.conv2d_weight_only(x, w.packed, out=out) is out
    assert torch.equal(out, expected)


def test_nan_stays_where_it_is(device: str) -> None:
    w = conv_reference.packed(8, (3, 3), 4, 8, -1, device=device)
    x = image((1, 7, 7, 4), torch.float32, device)
    x[0, 1, 3, 3] = math.nan
    out = run(x, w, None, Place(padding=(1, 1, 1, 1)), clamp=(0.0, 6.0))
    touched = out.isnan()[0].all(0)
    expected = torch.zeros(7, 7, dtype=torch.bool, device=device)
    expected[2:5, 2:5] = True
    assert torch.equal(touched, expected) and torch.equal(out.isnan()[0].any(0), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(seed: int, device: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    w = conv_reference.packed(8, (3, 3), 16, 4, 8, device=device).packed

    def f(x: Tensor) -> Tensor:
        return epiloq.conv2d_weight_only(x, w, stride=2, padding=1, clamp=(0.0, math.inf))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 9, 8, 16), (1, 5, 11, 16)):
        x = image(shape, torch.float32, device)
        assert torch.equal(compiled(x), f(x)) and compiled(x).stride() == f(x).stride()


def test_explain_names_the_product() -> None:
    w = conv_reference.packed(16, (1, 1), 32, 4, 32).packed
    x = image((1, 4, 4, 32), torch.float32, "cpu")
    assert "product" in epiloq.explain("conv2d_weight_only", x, w)
    assert "product" not in epiloq.explain("conv2d_weight_only", x, w, stride=2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(6, 6, 4)}, r"x: expected \[B, Ci, H, W\], got \[6, 6, 4\]"),
    ({"x": torch.zeros(1, 5, 6, 7)}, r"x: expected 4 channels .*got \[1, 5, 6, 7\]"),
    ({"x": torch.zeros(1, 4, 0, 7)}, r"x: expected an image of at least one pixel, got \[1, 4, 0, 7\]"),
    ({"out": image((1, 5, 6, 8), torch.float32, "cpu")}, r"out: expected \[1, 8, 4, 4\], got \[1, 8, 5, 6\]"),
    ({"out": image((1, 4, 4, 8), torch.float16, "cpu")}, r"out: expected .*float32, got .*float16 \[1, 8, 4, 4\]"),
    ({"x": torch.zeros(1, 4, 6, 6, dtype=torch.float64)}, r"x: expected torch\.float32 or .*float64 \[1, 4, 6, 6\]"),
    ({"out": torch.zeros(1, 8, 4, 4)}, r"out: expected channels_last .*\[1, 8, 4, 4\] .*memory_format=torch.channels"),
    ({"bias": torch.zeros(7)}, r"bias: expected shape \[8\]"),
    ({"bias": torch.zeros(8).half()}, "bias: expected float32"),
    ({"groups": 3}, "groups: expected a divisor of 8"),
    ({"clamp": (1.0, 0.0)}, r"clamp: expected \(lo, hi\) with lo <= hi"),
    ({"dilation": 4}, "x: expected a height of at least 9"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text[:30] for _, text in WRONG])
def test_errors(change: dict[str, Any], text: str) -> None:
    call: dict[str, Any] = {
        "x": torch.zeros(1, 4, 6, 6),
        "weight": conv_reference.packed(8, (3, 3), 4, 4, -1).packed,
    }
    with pytest.raises(ValueError, match=text):
        epiloq.conv2d_weight_only(**{**call, **change})


def test_errors_of_packing() -> None:
    q, scale = torch.zeros(8, 3, 3, 16, dtype=torch.int8), torch.ones(8, 3, 3, 2)
    for arguments, numbers, text in (
        ((q[0], scale), (4, 8), r"q: expected \[Co, Kh, Kw"),
        ((q, scale), (4, 12), "group_size: expected -1 or a multiple of 8"),
        ((q, scale), (4, -1), r"scale: expected \[8\]"),
        ((q, scale), (5, 8), "bits"),
        ((q + 8, scale), (4, 8), "q: expected values from -8 to 7"),
        ((q, scale, scale.int(), scale), (4, 8), "offset: expected None with zero"),
        ((q[..., :1] + 8, scale[:, 0, 0, 0]), (4, -1), "q: expected values from -8 to 7"),
    ):
        with pytest.raises(ValueError, match=text):
            epiloq.pack_conv2d_weight(*arguments, bits=numbers[0], group_size=numbers[1])
    with pytest.raises(TypeError, match="weight: expected a PackedConv2dWeight"):
        epiloq.conv2d_weight_only(torch.zeros(1, 1, 1, 1), q)  # type: ignore[arg-type]


def test_autocast_changes_nothing(seed: int, device: str) -> None:
    for kernel in ((1, 1), (3, 3)):
        w = conv_reference.packed(16, kernel, 24, 3, 8, device=device)
        x = image((1, 9, 8, 24), torch.float32, device)
        expected = run(x, w, None, Place())
        with torch.autocast(device, dtype=torch.bfloat16):
            assert torch.equal(run(x, w, None, Place()), expected)
            assert torch.is_autocast_enabled(device)
