"""rms_norm and silu_and_mul against float64, within their stated bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_fused_quantisers import GATES, SHAPES, gated, moved_by, normalised
from torch import Tensor

import epiloq
from fp8_reference import FLOATS

# Kernels of one and two vectors a thread at the sizes of decoding, and of four and of one warp a row at many rows.
GPU_SHAPES = [(1, 2048), (2, 1, 4096), (16, 8192), (16, 16384), (300, 4096), (2300, 512), (2200, 2048), (3001, 264)]
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def assert_rounded(values: Tensor, y: Tensor, dtype: torch.dtype, lost: Tensor | float = 0.0) -> None:
    """y is a float64 value, moved by at most 2^-19 of it and `lost`, and then rounded once."""
    assert y.dtype == dtype and y.shape == values.shape
    moved = 2.0**-19 * values.abs() + lost
    half_unit = torch.finfo(dtype).eps / 2
    bound = moved + half_unit * (values.abs() + moved) + SMALLEST[dtype] / 2
    overflows = values.abs() > torch.finfo(dtype).max * (1 + half_unit)
    error = (y.cpu().double() - values).abs()
    assert (error <= bound)[~overflows].all() and y.cpu()[overflows].isinf().all()


def operands(shape: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype, device: str) -> tuple[Tensor, ...]:
    x, residual = ((3 * torch.randn(shape)).to(dtype).to(device) for _ in range(2))
    return x, residual, (torch.rand(shape[-1]) + 0.5).to(weight).to(device)


def shapes(device: str) -> list[tuple[int, ...]]:
    return SHAPES + (GPU_SHAPES if device == "cuda" else [])


@pytest.mark.parametrize("float_weight", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norm(seed: int, device: str, dtype: torch.dtype, float_weight: bool) -> None:
    for shape in shapes(device):
        x, residual, weight = operands(shape, dtype, torch.float32 if float_weight else dtype, device)
        assert_rounded(normalised(x, weight, 1e-5), epiloq.rms_norm(x, weight, 1e-5), dtype)
        y, total = epiloq.rms_norm(x, weight, 1e-5, residual=residual)
        assert torch.equal(total, (x.float() + residual.float()).to(dtype))
        assert_rounded(normalised(x, weight, 1e-5, residual), y, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gate(seed: int, device: str, dtype: torch.dtype) -> None:
    for shape in shapes(device):
        x = (4 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype).to(device)
        assert_rounded(gated(x), epiloq.silu_and_mul(x), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_other_gates(seed: int, device: str, dtype: torch.dtype, interleaved: bool) -> None:
    for shape in shapes(device):
        x = (4 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype).to(device)
        for gate in ({}, *GATES):
            assert_gated(x, epiloq.silu_and_mul(x, **gate, interleaved=interleaved), gate, interleaved)


def assert_gated(x: Tensor, y: Tensor, gate: dict[str, float], interleaved: bool = False) -> None:
    values = gated(x, **gate, interleaved=interleaved)
    assert_rounded(values, y, x.dtype, moved_by(x, **gate, interleaved=interleaved) * values.abs())


@pytest.mark.parametrize("dtype", FLOATS)
def test_options_that_change_nothing(seed: int, device: str, dtype: torch.dtype) -> None:
    """The same bits, also the sign of zero."""
    for columns in (256, 257):
        x = 4 * torch.randn(33, 2 * columns)
        x[3, ::3], x[4], x[5, ::2] = 0.0, -0.0, 1e-6
        x = x.to(dtype).to(device)
        y = epiloq.silu_and_mul(x)
        assert y[4].signbit().logical_not().all() and y[3].signbit().any()
        pairs = torch.stack(x.chunk(2, -1), -1).flatten(-2)
        large = {"alpha": 1, "limit": 1000, "offset": 0}
        for options in ({}, large, large | {"offset": -0.0}):
            assert equal_bits(epiloq.silu_and_mul(x, **options), y)
            assert equal_bits(epiloq.silu_and_mul(pairs, **options, interleaved=True), y)
        for dtype_of_q in (torch.int8, torch.float8_e4m3fn):
            expected = epiloq.silu_and_mul_quant(x, dtype=dtype_of_q)
            found = epiloq.silu_and_mul_quant(x, dtype=dtype_of_q, **large)
            assert all(map(equal_bits, found, expected))


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_alpha_of_a_power_of_two(seed: int, device: str) -> None:
    """Scaling gates by it changes exponents only."""
    x = torch.randn(17, 512, device=device)
    gate, up = x.chunk(2, -1)
    for alpha in (0.5, 4.0):
        expected = epiloq.silu_and_mul(torch.cat([alpha * gate, up], -1)) / alpha
        assert torch.equal(epiloq.silu_and_mul(x, alpha=alpha), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gates_that_close(device: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1000.0, -100.0, -89.0, -88.0, -87.0, -20.0, -1.0, -0.0, 0.0, 1.0, 20.0, 89.0, 1000.0])
    for up in (3.0, -(2.0**14), 2.0**100):
        if up > torch.finfo(dtype).max:
            continue
        x = torch.cat([gate, torch.full_like(gate, up)]).to(dtype).to(device)
        # Below -88 float32's exponential ends.
        lost = torch.where(gate.double() < -88, 2.0**-121 * abs(up), 0.0)
        assert_rounded(gated(x), epiloq.silu_and_mul(x), dtype, lost)
        for alpha in (0.125, 2.0):
            lost = torch.where(alpha * gate.double() < -88, 2.0**-121 / alpha * abs(up), 0.0)
            assert_rounded(gated(x, alpha), epiloq.silu_and_mul(x, alpha=alpha), dtype, lost)


def test_what_subnormal_numbers_lose(seed: int, device: str) -> None:
    """docs/numerics.md: 2^-150 of what the subnormal intermediate result is multiplied by."""
    tiny = torch.randint(-(2**24), 2**24, (8, 64)).double() * 2.0**-149
    tiny[0] = torch.arange(-32, 32) * 2.0**-149
    gate = tiny.float()
    for up in (1.0, 3.0, -1e10, 1e38):
        x = torch.cat([gate, torch.full_like(gate, up)], -1).to(device)
        assert_rounded(gated(x), epiloq.silu_and_mul(x), torch.float32, 2.0**-150 * abs(up))
    for factor in (0.4, 1.0, 1e20):
        weight = torch.full((64,), factor).to(device)
        for eps in (1e-12, 1e-5):
            x = (gate * 2.0**-10).to(device)
            y = epiloq.rms_norm(x, weight, eps)
            assert_rounded(normalised(x, weight, eps), y, torch.float32, 2.0**-150 * weight.cpu().double())


def test_what_is_not_finite(seed: int, device: str) -> None:
    """As torch's norm and activation; other rows do not notice."""
    x, weight = torch.randn(4, 512, device=device), torch.rand(512, device=device) + 0.5
    x[0], x[1, 7], x[2, 9] = 0, math.nan, math.inf
    y = epiloq.rms_norm(x, weight)
    expected = torch.rms_norm(x, weight.shape, weight, 1e-6)
    assert torch.equal(y.isnan(), expected.isnan()) and (y[0] == 0).all() and y[1].isnan().all()
    assert torch.equal(y[3:], epiloq.rms_norm(x[3:], weight))
    gate, up = x.split(256, -1)
    result = epiloq.silu_and_mul(x)
    assert torch.equal(result.isnan(), (torch.nn.functional.silu(gate) * up).isnan()) and result[2, 9].isinf()
    x[3, 7], x[3, 261], x[3, 8] = math.nan, math.inf, -math.inf
    for interleaved in (False, True):
        for options in GATES:
            result = epiloq.silu_and_mul(x, **options, interleaved=interleaved)
            values = gated(x, **options, interleaved=interleaved)
            assert torch.equal(result.isnan().cpu(), values.isnan())
            assert torch.equal(result.isinf().cpu(), values.isinf())
    huge = torch.full((2, 64), 1e30, device=device)  # whose squares float32 does not represent
    assert (epiloq.rms_norm(huge, torch.ones(64, device=device)) == 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=device)
    y, total = epiloq.rms_norm(x, torch.ones(shape[-1], device=device), residual=x)
    assert y.shape == total.shape == shape
    for interleaved in (False, True):
        assert epiloq.silu_and_mul(torch.cat([x, x], -1), limit=7.0, interleaved=interleaved).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_strided_rows(seed: int, device: str, dtype: torch.dtype) -> None:
    """Written rows are the same bits, and nothing beside them is written."""
    wide = torch.randn(40, 640, device=device).to(dtype)
    weight = (torch.rand(512, device=device) + 0.5).to(dtype)
    for view in (wide[:, 64:576], wide[::2, 8:520], wide[:, 3:515], wide.view(5, 8, 640)[..., :512]):
        for given in (None, view.flip(0)):
            memory = torch.full((*view.shape[:-1], 520), 99.0, device=device, dtype=dtype)
            out: Any = memory[..., :512]
            if given is None:
                assert epiloq.rms_norm(view, weight, out=out) is out
            else:
                residual = given.clone()
                both = (out, residual)
                assert epiloq.rms_norm(view, weight, residual=residual, out=both) is both
                assert torch.equal(residual, view + given)
            assert_rounded(normalised(view, weight, 1e-6, given), out, dtype)
            assert (memory[..., 512:] == 99).all()
        for gate, interleaved in (({}, False), (GATES[0], False), (GATES[0], True)):
            memory = torch.full((*view.shape[:-1], 264), 99.0, device=device, dtype=dtype)
            out = memory[..., :256]
            assert epiloq.silu_and_mul(view, **gate, interleaved=interleaved, out=out) is out
            assert_gated(view, out, gate, interleaved)
            assert (memory[..., 256:] == 99).all()


