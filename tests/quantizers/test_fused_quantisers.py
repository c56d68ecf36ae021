"""rms_norm_quant and silu_and_mul_quant against float64, within their stated bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from fp8_reference import FLOATS, SMALLEST, codes_of

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}
SHAPES = [(1, 1), (3, 17), (2, 5, 100), (33, 576), (2, 4095), (65, 256), (1, 16384), (1, 40000)]
CHOICES: list[dict[str, Any]] = [
    {"dtype": INT8},
    {"dtype": INT8, "pad_to": 16},
    {"dtype": FP8},
    {"dtype": FP8, "ue8m0": True, "pad_to": 24},
    {"dtype": FP8, "granularity": "group"},
    {"dtype": FP8, "granularity": "group", "group_size": 64, "scale_layout": "column"},
    {"dtype": FP8, "granularity": "group", "group_size": 48, "ue8m0": True},
]


def normalised(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Tensor:
    """In float64; the sum as it is returned, in x's dtype."""
    x = x.cpu() if residual is None else (x.cpu().float() + residual.cpu().float()).to(x.dtype)
    row = x.double()
    return row / (row.square().mean(-1, keepdim=True) + eps).sqrt() * weight.cpu().double()


# GPT-OSS's, DeepSeek-V4's, a limit that only float32 represents, and each of the others alone.
GATES: list[dict[str, float]] = [
    {"alpha": 1.702, "limit": 7.0, "offset": 1.0},
    {"limit": 10.0},
    {"limit": 3.3, "offset": -0.7},
    {"alpha": 1.702},
    {"alpha": 0.25, "offset": 1.0},
]


def gated(
    x: Tensor, alpha: float = 1.0, limit: float = math.inf, offset: float = 0.0, interleaved: bool = False
) -> Tensor:
    """In float64, with float32's alpha, limit and offset."""
    alpha, limit, offset = torch.tensor([alpha, limit, offset]).tolist()
    gate, up = parts_of(x, interleaved)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + offset)


