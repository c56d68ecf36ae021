"""weight_only_mm against float64, on every kernel that the arguments can lead to."""

from __future__ import annotations

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
from reference import poisoned
from weight_reference import KINDS, assert_close, make_weight, run_and_assert_close, run_kernel

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(seed: int, device: str, kind: str, bits: int, dtype: torch.dtype) -> None:
    for m, group_size in itertools.product((1, 5, 17), (-1, 16, 32, 64, 128, 48)):
        run_and_assert_close(device, m, 100, 576, bits, group_size, kind, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (17, 100), (100, 17), (16, 128), (576, 1536), (33, 4095), (4095, 33), (1040, 2064), (264, 640)]
)
def test_sizes(seed: int, device: str, n: int, k: int, bits: int, dtype: torch.dtype) -> None:
    for m in (1, 3, 8, 9, 17, 33, 129):
        run_and_assert_close(device, m, n, k, bits, 128, "zero", dtype, bias=m % 2 == 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scale_dtypes_orders_and_clamps(seed: int, device: str, scale_dtype: torch.dtype, kind: str) -> None:
    infinity = math.inf
    for m, clamp in itertools.product((1, 40), (None, (0.0, infinity), (0.0, 6.0), (-1.5, -0.25))):
        for dtype, act_order in itertools.product(HALVES, (False, True)):
            run_and_assert_close(
                device,
                m,
                72,
                300,
                4,
                64,
                kind,
                dtype,
                scale_dtype=scale_dtype,
                act_order=act_order,
                bias=True,
                clamp=clamp,
            )


@settings(max_examples=60)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 300),
    k=st.integers(1, 700),
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.one_of(st.sampled_from([-1, 32, 64, 128, 256]), st.integers(1, 800)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    options=st.tuples(st.booleans(), st.booleans()),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_product(
    m: int,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    kind: str,
    dtype: torch.dtype,
    options: tuple[bool, bool],
    draw: int,
) -> None:
    torch.manual_seed(draw)
    act_order, bias = options
    run_and_assert_close("cpu", m, n, k, bits, group_size, kind, dtype, act_order=act_order, bias=bias)


def test_deterministic(seed: int, device: str) -> None:
    weight = make_weight(300, 2048, kind="offset", device=device).packed
    for m in (1, 8, 30):
        x = torch.randn(m, 2048, device=device).half()
        first = epiloq.weight_only_mm(x, weight)
        assert all(torch.equal(epiloq.weight_only_mm(x, weight), first) for _ in range(5))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 3:67],
        lambda x: x[::2, :64],
        lambda x: x[1:, 1:65],
        lambda x: x.view(5, 4, 80)[:, 1:3, :64],
        lambda x: x[0, :64],
        lambda x: x[:0, :64],
    ],
)
def test_views(seed: int, device: str, view: Callable[[Tensor], Tensor]) -> None:
    weight = make_weight(40, 64, group_size=32, device=device)
    x = view(torch.randn(20, 80, device=device).half())
    if x.ndim == 3:
        with pytest.raises(ValueError, match=r"x: expected leading dimensions that collapse"):
            epiloq.weight_only_mm(x, weight.packed)
        x = x.contiguous()
    y = epiloq.weight_only_mm(x, weight.packed)
    assert y.shape == (*x.shape[:-1], 40) and y.is_contiguous()
    assert_close(y, x, weight)
    wide = poisoned((*x.shape[:-1], 50), torch.float16, device)
    epiloq.weight_only_mm(x, weight.packed, out=wide[..., 4:44])
    assert torch.equal(wide[..., 4:44], y)
    assert wide[..., :4].isnan().all() and wide[..., 44:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 20, 64), (3, 0, 64), (3, 20, 0)])
