"""Requantisation against float64, one product at a time: ties, cancellation, NaN, sums as long as they may be."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

import epiloq
from conv_arguments import conv2d_int8
from conv_reference import assert_float_close, int8_problem


@pytest.mark.parametrize("zero", [-128, -3, 0, 126])
def test_rounding_at_every_tie(device: str, zero: int) -> None:
    """acc / 4 for every acc in reach: each tie, its neighbours, and both ends, with and without a clamp."""
    acc = torch.arange(-2100, 2101)
    # 16 a + b, |b| <= 8: two channels make every sum.
    high = torch.div(acc + 8, 16, rounding_mode="floor")
    x = torch.stack((high.clamp(-128, 127), acc - 16 * high.clamp(-128, 127)), 1)
    keep = (x.abs() <= 127).all(1)
    acc, x = acc[keep], x[keep].to(torch.int8).to(device)
    weight = torch.tensor([[16, 1]], dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    for clamp in (None, (-9.0, 20.0), (0.0, math.inf)):
        out = epiloq.requantized_mm(
            x, weight, input_scale=1.0, input_zero=0, weight_scale=one, output_scale=4.0, output_zero=zero, clamp=clamp
        )
        real = acc.double() / 4 if clamp is None else (acc.double().clamp(*clamp)) / 4
        expected = (torch.round(real) + zero).clamp(-128, 127)
        assert torch.equal(out.flatten().cpu().double(), expected)
    assert len(set(acc.tolist())) > 4000


def test_next_to_ties(seed: int, device: str) -> None:
    """Multipliers that put sums within a few units of fp32's last place of a tie: decided as float64 does."""
    target = torch.randint(-120, 120, (4096,)).double() + 0.5
    acc = torch.randint(1000, 16000, (4096,))
    scale = (target / acc).float()
    near = torch.tensor([-2, -1, 0, 1, 2], dtype=torch.int32).repeat(820)[:4096]
    scale = (scale.view(torch.int32) + near).view(torch.float32)
    x = torch.tensor([[125, 1]], dtype=torch.int8)
    weight = torch.stack((acc // 125, acc % 125), 1).to(torch.int8)
    out = epiloq.requantized_mm(
        x.to(device), weight.to(device), input_scale=1.0, weight_scale=scale.to(device), output_scale=1.0
    )
    expected = torch.round(scale.double() * acc).clamp(-128, 127)
    assert torch.equal(out.flatten().cpu().double(), expected)


def test_cancelling_bias(seed: int, device: str) -> None:
    """A bias far larger than the result, where fp32 would lose the result."""
    acc = torch.randint(-16000, 16000, (2048,))
    weight = torch.stack((torch.div(acc, 125, rounding_mode="floor"), acc % 125), 1).to(torch.int8)
    scale = torch.rand(2048) * 1000 + 100
    bias = (-scale.double() * acc + torch.rand(2048) * 200 - 100).float()
    x = torch.tensor([[125, 1]], dtype=torch.int8)
    out = epiloq.requantized_mm(
        x.to(device),
        weight.to(device),
        bias.to(device),
        input_scale=1.0,
        weight_scale=scale.to(device),
        output_scale=1.0,
    )
    expected = torch.round(scale.double() * acc + bias.double()).clamp(-128, 127)
    assert torch.equal(out.flatten().cpu().double(), expected)


def test_nan_and_infinity(device: str) -> None:
    x = torch.ones(1, 2, dtype=torch.int8, device=device)
    weight = torch.tensor([[1, 1], [1, 1], [-1, -1], [1, 1]], dtype=torch.int8, device=device)
    scale = torch.tensor([math.nan, math.inf, math.inf, 1.0], device=device)
    numbers = {"input_scale": 1.0, "weight_scale": scale}
    out = epiloq.requantized_mm(x, weight, output_scale=1.0, output_zero=7, **numbers)
    assert out.tolist() == [[7, 127, -128, 9]]
    real = epiloq.requantized_mm(x, weight, out_dtype=torch.float32, **numbers)
    assert real[0, 0].isnan() and real[0, 1:].tolist() == [math.inf, -math.inf, 2.0]


@pytest.mark.parametrize("shape", [(100,), (3, 100), (2, 5, 100), (0, 100), (2, 0, 100)])
def test_requantized_mm(seed: int, device: str, shape: tuple[int, ...]) -> None:
    p = int8_problem((1, 1, math.prod(shape[:-1]), shape[-1]), 33, (1, 1), device=device)
    out = epiloq.requantized_mm(p.x.view(shape), p.weight[:, 0, 0], p.bias, **p.scales, **p.output)
    assert out.shape == (*shape[:-1], 33)
    if out.numel():
        assert torch.equal(out.cpu().double().flatten(), p.requantized().flatten())


def test_long_sums(seed: int, device: str) -> None:
    """Sums past 2^24, and the largest that are taken, whose true value nearly fills int32."""
    p = int8_problem((1, 1, 2, 8192), 3, (1, 1), device=device)
    p.x.fill_(127)
    p.weight.fill_(-128)
    reference, terms = p.real()
    assert_float_close(conv2d_int8(p.x, p.weight, p.bias, **p.scales, out_dtype=torch.float32), reference, terms)
    k = 65793
    x = torch.full((1, k), -128, dtype=torch.int8, device=device)
    weight = torch.full((1, k), -128, dtype=torch.int8, device=device)
    numbers = {"input_scale": 1.0, "input_zero": 127, "weight_scale": torch.ones(1, device=device)}
    out = epiloq.requantized_mm(x, weight, out_dtype=torch.float32, **numbers)
    assert float(out) == float(torch.tensor(255.0 * 128 * k))
    x, weight = (torch.zeros(1, k + 1, dtype=torch.int8, device=device) for _ in range(2))
    with pytest.raises(ValueError, match="weight: expected at most 65793 values"):
        epiloq.requantized_mm(x, weight, out_dtype=torch.float32, **numbers)


def test_empty_inputs_are_checked() -> None:
    weight, call = torch.ones(3, 4, dtype=torch.int8), {"input_scale": 0.1, "weight_scale": torch.ones(1)}
    x = torch.zeros(0, 2, 4, dtype=torch.int8)
    assert epiloq.requantized_mm(x, weight, output_scale=0.1, **call).shape == (0, 2, 3)
    assert epiloq.requantized_mm(x, weight, out_dtype=torch.float16, **call).dtype == torch.float16
    with pytest.raises(ValueError, match="x_q: expected int8"):
        epiloq.requantized_mm(x.float(), weight, output_scale=0.1, **call)
    with pytest.raises(ValueError, match="out_dtype: expected"):
        epiloq.requantized_mm(x, weight, out_dtype=torch.int64, **call)
    with pytest.raises(ValueError, match="output_scale: expected one"):
        epiloq.requantized_mm(x, weight, **call)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (16,), (0, 16)], ids=str)
