"""epiloq.nn.Fp8Linear and Fp8BlockLinear: their numbers against float64, shapes, and the arguments they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from epiloq.nn import Fp8BlockLinear, Fp8Linear
from float8_reference import ACCURATE
from fp8_layer_reference import KINDS, assert_matches_float64
from int8_reference import make_linear

SIZES = [(1, 1), (17, 100), (100, 17), (576, 300), (4095, 9), (128, 256), (129, 257), (17, 5000)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
def test_matches_float64(in_features: int, out_features: int, dtype: torch.dtype, name: str, seed: int) -> None:
    kind, linear = KINDS[name], make_linear(in_features, out_features, dtype)
    x = torch.randn(5, in_features).mul_(torch.rand(5, 1) * 4).add_(0.3).to(dtype)
    y = kind.from_linear(linear, x)(x)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert_matches_float64(y, kind, linear, x)


@settings(max_examples=60)
@given(
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 300),
    tokens=st.integers(1, 20),
    name=st.sampled_from(sorted(KINDS)),
    bias=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_size_matches_float64(
    in_features: int, out_features: int, tokens: int, name: str, bias: bool, draw: int
) -> None:
    torch.manual_seed(draw)
    linear, x = make_linear(in_features, out_features, bias=bias), torch.randn(tokens, in_features)
    assert_matches_float64(KINDS[name].from_linear(linear, x)(x), KINDS[name], linear, x)


@pytest.mark.parametrize("leading", [(), (0,), (1,), (7,), (2, 3), (2, 0, 3), (2, 1, 2, 2)])
@pytest.mark.parametrize("name", ["token-channel", "tensor-tensor", "block"])
def test_leading_dimensions(leading: tuple[int, ...], name: str, seed: int) -> None:
    x = torch.randn(*leading, 33)
    layer = KINDS[name].from_linear(make_linear(33, 17), x)
    y = layer(x)
    assert y.shape == (*leading, 17)
    assert y.is_contiguous()
    assert torch.equal(y.reshape(-1, 17), layer(x.reshape(-1, 33)))


@pytest.mark.parametrize("name", ["token-channel", "tensor-tensor", "block"])
@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, 1:41], lambda x: x[1], lambda x: x[::2, 3:43], lambda x: x.expand(3, 41, 41)[1:]],
    ids=["columns", "offset", "odd-row", "every-second-row", "expanded"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_as_input(view: Callable[[Tensor], Tensor], name: str, dtype: torch.dtype, seed: int) -> None:
    x = view(torch.randn(41, 41).to(dtype))
    layer = KINDS[name].from_linear(make_linear(x.shape[-1], 24, dtype), x)
    assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("name", KINDS)
def test_zero_rows_and_channels_give_the_bias(name: str, seed: int) -> None:
    linear, x = make_linear(20, 12), torch.randn(4, 20)
    nn.init.zeros_(linear.weight[5:6])
    x[2] = 0
    y = KINDS[name].from_linear(linear, x)(x)
    assert torch.equal(y[2], linear.bias)
    assert torch.equal(y[:, 5], linear.bias[5].expand(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["token-channel", "token-tensor", "block"])
def test_a_non_finite_token_is_nan_and_alone(bad: float, name: str, seed: int) -> None:
    x = torch.randn(3, 200)
    layer = KINDS[name].from_linear(make_linear(200, 12), x)
    clean = layer(x)
    x[1, 7] = bad
    y = layer(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fp8Linear(0, 8), "Fp8Linear: in_features: expected at least 1, got 0"),
        (lambda: Fp8BlockLinear(8, 0), "Fp8BlockLinear: out_features: expected at least 1, got 0"),
        (lambda: Fp8Linear(8, 8, activation="dynamic"), "activation.*token, tensor, static.*'dynamic'"),
        (lambda: Fp8Linear(8, 8, weight="token"), "weight.*channel, tensor.*'token'"),
        (lambda: Fp8BlockLinear.from_linear(nn.Conv1d(2, 2, 1)), "Fp8BlockLinear: linear: .*Conv1d"),
        (lambda: Fp8BlockLinear.from_linear(nn.Linear(4, 4, dtype=torch.float64)), "weight.*float64"),
        (lambda: Fp8Linear.from_linear(nn.LazyLinear(4)), "Fp8Linear: linear: .*lazy"),
        (lambda: Fp8Linear.from_linear(nn.Linear(0, 4)), "Fp8Linear: in_features: expected at least 1"),
        (lambda: Fp8Linear.from_linear(nn.Linear(4, 4), activation="static"), "input_scale.*None"),
        (lambda: Fp8Linear.from_linear(nn.Linear(4, 4), activation="static", input_scale=0.0), "input_scale"),
        (lambda: Fp8Linear.from_linear(nn.Linear(4, 4), activation="static", input_scale=1e-60), "input_scale"),
        (
            lambda: Fp8Linear.from_linear(nn.Linear(4, 4), activation="static", input_scale=torch.ones(2)),
            "input_scale",
        ),
        (lambda: Fp8Linear.from_linear(nn.Linear(4, 4), input_scale=1.0), "input_scale: expected None"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_refuses(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("shape", [(), (9,), (4, 20), (10, 4)])
@pytest.mark.parametrize("layer", [Fp8Linear(10, 4), Fp8BlockLinear(10, 4)])
def test_forward_refuses_another_width(shape: tuple[int, ...], layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"{type(layer).__name__}: x: expected shape \[…, 10\]"):
        layer(torch.zeros(shape))


@pytest.mark.parametrize("name", ["token-channel", "tensor-tensor", "block"])
def test_from_linear_leaves_the_linear_alone(name: str, seed: int) -> None:
    linear = make_linear(10, 4).eval()
    before = copy.deepcopy(linear.state_dict())
    layer = KINDS[name].from_linear(linear, torch.ones(1))
    layer.bias.add_(1)
    assert all(torch.equal(linear.state_dict()[key], tensor) for key, tensor in before.items())
    assert not layer.training
    assert not any(buffer.requires_grad for buffer in layer.parameters())


@pytest.mark.parametrize("name", ["token-channel", "block"])
def test_the_bias_follows_the_dtype_of_the_input(name: str, seed: int) -> None:
    linear, x = make_linear(17, 9), torch.randn(4, 17).bfloat16()
    y = KINDS[name].from_linear(linear, x)(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, KINDS[name].from_linear(linear, x).bfloat16()(x))


@pytest.mark.parametrize("name", ["token-channel", "block"])
def test_input_that_requires_grad(name: str, seed: int) -> None:
    x = torch.randn(2, 17)
    layer = KINDS[name].from_linear(make_linear(17, 9), x)
    assert torch.equal(layer(x.clone().requires_grad_()).detach(), layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 33, 200])
@pytest.mark.parametrize(("in_features", "out_features"), [(17, 100), (576, 1536), (4095, 9), (129, 257)])
def test_cuda_matches_float64(
    in_features: int, out_features: int, tokens: int, dtype: torch.dtype, name: str, seed: int
) -> None:
    kind, linear = KINDS[name], make_linear(in_features, out_features, dtype)
    x = torch.randn(tokens, in_features, dtype=dtype)
    layer = kind.from_linear(linear, x)
    made_there = kind.from_linear(copy.deepcopy(linear).cuda(), x)
    moved = layer.to("cuda")
    y = moved(x.cuda())
    assert y.dtype == dtype
    assert torch.equal(y, made_there(x.cuda()))
    # float32 inputs of Fp8Linear are computed with bfloat16 outputs there.
    narrowed = dtype == torch.float32 and kind.module is Fp8Linear
    assert_matches_float64(y.bfloat16().cpu() if narrowed else y.cpu(), kind, linear, x, ACCURATE)
