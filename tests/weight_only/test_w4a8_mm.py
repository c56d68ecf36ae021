"""w4a8_mm against float64: 8-bit activations by 4-bit weights."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from reference import poisoned, ulp
from w4a8_reference import (
    ACTIVATIONS,
    KINDS,
    assert_close,
    make_activations,
    make_problem,
    run_and_assert_close,
)
from weight_reference import make_weight

operation = importlib.import_module("epiloq.ops.w4a8_mm")
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
def test_groups_and_kinds(seed: int, device: str, group_size: int, kind: str, activations: torch.dtype) -> None:
    for m, dtype in itertools.product((1, 5, 17, 130), HALVES):
        problem = make_problem(m, 100, 576, group_size, kind, activations, bias=dtype, device=device)
        run_and_assert_close(problem, dtype)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (17, 100), (100, 17), (16, 128), (33, 4095), (1029, 33), (520, 1040), (264, 640)]
)
def test_sizes(seed: int, device: str, n: int, k: int, activations: torch.dtype) -> None:
    for m in (1, 8, 17, 33, 70):
        bias = torch.bfloat16 if m % 2 else None
        run_and_assert_close(
            make_problem(m, n, k, 128, "zero", activations, bias=bias, device=device), bias or torch.float16
        )


@settings(max_examples=60)
@given(
    m=st.integers(1, 80),
    n=st.integers(1, 300),
    k=st.integers(1, 700),
    group_size=st.one_of(st.sampled_from([-1, 32, 64, 128, 256]), st.integers(1, 800)),
    kind=st.sampled_from(KINDS),
    activations=st.sampled_from(ACTIVATIONS),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    options=st.tuples(st.booleans(), st.booleans()),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_product(
    m: int,
    n: int,
    k: int,
    group_size: int,
    kind: str,
    activations: torch.dtype,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    options: tuple[bool, bool],
    draw: int,
) -> None:
    torch.manual_seed(draw)
    act_order, bias = options
    more: Any = {"bias": dtype if bias else None, "scale_dtype": scale_dtype, "act_order": act_order}
    run_and_assert_close(make_problem(m, n, k, group_size, kind, activations, **more), dtype)


@pytest.mark.parametrize("m", [3, 40])
def test_int8_is_exact_where_every_number_is_an_integer(seed: int, m: int) -> None:
    """With scales of powers of two fp32 holds every sum: not a bit may be lost."""
    q, zero = torch.randint(0, 16, (70, 1000)), torch.randint(0, 17, (70, 8))
    scale = torch.randint(-3, 4, (70, 8)).float().exp2()
    weight = epiloq.pack_weight(q, scale, zero, bits=4, group_size=128)
    x = make_activations(m, 1000, torch.int8)
    y = epiloq.w4a8_mm(x, weight, torch.full((m, 1), 0.5), out_dtype=torch.float32)
    group = torch.arange(1000) // 128
    exact = 0.5 * (x.double() @ (scale.double()[:, group] * (q - zero[:, group])).t())
    assert torch.equal(y.double(), exact)


def test_long_rows_of_int8_do_not_overflow(seed: int) -> None:
    """A channel's group of 20,000 columns, whose sums leave what fp32 holds exactly."""
    weight = epiloq.pack_weight(torch.full((16, 20000), -8), torch.ones(16, 1), bits=4, group_size=-1)
    x = torch.full((20, 20000), -128, dtype=torch.int8)
    x[:, 0] = 1
    y = epiloq.w4a8_mm(x, weight, torch.ones(1), out_dtype=torch.float32)
    assert (y == float(torch.tensor(19999 * 1024 - 8, dtype=torch.float32))).all()


@pytest.mark.parametrize("many", [False, True])
def test_by_way_of_bfloat16_as_on_a_gpu(seed: int, many: bool) -> None:
    """The arithmetic of CUDA, on the CPU: every 8-bit number is a bfloat16 number, and the result is rounded twice."""
    problem = make_problem(140 if many else 9, 70, 640, 128, "zero", bias=torch.float16)
    every = torch.arange(256, dtype=torch.uint8)
    for numbers in (every.view(torch.int8), every.view(torch.float8_e4m3fn)):
        assert torch.equal(numbers.bfloat16().float().nan_to_num(), numbers.float().nan_to_num())
    out = torch.empty(len(problem.x_q), 70, dtype=torch.float16)
    operation._by_weight_only(out, *problem.arguments, torch.bfloat16)
    exact, size = problem.exact()
    assert ((out.double() - exact).abs() <= ulp(exact, out.dtype) + 2.0**-8 * exact.abs() + 2.0**-8 * size).all()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (7, 1)])
