"""online_quant_mm against float64 on the dequantised operands: bits, group sizes, granularities, sizes, views."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from blockwise_reference import RawWeight, assert_close, make_weight
from reference import poisoned

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
RELU6 = (0.0, 6.0)


def make_x(m: int, k: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of different sizes, off centre."""
    return (torch.randn(m, k) * torch.rand(m, 1).mul_(3) + 0.4).to(dtype).to(device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_kind(seed: int, device: str, group: int, bits: int, offset: bool, dtype: torch.dtype) -> None:
    for m, n, k in ((1, 17, 576), (17, 100, 200), (100, 40, 576)):
        x, weight = make_x(m, k, dtype, device), make_weight(n, k, group, bits=bits, offset=offset, device=device)
        bias = torch.randn(n).to(dtype).to(device)
        out = poisoned((m, n), dtype, device)
        assert epiloq.online_quant_mm(x, weight.prepared(), bias=bias, out=out) is out
        assert_close(out, x, weight, bias)


@pytest.mark.parametrize("per", ["both", "row", "block"])
@pytest.mark.parametrize("bits", [4, 8])
def test_granularities_and_raw_weights(seed: int, device: str, bits: int, per: str) -> None:
    x, weight = make_x(9, 203, torch.float16, device), make_weight(24, 203, 64, bits=bits, per=per, device=device)
    prepared = epiloq.online_quant_mm(x, weight.prepared())
    assert_close(prepared, x, weight)
    raw = epiloq.online_quant_mm(x, weight.packed, weight.scale, weight.offset, group_size=64)
    assert torch.equal(raw, prepared)


@pytest.mark.parametrize("n", [1, 17, 100, 576])
@pytest.mark.parametrize("m", [1, 17, 100, 576])
@pytest.mark.parametrize("bits", [4, 8])
def test_odd_sizes(seed: int, device: str, m: int, n: int, bits: int) -> None:
    for k in (1, 17, 127, 576):
        x, weight = make_x(m, k, torch.bfloat16, device), make_weight(n, k, 64, bits=bits, device=device)
        out = poisoned((m, n), torch.bfloat16, device)
        epiloq.online_quant_mm(x, weight.prepared(), out=out)
        assert_close(out, x, weight)


@settings(max_examples=60)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 20),
    k=st.integers(1, 150),
    group=st.integers(1, 160),
    bits=st.sampled_from([4, 8]),
    offset=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_size(m: int, n: int, k: int, group: int, bits: int, offset: bool, draw: int) -> None:
    torch.manual_seed(draw)
    x, weight = make_x(m, k, torch.float32, "cpu"), make_weight(n, k, group, bits=bits, offset=offset)
    assert_close(epiloq.online_quant_mm(x, weight.prepared()), x, weight)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_values(device: str, group: int, bits: int) -> None:
    """The largest sums that a block has, of either sign."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    q = torch.full((6, 256), low, dtype=torch.int8)
    q[1], q[2, ::2], q[3, 1::2], q[4] = high, high, high, 0
    weight = RawWeight(q.to(device), torch.ones(6, 1, device=device), None, group, bits)
    x = torch.full((5, 256), -128.0)
    x[:, ::group] = 127
    x[1], x[2, 1::group], x[3, ::2] = -x[1] - 1, 127, 127
    x = x.to(device)
    assert_close(epiloq.online_quant_mm(x, weight.prepared()), x, weight)


@pytest.mark.parametrize(("m", "n"), [(0, 16), (5, 0), (0, 0)])
def test_empty(device: str, m: int, n: int) -> None:
    weight = make_weight(n, 40, 32, device=device).prepared()
    assert epiloq.online_quant_mm(torch.randn(m, 40, device=device), weight).shape == (m, n)


def test_leading_dimensions_and_views(seed: int, device: str) -> None:
    weight = make_weight(48, 200, 64, device=device)
    x = make_x(42, 200, torch.bfloat16, device)
    flat = epiloq.online_quant_mm(x, weight.prepared())
    assert torch.equal(epiloq.online_quant_mm(x.view(2, 3, 7, 200), weight.prepared()).view(42, 48), flat)
    assert torch.equal(
        epiloq.online_quant_mm(x[5], weight.prepared()), epiloq.online_quant_mm(x[5:6], weight.prepared())[0]
    )
    wide_x = torch.full((42, 300), 7.0, dtype=torch.bfloat16, device=device)
    wide_x[:, 33:233] = x
    wide_out = torch.full((42, 61), 7.0, dtype=torch.bfloat16, device=device)
    epiloq.online_quant_mm(wide_x[:, 33:233], weight.prepared(), out=wide_out[:, 5:53])
    assert torch.equal(wide_out[:, 5:53], flat)
    assert (wide_out[:, :5] == 7).all() and (wide_out[:, 53:] == 7).all()


@pytest.mark.parametrize("clamp", [(0.0, math.inf), RELU6, (-1.0, 1.0), (-math.inf, 0.0)])
def test_clamp(seed: int, device: str, clamp: tuple[float, float]) -> None:
    x, weight = make_x(20, 96, torch.float16, device), make_weight(40, 96, 32, device=device)
    out = epiloq.online_quant_mm(x, weight.prepared(), clamp=clamp)
    assert out.min() >= clamp[0] and out.max() <= clamp[1]
    assert_close(out, x, weight, clamp=clamp)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan_and_alone(seed: int, device: str, bad: float, staged: bool) -> None:
    x, weight = make_x(3, 200, torch.float32, device), make_weight(40, 200, 64, device=device).prepared()
    clean = epiloq.online_quant_mm(x, weight, clamp=RELU6, staged=staged)
    x[1, 77] = bad
    out = epiloq.online_quant_mm(x, weight, clamp=RELU6, staged=staged)
    assert out[1].isnan().all() and torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("constant", [0.0, 2.5, -1e-30])
def test_constant_rows(seed: int, device: str, constant: float) -> None:
    x, weight = torch.full((4, 200), constant, device=device), make_weight(30, 200, 64, device=device)
    assert_close(epiloq.online_quant_mm(x, weight.prepared()), x, weight)


def test_prepared_weights_give_back_what_went_in(seed: int, device: str) -> None:
    for bits, k, group, offset in ((8, 100, 32, True), (4, 100, 32, False), (4, 33, 7, True), (8, 1, 128, False)):
        weight = make_weight(13, k, group, bits=bits, offset=offset, device=device)
        prepared = weight.prepared()
        q, scale, given_offset = prepared.unpack()
        assert torch.equal(q, weight.q) and torch.equal(scale, weight.scale)
        assert (given_offset is None) == (weight.offset is None)
        assert given_offset is None or torch.equal(given_offset, weight.offset)
        assert torch.equal(prepared.to("cpu").dequantize(), prepared.dequantize().cpu())
        blocks = torch.arange(k, device=device) // group
        dense = weight.q.double() * scale.double()[:, blocks]
        dense += 0 if weight.offset is None else weight.offset.double()[:, blocks]
        torch.testing.assert_close(prepared.dequantize(torch.float64), dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacked_tensors_are_copies(seed: int, device: str, bits: int) -> None:
    prepared = make_weight(8, 256, 256, bits=bits, offset=True, device=device).prepared()
    before = prepared.dequantize()
    for part in prepared.unpack():
        assert part is not None
        part.zero_()
    assert torch.equal(prepared.dequantize(), before) and prepared == prepared


def test_compiles_whole(seed: int, device: str) -> None:
    weight = make_weight(24, 100, 32, device=device).prepared()
    bias = torch.randn(24, device=device)

    def f(x: Tensor) -> Tensor:
        return (
            epiloq.online_quant_mm(x, weight, bias=bias, clamp=RELU6) + epiloq.quantize_blockwise_int8(x, 32)[1].sum()
        )

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (5, 9, 1):
        x = torch.randn(m, 100, device=device)
        assert torch.equal(compiled(x), f(x))


@pytest.mark.parametrize("shape", [(1, 1), (32, 1), (1, 2), (32, 2)])
def test_scales_of_constant_sizes_compile(seed: int, shape: tuple[int, int]) -> None:
    """Those of the weight are symbolic."""
    x, b = torch.randn(5, 64), torch.randint(-128, 128, (32, 64), dtype=torch.int8)

    def f(x: Tensor) -> Tensor:
        return epiloq.online_quant_mm(x, b, torch.ones(shape), -torch.ones(shape), group_size=32)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x), f(x))


def bad(**changes: object) -> dict[str, object]:
    weight = make_weight(24, 100, 32)
    call: dict[str, object] = {"x": torch.randn(3, 100), "w_q": weight.q, "w_scale": weight.scale, "group_size": 32}
    return call | changes


BAD_CALLS = [
    (bad(x=torch.randn(3, 99)), "w_scale|w_q"),
    (bad(x=torch.randn(100, 3).t()), "x: expected row-major"),
    (bad(x=torch.randn(3, 100).double()), "x: expected float32 or float16 or bfloat16"),
    (bad(w_q=torch.zeros(24, 100)), "w_q: expected int8"),
    (bad(w_q=torch.zeros(24, 90, dtype=torch.int8)), "w_q: expected 100 columns"),
    (bad(w_scale=torch.ones(24)), "w_scale: expected float32"),
    (bad(w_scale=torch.ones(24, 3)), "w_scale: expected float32"),
    (bad(w_scale=torch.ones(24, 4).half()), "w_scale: expected float32"),
    (bad(w_offset=torch.ones(23, 4)), "w_offset: expected float32"),
    (bad(group_size=0), "group_size: expected 1 to"),
    (bad(group_size=None), "group_size: expected a number"),
    (bad(bias=torch.ones(23)), r"bias: expected shape \[24\]"),
    (bad(bias=torch.ones(24).half()), "bias: expected float32"),
    (bad(clamp=(1.0, 0.0)), "clamp: expected"),
    (bad(clamp=(math.nan, 0.0)), "clamp: expected"),
    (bad(out=torch.ones(3, 25)), "out: expected x's leading dimensions"),
    (bad(out=torch.ones(3, 24).half()), "out: expected float32"),
]


@pytest.mark.parametrize("case", range(len(BAD_CALLS)))
def test_bad_arguments_are_named(case: int) -> None:
    arguments, text = BAD_CALLS[case]
    with pytest.raises(ValueError, match=text):
        epiloq.online_quant_mm(**arguments)  # type: ignore[arg-type]
    fits, reason = epiloq.supports("online_quant_mm", **arguments)
    assert not fits and reason


def test_bad_arguments_beside_a_prepared_weight(seed: int) -> None:
    weight, x = make_weight(24, 100, 32).prepared(), torch.randn(3, 100)
    for arguments, text in (
        ({"w_scale": torch.ones(24, 4)}, "w_scale: expected None"),
        ({"w_offset": torch.ones(24, 4)}, "w_offset: expected None"),
        ({"group_size": 64}, "group_size: expected the weight's, 32"),
        ({"x": torch.randn(3, 99)}, r"x: expected \[…, 100\]"),
        ({"out": torch.empty(3, 24).as_strided((3, 24), (0, 1))}, "out: expected rows"),
        ({"out": weight.parameters.view(-1)[:72].view(3, 24)}, "out: expected memory apart from w_scale"),
        ({"x": torch.randn(3, 100, device="meta")}, "w_q: expected a tensor on meta"),
    ):
        with pytest.raises(ValueError, match=text):
            epiloq.online_quant_mm(**({"x": x, "w_q": weight} | arguments))  # type: ignore[arg-type]
    for raw, text in (
        ({"bits": 3}, "bits"),
        ({"bits": 4}, "w_scale"),
        ({"in_features": 101}, "w_q: expected 101 columns"),
    ):
        with pytest.raises(ValueError, match=text):
            epiloq.online_quant_weight(torch.zeros(24, 100, dtype=torch.int8), torch.ones(24, 4), group_size=32, **raw)  # type: ignore[arg-type]


def test_gradients_are_refused(seed: int) -> None:
    weight = make_weight(24, 100, 32).prepared()
    y = epiloq.online_quant_mm(torch.randn(3, 100, requires_grad=True), weight)
    with pytest.raises(NotImplementedError, match=r"online_quant_mm has no gradient"):
        y.sum().backward()