def test_compiled_and_exported_gates(seed: int, device: str) -> None:
    """Graphs do not hold the infinity of a default limit."""

    class Gates(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            plain, gate = epiloq.silu_and_mul(x), epiloq.silu_and_mul(x, **GATES[0], interleaved=True)
            return plain, gate, *epiloq.silu_and_mul_quant(x), *epiloq.silu_and_mul_quant(x, **GATES[0])

    x = torch.randn(5, 64, device=device)
    expected, out = Gates()(x), torch.empty(5, 32, device=device)
    exported = torch.export.export(Gates(), (x,))
    assert not any(math.inf in node.args for node in exported.graph.nodes)
    for function in (torch.compile(Gates(), fullgraph=True, backend="aot_eager"), exported.module()):
        assert all(map(torch.equal, function(x), expected))
    into = torch.compile(lambda x, out: epiloq.silu_and_mul(x, limit=2.0, out=out), fullgraph=True, backend="aot_eager")
    assert torch.equal(into(x, out), epiloq.silu_and_mul(x, limit=2.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_behind_and_before_other_kernels(seed: int, dtype: torch.dtype) -> None:
    """Programmatic dependent launch: the norm waits for what writes its input and its weight, and is waited for."""
    if dtype == torch.float32:
        pytest.skip("weight_only_mm on CUDA multiplies 16-bit activations")
    layer = epiloq.quantize_(torch.nn.Sequential(torch.nn.Linear(4096, 4096, device="cuda", dtype=dtype)), "w4a16-g128")
    x = torch.randn(1, 4096, device="cuda", dtype=dtype)
    with torch.no_grad():
        for _ in range(50):
            product = layer(x)
            weight = layer(x.flip(-1)).view(-1)  # written by the kernel just before the norm that reads it
            y, total = epiloq.rms_norm(product, weight, residual=x)
            after = layer(y)
            assert_rounded(normalised(product, weight, 1e-6, x), y, dtype)
            assert torch.equal(total, product + x) and torch.equal(after, layer(y.clone()))
            x = (total / total.float().square().mean().sqrt()).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_repeats_and_is_captured(seed: int, dtype: torch.dtype) -> None:
    x, residual, weight = operands((16, 4096), dtype, dtype, "cuda")

    def both() -> tuple[Tensor, ...]:
        gates = epiloq.silu_and_mul(x), epiloq.silu_and_mul(x, **GATES[0], interleaved=True)
        return (*epiloq.rms_norm(x, weight, residual=residual), *gates)

    expected, graph = both(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))


def test_explain(device: str) -> None:
    x = torch.randn(4, 256, device=device)
    words = {"rms_norm": "one pass", "silu_and_mul": "eight elements at a time"}
    for interleaved in (False, True):
        explained = epiloq.explain("silu_and_mul", x, limit=7, interleaved=interleaved)
        assert (words["silu_and_mul"] if device == "cuda" else "cpu") in explained
    for name, args in (("rms_norm", (x, x[0])), ("silu_and_mul", (x,))):
        assert (words[name] if device == "cuda" else "cpu") in epiloq.explain(name, *args)
    assert "cpu" in epiloq.explain("rms_norm", x, x[0], residual=x) or device == "cuda"


X, W = torch.ones(4, 16), torch.ones(16)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("rms_norm", (X, torch.ones(15)), {}, r"weight: expected shape \[16\]"),
    ("rms_norm", (X, W.half()), {}, "weight: expected float32, got float16"),
    ("rms_norm", (X.half(), W.bfloat16()), {}, "weight: expected float16 or float32, got bfloat16"),
    ("rms_norm", (X.int(), W), {}, "x: expected float32 or float16 or bfloat16"),
    ("rms_norm", (torch.ones(16, 4).t(), W), {}, "x: expected row-major"),
    ("rms_norm", (torch.tensor(1.0), W), {}, "x: expected at least one dimension"),
    ("rms_norm", (X, W, -1.0), {}, "eps: expected a finite number of at least 0"),
    ("rms_norm", (X, W, "a"), {}, "eps: expected"),
    ("rms_norm", (X, W), {"residual": torch.ones(3, 16)}, "residual: expected x's shape"),
    ("rms_norm", (X, W), {"residual": X.half()}, "residual: expected float32"),
    ("rms_norm", (X, W), {"out": (X, X)}, "out: expected one tensor, got 2 elements"),
    ("rms_norm", (X, W), {"residual": X, "out": X.clone()}, r"out: expected \(y, residual_out\), got Tensor"),
    ("rms_norm", (X, W), {"residual": X, "out": (X,)}, r"out: expected \(y, residual_out\), got 1 elements"),
    ("rms_norm", (X, W), {"out": X}, "out: expected memory apart from x's"),
    ("rms_norm", (X, W), {"residual": X, "out": (X.clone(), X[:, :16])}, "residual_out: expected memory apart"),
    ("silu_and_mul", (torch.ones(4, 15),), {}, "x: expected an even number of columns"),
    ("silu_and_mul", (torch.tensor(1.0),), {}, "x: expected at least one dimension"),
    ("silu_and_mul", (X,), {"out": X}, "out: expected"),
    ("silu_and_mul", (X,), {"alpha": -1.0}, "alpha: expected a positive finite number, got -1"),
    ("silu_and_mul", (X,), {"alpha": math.inf}, "alpha: expected a positive finite number, got inf"),
    ("silu_and_mul", (X,), {"alpha": math.nan}, "alpha: expected a positive finite number, got nan"),
    ("silu_and_mul", (X,), {"limit": 0.0}, "limit: expected a positive number, got 0"),
    ("silu_and_mul", (X,), {"limit": -math.inf}, "limit: expected a positive number, got -inf"),
    ("silu_and_mul", (X,), {"limit": math.nan}, "limit: expected a positive number, got nan"),
    ("silu_and_mul", (X,), {"limit": None}, "limit: expected a number, got None"),
    ("silu_and_mul", (X,), {"offset": math.nan}, "offset: expected a finite number, got nan"),
    ("silu_and_mul", (X,), {"interleaved": "no"}, "interleaved: expected True or False, got 'no'"),
    ("silu_and_mul", (X,), {"alpha": 0, "out": X[:, :8].clone()}, "alpha: expected a positive finite number"),
    ("silu_and_mul", (X,), {"out": X[:, :8]}, "out: expected memory apart from x's"),
    ("silu_and_mul", (X,), {"out": torch.ones(4, 8).half()}, "out: expected float32"),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "message"), BAD)
def test_bad_arguments_are_named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"epiloq.{name}: {message}"):
        getattr(epiloq, name)(*args, **kwargs)


@pytest.mark.parametrize("operation", [lambda x: epiloq.rms_norm(x, W, residual=x)[0], epiloq.silu_and_mul])
def test_no_gradient(operation: Callable[..., Any]) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        operation(x).sum().backward()