def test_scales_of_tokens(seed: int, device: str, shape: tuple[int, ...]) -> None:
    problem = make_problem(7, 40, 256, device=device)
    scale = torch.rand(shape, device=device) + 0.5
    problem.scale_a = scale.reshape(-1, 1).expand(7, 1)
    y = epiloq.w4a8_mm(problem.x_q, problem.weight.packed, scale)
    assert_close(y, problem)
    three = epiloq.w4a8_mm(
        problem.x_q.view(1, 7, 256), problem.weight.packed, scale.view(1, 7, 1) if scale.numel() == 7 else scale
    )
    assert torch.equal(three[0], y)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, 3:67], lambda x: x[::2, :64], lambda x: x[1:, 1:65], lambda x: x[0, :64], lambda x: x[:0, :64]],
)
def test_views(seed: int, device: str, view: Callable[[Tensor], Tensor], activations: torch.dtype) -> None:
    problem = make_problem(1, 40, 64, 32, device=device)
    x = view(make_activations(40, 80, activations, device))
    problem.x_q, problem.scale_a = x, torch.rand((*x.shape[:-1], 1), device=device)
    y = epiloq.w4a8_mm(x, problem.weight.packed, problem.scale_a)
    assert y.shape == (*x.shape[:-1], 40) and y.is_contiguous()
    assert_close(y, problem)
    wide = poisoned((*x.shape[:-1], 50), torch.bfloat16, device)
    epiloq.w4a8_mm(x, problem.weight.packed, problem.scale_a, out=wide[..., 4:44])
    assert torch.equal(wide[..., 4:44], y)
    assert wide[..., :4].isnan().all() and wide[..., 44:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 20, 64), (3, 0, 64), (3, 20, 0), (30, 20, 0)])
def test_empty(device: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for activations in ACTIVATIONS:
        problem = make_problem(m, n, k, 32, "symmetric", activations, bias=torch.bfloat16, device=device)
        y = epiloq.w4a8_mm(*problem.arguments)
        assert problem.bias is not None
        assert y.shape == (m, n) and torch.equal(y, problem.bias.expand(m, n))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 2, 20])
def test_nan_stays_where_it_is(seed: int, device: str, m: int, activations: torch.dtype) -> None:
    problem = make_problem(m, 50, 256, 128, "zero", activations, device=device)
    x, row, scale_a = problem.x_q, m // 2, problem.scale_a.clone()
    clean = epiloq.w4a8_mm(*problem.arguments)
    others = [other for other in range(m) if other != row]
    if activations != torch.int8:
        x = x.clone()
        x[row, 200] = math.nan
        y = epiloq.w4a8_mm(x, problem.weight.packed, scale_a)
        assert torch.equal(y[others], clean[others]) and y[row].isnan().all()
    scale_a[row] = math.nan
    y = epiloq.w4a8_mm(problem.x_q, problem.weight.packed, scale_a)
    assert torch.equal(y[others], clean[others]) and y[row].isnan().all()
    scale, w = problem.weight.scale.clone(), problem.weight
    scale[7, 1] = math.nan
    packed = epiloq.pack_weight(w.q, scale, w.zero, bits=4, group_size=128)
    y = epiloq.w4a8_mm(problem.x_q, packed, problem.scale_a)
    assert y[:, 7].isnan().all() and torch.equal(y[:, :7], clean[:, :7]) and torch.equal(y[:, 8:], clean[:, 8:])


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_large_m_is_processed_in_chunks(seed: int, activations: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(150, 40, 256, 64, "zero", activations, bias=torch.float32)
    monkeypatch.setattr(operation, "_AT_ONCE", 1 << 14)
    assert_close(epiloq.w4a8_mm(*problem.arguments, out_dtype=torch.float32), problem)


def test_compiles_whole(seed: int, device: str) -> None:
    problem = make_problem(1, 40, 100, 32, "zero", bias=torch.float16, act_order=True, device=device)
    weight, bias = problem.weight.packed, problem.bias

    def f(x: Tensor) -> Tensor:
        q, scale = epiloq.quantize_fp8(x, granularity="token")
        return epiloq.w4a8_mm(q, weight, scale, bias, out_dtype=torch.float16) * 2

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (2, 5, 40):
        x = torch.randn(m, 100, device=device).half()
        assert torch.equal(compiled(x), f(x))


def test_no_gradient(seed: int) -> None:
    problem = make_problem(3, 20, 64, 32)
    scale = problem.scale_a.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"epiloq\.w4a8_mm has no gradient"):
        epiloq.w4a8_mm(problem.x_q, problem.weight.packed, scale).sum().backward()