def test_empty(device: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    weight = make_weight(n, k, group_size=32, device=device).packed
    bias = torch.arange(n, device=device).half()
    y = epiloq.weight_only_mm(torch.ones(m, k, device=device).half(), weight, bias)
    assert y.shape == (m, n) and torch.equal(y, bias.expand(m, n))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("m", [1, 2, 3, 20])
def test_non_finite_values_affect_only_their_elements(seed: int, device: str, bad: float, m: int) -> None:
    weight, row = make_weight(50, 256, kind="zero", device=device), m // 2
    x = torch.randn(m, 256, device=device).half()
    clean = epiloq.weight_only_mm(x, weight.packed)
    x[row, 200] = bad
    y = epiloq.weight_only_mm(x, weight.packed)
    others = [other for other in range(m) if other != row]
    assert torch.equal(y[others], clean[others]) and not y[row].isfinite().all()
    x[row, 200] = 0
    scale = weight.scale.clone()
    scale[7, 1] = bad
    packed = epiloq.pack_weight(weight.q, scale, weight.zero, bits=4, group_size=128)
    y = epiloq.weight_only_mm(x, packed)
    assert not y[:, 7].isfinite().any() and y[:, :7].isfinite().all() and y[:, 8:].isfinite().all()


def test_compiles_whole(seed: int, device: str) -> None:
    weight = make_weight(40, 100, kind="zero", act_order=True, device=device).packed
    bias = torch.randn(40, device=device).half()

    def f(x: Tensor) -> Tensor:
        return epiloq.weight_only_mm(x, weight, bias, clamp=(0, 6)) * 2

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (1, 5, 9, 40):
        x = torch.randn(m, 100, device=device).half()
        assert torch.equal(compiled(x), f(x))


def call(**changes: Any) -> dict[str, Any]:
    valid = {"x": torch.randn(3, 64).half(), "weight": make_weight(20, 64, group_size=32).packed}
    return {**valid, "bias": torch.randn(20).half(), "out": torch.zeros(3, 20).half(), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(3, 65).half()}, "x: expected 64 columns"),
        ({"x": torch.randn(3, 64).double()}, "x: expected float32 or float16 or bfloat16, got float64"),
        ({"x": torch.randn(64, 3).half().t()}, "x: expected row-major"),
        ({"x": torch.randn(()).half()}, "x: expected at least one dimension"),
        ({"bias": torch.randn(21).half()}, r"bias: expected shape \[20\]"),
        ({"bias": torch.randn(20)}, "bias: expected float16"),
        ({"out": torch.zeros(3, 20)}, "out: expected float16"),
        ({"out": torch.zeros(3, 21).half()}, "out: expected x's leading dimensions and 20 columns"),
        ({"out": torch.zeros(60).half()}, "out: expected x's leading dimensions"),
        ({"clamp": (1.0, 0.0)}, r"clamp: expected \(lo, hi\) with lo <= hi"),
        ({"clamp": (math.nan, 1.0)}, r"clamp: expected \(lo, hi\) with lo <= hi"),
        ({"weight": make_weight(20, 64, group_size=32).packed.to("meta")}, "weight.q: expected .*"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^epiloq.weight_only_mm: {message}"):
        epiloq.weight_only_mm(**call(**changes))
    assert not epiloq.supports("weight_only_mm", **call(**changes))[0]


def test_refuses_columns_that_do_not_fit_an_order() -> None:
    weight = make_weight(20, 64, group_size=32, act_order=True).packed
    for k in (63, 65):
        with pytest.raises(ValueError, match="x: expected 64 columns"):
            epiloq.weight_only_mm(torch.randn(3, k), weight)


def test_non_tensors_and_non_weights_are_refused() -> None:
    with pytest.raises(TypeError, match="weight: expected a PackedWeight, got Tensor"):
        epiloq.weight_only_mm(**call(weight=torch.zeros(20, 64)))
    with pytest.raises(TypeError, match="x: expected a tensor, got list"):
        epiloq.weight_only_mm(**call(x=[1.0]))


def test_a_kernel_by_name(seed: int) -> None:
    x, weight = torch.randn(3, 64).half(), make_weight(20, 64, group_size=32).packed
    with pytest.raises(ValueError, match="kernel: expected gemv, tiled, decode or wgmma, got cublas"):
        run_kernel(("cublas", 0, 1), x, weight)


def test_out_must_not_overlap_inputs() -> None:
    memory = torch.zeros(3, 84).half()
    with pytest.raises(ValueError, match="out: expected memory apart from x"):
        epiloq.weight_only_mm(**call(x=memory[:, :64], out=memory[:, 60:80]))


def test_gradients_are_refused(seed: int) -> None:
    arguments = call(out=None)
    x = arguments.pop("x").requires_grad_()
    y = epiloq.weight_only_mm(x, **arguments)
    with pytest.raises(NotImplementedError, match=r"epiloq.weight_only_mm has no gradient"):
        y.sum().backward()


def test_explain() -> None:
    assert epiloq.explain("weight_only_mm", **call()).startswith("cpu")
    with epiloq.config(arch="sm90"):
        assert epiloq.explain("weight_only_mm", **call()).startswith(("gemv", "decode", "wgmma"))
    numbers = {"n": 4096, "k": 4096, "arch": "sm80"}
    assert "128 tokens" in epiloq.explain("weight_only_mm", m=190, **numbers)
    hopper = {**numbers, "arch": "sm90"}
    for m, exact in ((1, True), (16, True), (128, True), (129, True), (512, False), (1024, False)):
        words = epiloq.explain("weight_only_mm", m=m, **hopper)
        assert words.startswith(("gemv", "decode", "wgmma")) and ("rounded" not in words) == exact, words
    assert "large M" in epiloq.explain("weight_only_mm", m=4096, **numbers)
    assert "group size" in epiloq.explain("weight_only_mm", m=1, group_size=48, **numbers)