def test_written_outputs(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> None:
    """Dense, beside other columns, of several dimensions, and of no row; what lies between the rows is left alone."""
    x = torch.randint(-100, 100, shape, dtype=torch.int8, device=device)
    weight = torch.randint(-100, 100, (24, 16), dtype=torch.int8, device=device)
    numbers: Any = {"input_scale": 0.01, "weight_scale": torch.ones(1, device=device)}
    numbers |= {"output_scale": 0.5} if dtype == torch.int8 else {}
    expected = epiloq.requantized_mm(x, weight, **numbers, out_dtype=dtype)
    for before, after in ((0, 0), (16, 8)):
        whole = torch.full((*shape[:-1], before + 24 + after), 7, dtype=dtype, device=device)
        out = whole[..., before : before + 24]
        assert epiloq.requantized_mm(x, weight, **numbers, out=out) is out
        assert torch.equal(out, expected)
        assert (whole[..., :before] == 7).all() and (whole[..., before + 24 :] == 7).all()
    torch._dynamo.reset()
    compiled = torch.compile(partial(epiloq.requantized_mm, **numbers), backend="aot_eager", fullgraph=True)
    out = torch.zeros_like(expected)
    assert torch.equal(compiled(x, weight, out=out), expected) and torch.equal(out, expected)
    found = epiloq.explain("requantized_mm", x, weight, **numbers, out=out)
    assert ("output is empty" in found) == (0 in shape)
    assert epiloq.supports("requantized_mm", x, weight, **numbers, out_dtype=dtype)[0]


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (torch.zeros(4, 24), r"expected \[5, 24\], got \[4, 24\]"),
        (torch.zeros(24, 5).t(), "expected rows with stride 1"),
        (torch.zeros(1, 24).expand(5, 24), "expected"),
        (
            torch.zeros(5, 24, dtype=torch.float64),
            "expected torch.int8, float16, bfloat16 or float32, got torch.float64",
        ),
        (torch.zeros(5, 24, requires_grad=True), "expected no tensor that requires grad"),
        (torch.zeros(5, 24, device="meta"), "expected a tensor on cpu"),
    ],
)
def test_refused_outputs(out: torch.Tensor, text: str) -> None:
    x, weight = torch.ones(5, 16, dtype=torch.int8), torch.ones(24, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=rf"epiloq\.requantized_mm: out: {text}"):
        epiloq.requantized_mm(x, weight, input_scale=1.0, weight_scale=torch.ones(1), out=out)