def call(**changes: Any) -> dict[str, Any]:
    problem = make_problem(3, 20, 64, 32, bias=torch.float16)
    valid = dict(zip(("x_q", "weight", "scale_a", "bias"), problem.arguments, strict=True))
    return {**valid, "out": torch.zeros(3, 20).half(), **changes}


OTHER = make_problem(3, 20, 64, 32)
SHARED = torch.zeros(3 * 64, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_q": OTHER.x_q[:, :63]}, "x_q: expected 64 columns"),
        ({"x_q": torch.randn(3, 64).half()}, "x_q: expected int8 or float8_e4m3fn, got float16"),
        ({"x_q": OTHER.x_q.to(torch.float8_e5m2)}, "x_q: expected int8 or float8_e4m3fn"),
        ({"x_q": OTHER.x_q.t().contiguous().t()}, "x_q: expected row-major"),
        ({"x_q": torch.zeros(4, 6, 64, dtype=torch.int8)[:, :3]}, "x_q: expected leading dimensions that collapse"),
        ({"x_q": torch.zeros((), dtype=torch.int8)}, "x_q: expected"),
        ({"scale_a": torch.ones(4, 1)}, r"scale_a: expected float32, one element or one for each of 3 rows"),
        ({"scale_a": torch.ones(1, 3)}, "scale_a: expected float32"),
        ({"scale_a": torch.ones(3, 1).double()}, "scale_a: expected float32"),
        ({"scale_a": torch.ones(3, 1, device="meta")}, "scale_a: expected a tensor with values on cpu"),
        ({"bias": torch.randn(21).half()}, r"bias: expected the output's torch.float16 \[20\]"),
        ({"bias": torch.randn(20)}, "bias: expected the output's torch.float16"),
        ({"out": torch.zeros(3, 20).double()}, "out: expected float16, bfloat16"),
        ({"out": torch.zeros(3, 21).half()}, "out: expected x_q's leading dimensions and 20 columns"),
        ({"out": torch.zeros(1, 20).half().expand(3, 20)}, "out: expected rows that do not overlap"),
        ({"out": None, "out_dtype": torch.int8}, "out_dtype: expected float16, bfloat16 or float32"),
        ({"weight": OTHER.weight.packed.to("meta")}, "weight.q: expected a tensor with values on cpu"),
        ({"weight": make_weight(20, 64, 8).packed}, "weight: expected 4 bits, got 8"),
        ({"weight": make_weight(20, 64, 4, 32, "offset").packed}, "weight.offset: expected None"),
        ({"x_q": SHARED.view(3, 64), "out": SHARED.view(torch.float16)[:60].view(3, 20)}, "out: expected memory apart"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    given = call(**changes)
    before = given["out"].clone() if given["out"] is not None else None
    with pytest.raises(ValueError, match=f"^epiloq.w4a8_mm: {message}"):
        epiloq.w4a8_mm(**given)
    assert before is None or torch.equal(before, given["out"])
    assert not epiloq.supports("w4a8_mm", **given)[0]


def test_refuses_non_tensors_and_non_weights() -> None:
    for name, kind in (("x_q", "list"), ("scale_a", "float"), ("weight", "list")):
        with pytest.raises(TypeError, match=f"epiloq.w4a8_mm: {name}: expected .*, got {kind}"):
            epiloq.w4a8_mm(**call(**{name: 1.0 if kind == "float" else [1]}))


def test_explain_describes_the_path() -> None:
    assert "activations as float32: cpu" in epiloq.explain("w4a8_mm", **call())
    many = call(x_q=torch.zeros(30, 64, dtype=torch.int8), scale_a=torch.ones(30), out=torch.zeros(30, 20).half())
    assert "int8 products of each group" in epiloq.explain("w4a8_mm", **many)
