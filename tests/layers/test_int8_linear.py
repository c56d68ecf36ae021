"""epiloq.nn.Int8Linear: its numbers against float64 references, its shapes and the arguments that it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from epiloq.nn import Int8Linear
from int8_reference import KINDS, assert_matches_float64, make_layer, make_linear

SIZES = [(1, 1), (17, 100), (100, 17), (576, 1536), (4095, 9), (17, 49152), (49152, 3)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
def test_matches_float64(
    in_features: int, out_features: int, dtype: torch.dtype, activation: str, symmetric: bool, seed: int
) -> None:
    linear = make_linear(in_features, out_features, dtype)
    x = torch.randn(5, in_features).mul_(torch.rand(5, 1) * 4).add_(0.3).to(dtype)
    y = make_layer(linear, x, activation, symmetric)(x)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert_matches_float64(y, linear, x, activation, symmetric)


@settings(max_examples=60)
@given(
    in_features=st.integers(1, 70),
    out_features=st.integers(1, 40),
    tokens=st.integers(1, 20),
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    offset=st.floats(-8, 8, width=16),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_size_matches_float64(
    in_features: int, out_features: int, tokens: int, kind: tuple[str, bool], bias: bool, offset: float, draw: int
) -> None:
    torch.manual_seed(draw)
    linear = make_linear(in_features, out_features, bias=bias)
    x = torch.randn(tokens, in_features) + offset
    assert_matches_float64(make_layer(linear, x, *kind)(x), linear, x, *kind)


@pytest.mark.parametrize("leading", [(), (0,), (1,), (7,), (2, 3), (2, 0, 3), (2, 1, 2, 2)])
@pytest.mark.parametrize("out_features", [16, 17])
def test_leading_dimensions(leading: tuple[int, ...], out_features: int, seed: int) -> None:
    layer = Int8Linear.from_linear(make_linear(33, out_features), symmetric=False)
    x = torch.randn(*leading, 33)
    y = layer(x)
    assert y.shape == (*leading, out_features)
    assert y.is_contiguous()
    assert torch.equal(y.reshape(-1, out_features), layer(x.reshape(-1, 33)))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, 1:41], lambda x: x[1], lambda x: x[::2, 3:43], lambda x: x.expand(3, 41, 41)[1:]],
    ids=["columns", "offset", "odd-row", "every-second-row", "expanded"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_as_input(view: Callable[[Tensor], Tensor], symmetric: bool, dtype: torch.dtype, seed: int) -> None:
    x = view(torch.randn(41, 41).to(dtype))
    layer = Int8Linear.from_linear(make_linear(x.shape[-1], 24, dtype), symmetric=symmetric)
    assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
def test_zero_and_constant_rows(activation: str, symmetric: bool, seed: int) -> None:
    linear = make_linear(20, 12)
    x = torch.stack((torch.zeros(20), torch.full((20,), 3.0), torch.full((20,), -2.0), torch.randn(20)))
    y = make_layer(linear, x, activation, symmetric)(x)
    assert torch.equal(y[0], linear.bias)
    assert_matches_float64(y, linear, x, activation, symmetric)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_non_finite_token_is_nan_and_alone(bad: float, symmetric: bool, seed: int) -> None:
    layer = Int8Linear.from_linear(make_linear(20, 12), symmetric=symmetric)
    x = torch.randn(3, 20)
    clean = layer(x)
    x[1, 7] = bad
    y = layer(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])


def test_a_zero_channel_gives_its_bias(seed: int) -> None:
    linear = make_linear(20, 12)
    nn.init.zeros_(linear.weight[5:6])
    x = torch.randn(4, 20)
    assert torch.equal(Int8Linear.from_linear(linear)(x)[:, 5], linear.bias[5].expand(4))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_sums_are_exact(symmetric: bool) -> None:
    """Every product at its extreme, at the largest K: one step too far would wrap around."""
    k = 131056 if symmetric else 65792
    linear = nn.Linear(k, 1, bias=False)
    nn.init.ones_(linear.weight)
    zero_point = None if symmetric else 127
    layer = Int8Linear.from_linear(
        linear, activation="static", symmetric=symmetric, input_scale=1.0, input_zero_point=zero_point
    )
    expected = k * (-128 if symmetric else -255)
    y = layer(torch.full((1, k), -1e4))
    assert y.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("symmetric", "largest"), [(True, 131056), (False, 65792)])
def test_in_features_beyond_exact_sums_are_refused(symmetric: bool, largest: int) -> None:
    Int8Linear(largest, 8, symmetric=symmetric, device="meta")
    with pytest.raises(ValueError, match=f"in_features.*{largest}.*{largest + 1}"):
        Int8Linear(largest + 1, 8, symmetric=symmetric, device="meta")
    with pytest.raises(ValueError, match="in_features"):
        Int8Linear.from_linear(nn.Linear(largest + 1, 8, device="meta"), symmetric=symmetric)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0}, "in_features"),
        ({"out_features": 0}, "out_features"),
        ({"activation": "per-token"}, "activation.*dynamic, static.*'per-token'"),
    ],
)
def test_constructor_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Int8Linear(**{"in_features": 8, "out_features": 8} | arguments)


@pytest.mark.parametrize(
    ("linear", "arguments", "message"),
    [
        (nn.Conv1d(2, 2, 1), {}, "torch.nn.Linear.*Conv1d"),
        (nn.Linear(4, 4, dtype=torch.float64), {}, "weight.*float64"),
        (nn.LazyLinear(4), {}, "lazy"),
        (nn.Linear(4, 4), {"activation": "static"}, "input_scale"),
        (nn.Linear(4, 4), {"activation": "static", "input_scale": 0.0}, "input_scale"),
        (nn.Linear(4, 4), {"activation": "static", "input_scale": 1e-60}, "input_scale"),
        (nn.Linear(4, 4), {"activation": "static", "input_scale": float("nan")}, "input_scale"),
        (nn.Linear(4, 4), {"activation": "static", "input_scale": torch.ones(2)}, "input_scale"),
        (nn.Linear(4, 4), {"input_scale": 1.0}, "input_scale"),
        (nn.Linear(4, 4), {"activation": "static", "input_scale": 1.0, "input_zero_point": 0}, "input_zero_point"),
        (nn.Linear(4, 4), {"activation": "static", "symmetric": False, "input_scale": 1.0}, "input_zero_point"),
        (
            nn.Linear(4, 4),
            {"activation": "static", "symmetric": False, "input_scale": 1.0, "input_zero_point": 128},
            "input_zero_point.*-128 to 127.*128",
        ),
        (
            nn.Linear(4, 4),
            {"activation": "static", "symmetric": False, "input_scale": 1.0, "input_zero_point": 0.5},
            "input_zero_point",
        ),
    ],
)
def test_from_linear_refuses(linear: nn.Linear, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Int8Linear.from_linear(linear, **arguments)


@pytest.mark.parametrize("shape", [(), (9,), (4, 20), (10, 4)])
def test_forward_refuses_another_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x: expected shape \[…, 10\]"):
        Int8Linear(10, 4)(torch.zeros(shape))


def test_forward_refuses_another_dtype() -> None:
    with pytest.raises(ValueError, match="float32"):
        Int8Linear(10, 4)(torch.zeros(2, 10, dtype=torch.float64))


def test_from_linear_leaves_the_linear_alone(seed: int) -> None:
    linear = make_linear(10, 4).eval()
    before = copy.deepcopy(linear.state_dict())
    layer = Int8Linear.from_linear(linear)
    layer.bias.add_(1)
    assert all(torch.equal(linear.state_dict()[name], tensor) for name, tensor in before.items())
    assert not layer.training
    assert not any(buffer.requires_grad for buffer in layer.parameters())


def test_the_bias_follows_the_dtype_of_the_input(seed: int) -> None:
    linear, x = make_linear(17, 9), torch.randn(4, 17).bfloat16()
    y = Int8Linear.from_linear(linear)(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, Int8Linear.from_linear(linear).bfloat16()(x))


def test_input_that_requires_grad(seed: int) -> None:
    layer, x = Int8Linear.from_linear(make_linear(17, 9)), torch.randn(2, 17)
    assert torch.equal(layer(x.clone().requires_grad_()).detach(), layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), [(17, 100), (576, 1536), (4095, 9)])
def test_cuda_matches_float64(
    in_features: int, out_features: int, dtype: torch.dtype, activation: str, symmetric: bool, seed: int
) -> None:
    linear = make_linear(in_features, out_features, dtype)
    x = torch.randn(33, in_features, dtype=dtype)
    layer = make_layer(linear, x, activation, symmetric)
    direct = make_layer(copy.deepcopy(linear).cuda(), x, activation, symmetric)
    moved = layer.to("cuda")
    y = moved(x.cuda())
    assert torch.equal(y, direct(x.cuda()))
    assert_matches_float64(y.cpu(), linear, x, activation, symmetric)


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
def test_float32_on_cuda_is_computed_in_bfloat16(activation: str, symmetric: bool, seed: int) -> None:
    x = torch.randn(33, 100)
    layer = make_layer(make_linear(100, 17), x, activation, symmetric)
    expected = layer(x)
    y = layer.cuda()(x.cuda())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.cpu(), expected, rtol=2**-7, atol=2**-9)