def parts_of(x: Tensor, interleaved: bool = False) -> tuple[Tensor, ...]:
    x = x.cpu().double()
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.split(x.shape[-1] // 2, -1)


def moved_by(
    x: Tensor, alpha: float = 1.0, limit: float = math.inf, offset: float = 0.0, interleaved: bool = False
) -> Tensor:
    """What a gate may change by, relatively, since float32 rounds the product of alpha and the gate."""
    product = alpha * parts_of(x, interleaved)[0].clamp(max=limit)
    is_exact = math.frexp(alpha)[0] == 0.5
    return torch.zeros_like(product) if is_exact else 2.0**-24 * product.abs()


def step_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between codes around a value in units of the scale."""
    if dtype == INT8:
        return torch.ones_like(values)
    exponent = torch.floor(torch.log2(values.abs().clamp(min=2.0**-6)))
    return torch.exp2(exponent - 3)


def assert_close(values: Tensor, q: Tensor, scale: Tensor, choice: dict[str, Any], moved: Tensor | float = 0.0) -> None:
    """The scale within 2^-20, or a factor of two where it lies on a power of two; q within one step of its value;
    with values moved by that much, relatively, more."""
    columns, dtype = values.shape[-1], choice["dtype"]
    group = choice.get("group_size", 128) if choice.get("granularity") == "group" else max(columns, 1)
    parts = values.split(group, -1)
    expected = torch.cat([part.abs().amax(-1, keepdim=True) for part in parts], -1) / LARGEST[dtype]
    expected = expected.clamp(min=float(SMALLEST))
    scale = scale.cpu().double()
    most = 2.0**-20 + float(torch.as_tensor(moved).max())
    assert scale.shape == expected.shape
    if choice.get("ue8m0"):
        assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
        ratio = scale / expected
        assert (ratio >= 1 - most).all() and (ratio <= 2 * (1 + most)).all()
    else:
        assert ((scale / expected - 1).abs() <= most).all()
    assert q.dtype == dtype and q.shape[:-1] == values.shape[:-1]
    assert (codes_of(q)[..., columns:] == 0).all()
    over_scale = values / scale.repeat_interleave(group, -1)[..., :columns]
    over_scale = over_scale.clamp(-LARGEST[dtype], LARGEST[dtype])
    error = (q.cpu()[..., :columns].double() - over_scale).abs()
    # Half a step from rounding, and what fp32 may move a value by before it; a subnormal one by two of the smallest.
    smallest = 2.0**-148 / scale.repeat_interleave(group, -1)[..., :columns]
    assert (error <= 0.5 * step_of(over_scale, dtype) + (2.0**-19 + moved) * over_scale.abs() + smallest).all()


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(seed: int, device: str, shape: tuple[int, ...], with_residual: bool, x_dtype: torch.dtype) -> None:
    x, residual = ((3 * torch.randn(shape)).to(x_dtype).to(device) for _ in range(2))
    weight = (torch.rand(shape[-1]) + 0.5).to(x_dtype).to(device)
    expected = normalised(x, weight, 1e-5, residual if with_residual else None)
    for choice in CHOICES:
        if with_residual:
            q, scale, total = epiloq.rms_norm_quant(x, weight, 1e-5, residual=residual, **choice)
            assert torch.equal(total, (x.float() + residual.float()).to(x_dtype))
        else:
            q, scale = epiloq.rms_norm_quant(x, weight, 1e-5, **choice)
        assert_close(expected, q, scale, choice)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_mul(seed: int, device: str, shape: tuple[int, ...], x_dtype: torch.dtype) -> None:
    x = (4 * torch.randn(*shape[:-1], 2 * shape[-1])).to(x_dtype).to(device)
    expected = gated(x)
    for choice in CHOICES:
        q, scale = epiloq.silu_and_mul_quant(x, **choice)
        assert_close(expected, q, scale, choice)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_gates(seed: int, device: str, shape: tuple[int, ...], x_dtype: torch.dtype) -> None:
    x = (4 * torch.randn(*shape[:-1], 2 * shape[-1])).to(x_dtype).to(device)
    for gate in GATES:
        expected, moved = gated(x, **gate), moved_by(x, **gate)
        for choice in CHOICES:
            q, scale = epiloq.silu_and_mul_quant(x, **gate, **choice)
            assert_close(expected, q, scale, choice, moved)


@given(st.integers(1, 40), st.floats(-30, 30), st.integers(0, 2**31))
@settings(max_examples=80)
def test_any_magnitude(columns: int, exponent: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(3, 2 * columns) * 2.0**exponent, torch.rand(2 * columns)
    for choice in CHOICES:
        q, scale = epiloq.rms_norm_quant(x, weight, 1e-12, **choice)
        assert_close(normalised(x, weight, 1e-12), q, scale, choice)
    x[:, :columns].clamp_(min=-80)  # Below -88 float32's exponential ends: see the next test.
    for choice in CHOICES:
        q, scale = epiloq.silu_and_mul_quant(x, **choice)
        assert_close(gated(x), q, scale, choice)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [0.0, 1e-12])
def test_norms_at_the_ends_of_float32(
    seed: int, device: str, eps: float, x_dtype: torch.dtype, choice: dict[str, Any]
) -> None:
    """Rows, groups and weights so large or small that x * weight leaves float32, though the norm does not."""
    for columns, more in ((512, 0), (512, -45), (512, 60), (4096, -100), (500, -126), (2048, 66), (9216, -98)):
        # The sum of the squares stays within float32, and their mean a normal number where nothing is added to it.
        most = 57 if columns <= 4096 else 55
        exponents = torch.tensor(
            [-55, -30, -1, 0, most] if eps == 0 else [-140, -126, -110, -100, -60, -1, 0, 40, most]
        )
        x, residual = (
            torch.ldexp(torch.randn(len(exponents), columns), exponents.view(-1, 1)).to(x_dtype).to(device)
            for _ in range(2)
        )
        weight = torch.rand(columns) + 0.5
        small = slice(0, columns // 2 if more != -98 else columns)
        weight[small] = torch.ldexp(weight[small], torch.tensor(more))
        weight = weight.to(x_dtype).to(device)
        for added in (None, residual):
            q, scale = epiloq.rms_norm_quant(x, weight, eps, residual=added, **choice)[:2]
            assert_close(normalised(x, weight, eps, added), q, scale, choice)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_many_rows(seed: int, x_dtype: torch.dtype) -> None:
    """Plans of many rows: two and four vectors a thread; test_many_narrow_rows has those of one."""
    for shape in ((2300, 512), (2300, 1024), (2200, 2048), (300, 4096)):
        x, residual = ((3 * torch.randn(shape)).to(x_dtype).cuda() for _ in range(2))
        weight = (torch.rand(shape[1]) + 0.5).to(x_dtype).cuda()
        gates = torch.cat([x, residual], -1)
        expected = [normalised(x, weight, 1e-5, added) for added in (None, residual)]
        for choice in (CHOICES[0], CHOICES[4]):
            for values, added in zip(expected, (None, residual), strict=True):
                q, scale = epiloq.rms_norm_quant(x, weight, 1e-5, residual=added, **choice)[:2]
                assert_close(values, q, scale, choice)
            assert_close(gated(gates), *epiloq.silu_and_mul_quant(gates, **choice), choice)
            for gate in GATES[:2]:
                q, scale = epiloq.silu_and_mul_quant(gates, **gate, **choice)
                assert_close(gated(gates, **gate), q, scale, choice, moved_by(gates, **gate))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_many_narrow_rows(seed: int, x_dtype: torch.dtype) -> None:
    """A warp each and several a block, of which the last is not full; nothing is written after them."""
    for shape in ((2999, 8), (3001, 256), (2202, 1000)):
        x, residual = ((3 * torch.randn(shape)).to(x_dtype).cuda() for _ in range(2))
        weight = (torch.rand(shape[1]) + 0.5).to(x_dtype).cuda()
        x[5], x[6, 3] = 0, math.inf
        if x_dtype != torch.float16:
            for tensor in (x, residual):
                tensor[7] *= 2.0**-118  # goes the long way as row 6 does, beside others that do not
        for choice in CHOICES[:5]:
            options = {name: value for name, value in choice.items() if name != "pad_to"}
            new = epiloq.rms_norm_quant(x, weight, 1e-5, residual=residual, **choice)
            memory = torch.full((shape[0] + 8, new[0].shape[1]), 99, dtype=torch.int8, device="cuda")
            q = memory[: shape[0]].view(choice["dtype"])
            outputs = (q, torch.full_like(new[1], math.nan), torch.full_like(x, math.nan))
            epiloq.rms_norm_quant(x, weight, 1e-5, residual=residual, out=outputs, **options)
            assert (memory[shape[0] :] == 99).all()
            for one, other in zip(new, outputs, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            finite = torch.arange(shape[0], device="cuda") != 6
            expected = normalised(x[finite], weight, 1e-5, residual[finite])
            assert_close(expected, new[0][finite], new[1][finite], choice)
            gates = torch.cat([x[finite], residual[finite]], -1)
            assert_close(gated(gates), *epiloq.silu_and_mul_quant(gates, **choice), choice)
            q, scale = epiloq.silu_and_mul_quant(gates, limit=2.0, offset=0.5, **choice)
            assert_close(gated(gates, limit=2.0, offset=0.5), q, scale, choice)


def test_gates_that_close(device: str) -> None:
    """Down to where silu vanishes, and up to where it is the identity."""
    gate = torch.tensor([-1000.0, -100.0, -89.0, -88.0, -87.0, -20.0, -1.0, -0.0, 0.0, 1.0, 20.0, 89.0, 1000.0])
    for part in (gate[:2], gate[3:4], gate[4:5], gate[5:9], gate[9:12], gate):
        x = torch.cat([part, torch.full_like(part, 3.0)]).to(device)
        q, scale = epiloq.silu_and_mul_quant(x, dtype=FP8)
        assert scale.isfinite().all() and not q.float().isnan().any()
        restored = q.cpu().double() * scale.cpu().double()
        assert (restored - gated(x)).abs().max() <= gated(x).abs().max() / 16 + 1e-37


Operation = Callable[..., tuple[Tensor, ...]]


def rms(x: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    return epiloq.rms_norm_quant(x, torch.ones(x.shape[-1], device=x.device, dtype=x.dtype), **kwargs)


OPERATIONS: list[Operation] = [rms, epiloq.silu_and_mul_quant]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("choice", CHOICES[::2])
def test_zeros_and_what_is_not_finite(seed: int, device: str, operation: Operation, choice: dict[str, Any]) -> None:
    x = torch.randn(5, 512, device=device)
    x[0], x[1, 7], x[2, 9] = 0, math.nan, math.inf
    q, scale = operation(x, **choice)
    assert (q.float()[0] == 0).all() and (scale[0] == float(SMALLEST)).all()
    together = choice.get("group_size", 128) if "granularity" in choice else q.shape[1]
    for row in (1, 2):
        restored = q.float()[row, : min(together, 256)] * scale[row, 0]
        assert restored.isnan().any() and not scale[row, 0].isfinite()
        # A NaN is in the sum that all of its row is divided by; an infinity there leaves 0 of the others.
        spreads = operation is rms and row == 1
        assert (scale[row, 1:].isnan() if spreads else scale[row, 1:].isfinite()).all()
    clean_q, clean_scale = operation(x[3:], **choice)
    assert torch.equal(scale[3:], clean_scale) and torch.equal(codes_of(q[3:]), codes_of(clean_q))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 8), (0,)])
def test_empty(device: str, operation: Operation, shape: tuple[int, ...]) -> None:
    for choice in CHOICES:
        q, scale = operation(torch.empty(shape, device=device), **choice)
        assert q.shape[:-1] == shape[:-1] and (codes_of(q) == 0).all() and scale.isfinite().all()


@pytest.mark.parametrize("choice", CHOICES)
def test_out(seed: int, device: str, choice: dict[str, Any]) -> None:
    options = {name: value for name, value in choice.items() if name in ("dtype", "granularity", "group_size", "ue8m0")}
    x, residual = (torch.randn(9, 512, device=device).half() for _ in range(2))
    weight = torch.rand(512, device=device).half()
    expected = epiloq.rms_norm_quant(x, weight, residual=residual, **choice)
    memory = torch.full((9, 640), 99, dtype=torch.int8, device=device).view(choice["dtype"])
    out = (memory[:, :520], torch.full_like(expected[1], math.nan), residual.clone())
    in_place = epiloq.rms_norm_quant(x, weight, residual=out[2], out=out, **options)
    assert in_place is out
    assert torch.equal(codes_of(out[0])[:, :512], codes_of(expected[0])[:, :512])
    assert (codes_of(out[0])[:, 512:] == 0).all() and (codes_of(memory)[:, 520:] == 99).all()
    assert torch.equal(out[1], expected[1]) and torch.equal(out[2], expected[2])
    for gate in ({}, GATES[0]):
        q, scale = epiloq.silu_and_mul_quant(x, **gate, **choice)
        pair = (memory[:, :264], torch.full_like(scale, math.nan))
        assert epiloq.silu_and_mul_quant(x, out=pair, **gate, **options) is pair
        assert torch.equal(codes_of(pair[0])[:, :256], codes_of(q)[:, :256]) and torch.equal(pair[1], scale)


@pytest.mark.parametrize("choice", CHOICES)
def test_strided_rows(seed: int, device: str, choice: dict[str, Any]) -> None:
    wide = torch.randn(40, 640, device=device).bfloat16()
    for view in (wide[:, 64:576], wide[::2, 8:520], wide[:, 3:515], wide.view(5, 8, 640)[..., :512]):
        for operation in OPERATIONS:
            q, scale = operation(view, **choice)
            expected_q, expected_scale = operation(view.contiguous(), **choice)
            values = normalised(view, torch.ones(512)) if operation is rms else gated(view)
            assert_close(values, q, scale, choice)
            assert_close(values, expected_q, expected_scale, choice)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES)
def test_gpu_is_near_the_cpu_and_repeats(seed: int, choice: dict[str, Any]) -> None:
    """Scales within 2^-20 and codes one step apart at most, few of them; the same bits each time."""
    for columns in (576, 4096, 4095, 14336):
        x, weight = torch.randn(65, 2 * columns).bfloat16(), (torch.rand(2 * columns) + 0.5).bfloat16()
        # Weights of one leave many values of x half-way between two codes, where the last bit decides.
        norm = partial(epiloq.rms_norm_quant, **choice), (x, weight)
        for operation, operands in (norm, (partial(epiloq.silu_and_mul_quant, **choice), (x,))):
            cpu_q, cpu_scale = operation(*operands)
            q, scale = operation(*(operand.cuda() for operand in operands))
            again = operation(*(operand.cuda() for operand in operands))
            assert torch.equal(codes_of(q), codes_of(again[0])) and torch.equal(scale, again[1])
            if not choice.get("ue8m0"):
                torch.testing.assert_close(scale.cpu(), cpu_scale, rtol=2.0**-20, atol=0)
                assert (codes_of(q) != codes_of(cpu_q)).double().mean() < 1e-3
                codes = [part.cpu().int() if part.dtype == INT8 else codes_of(part).int() for part in (q, cpu_q)]
                assert (codes[0] - codes[1]).abs().max() <= 1  # of one sign, FP8's codes count upwards from zero


def test_explain(device: str) -> None:
    x = torch.randn(4, 256, device=device)
    for name, args in (("rms_norm_quant", (x, x[0])), ("silu_and_mul_quant", (x,))):
        assert ("one pass" if device == "cuda" else "cpu") in epiloq.explain(name, *args)
    words = epiloq.explain("rms_norm_quant", x[:, :100], x[0, :100])
    assert ("several passes" if device == "cuda" else "cpu") in words
