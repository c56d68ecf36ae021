"""epiloq.nn.W4A8Fp4Linear: its numbers, its life, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epiloq
from epiloq.nn import Fp4Linear, W4A8Fp4Linear
from fp4_reference import dequantized

ACTIVATIONS, FORMS = ("fp8", "int8", "fp8-group", "fp8-static"), ("mxfp4", "nvfp4")
INPUT_SCALE = 0.0078125


def quantised(x: Tensor, activation: str) -> Tensor:
    """Tokens as the quantisers restore them, in float64."""
    static = torch.full((1,), INPUT_SCALE, device=x.device) if activation == "fp8-static" else None
    granularity = {"fp8-group": "group", "fp8-static": "tensor"}.get(activation, "token")
    if activation == "int8":
        q, scale, _ = epiloq.quantize_int8(x)
    else:
        q, scale = epiloq.quantize_fp8(x, granularity=granularity, scale=static)
    if granularity == "group":
        scale = scale.repeat_interleave(128, -1)[:, : x.shape[-1]]
    return q.double() * scale.double()


def options_of(activation: str) -> dict[str, Any]:
    return {"activation": activation} | ({"input_scale": INPUT_SCALE} if activation == "fp8-static" else {})


def weight_of(layer: W4A8Fp4Linear) -> Tensor:
    """The weight that the tensors in files stand for by the format's definition, float64."""
    state = layer.file_state()
    divisor = state.get("weight_global_scale")
    factor = None if divisor is None else divisor.reciprocal()
    return dequantized(state["weight"], state["weight_scale"], factor, layer.in_features)


def layer_of(form: str = "mxfp4", activation: str = "fp8", dtype: torch.dtype = torch.float16) -> W4A8Fp4Linear:
    return W4A8Fp4Linear.from_linear(nn.Linear(100, 33, dtype=dtype), format=form, **options_of(activation))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_from_linear(seed: int, device: str, dtype: torch.dtype, activation: str, form: str) -> None:
    """The weight that `Fp4Linear` has, by the tokens that the quantiser gives."""
    for k, n, leading in ((100, 17, (3, 2)), (300, 40, (20,)), (67, 9, ()), (67, 9, (0,)), (512, 24, (300,))):
        linear = nn.Linear(k, n, dtype=dtype, device=device)
        layer = W4A8Fp4Linear.from_linear(linear, format=form, **options_of(activation))
        state, same = layer.state_dict(), Fp4Linear.from_linear(linear, format=form).state_dict()
        if activation == "fp8-static":
            assert state.pop("input_scale").tolist() == [INPUT_SCALE]
        assert state.keys() == same.keys() and all(torch.equal(state[name], same[name]) for name in state)
        assert (layer.activation, layer.format) == (activation, form)
        x = torch.randn(*leading, k, dtype=dtype, device=device)
        y = layer(x)
        assert y.shape == (*leading, n) and y.dtype == dtype and y.is_contiguous()
        rows, weight = quantised(x.reshape(-1, k), activation), weight_of(layer)
        exact = rows @ weight.t() + linear.bias.double()
        size = rows.abs() @ weight.abs().t() + linear.bias.double().abs()
        # As docs/numerics.md bounds it: sums of k products in fp32, one rounding to the type; on CUDA also rounding of
        # tokens to bfloat16 and, of float32 and float16, of the result, and 2^-8 where the weight is rounded in memory.
        eps = torch.finfo(dtype).eps
        bound = (eps + 2.0**-23 * k**0.5) * size + eps * exact.abs()
        if device == "cuda":
            bound += (2.0**-9 + 2.0**-8 + 2.0**-8) * size
        assert ((y.double().view(-1, n) - exact).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_independent(seed: int, form: str) -> None:
    layer, x = layer_of(form, dtype=torch.float32), torch.randn(9, 100)
    alone, together = torch.cat([layer(row) for row in x.split(1)]), layer(x)
    # Twice 100 roundings by 2^-24 of the sum of magnitudes, and as much again for quantised magnitudes above x's.
    magnitudes = x.abs() @ layer.dequantized_weight().abs().t()
    assert ((together - alone).abs() <= 4 * 100 * 2.0**-24 * (magnitudes + 1)).all()
    x[4] = float("nan")
    y = layer(x)
    assert y[4].isnan().all() and torch.equal(y[:4], together[:4]) and torch.equal(y[5:], together[5:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("as_files", [False, True])
@pytest.mark.parametrize("activation", ["int8", "fp8-static"])
def test_state_dict_through_safetensors(
    seed: int, tmp_path: Path, form: str, assign: bool, as_files: bool, activation: str
) -> None:
    layer, x = layer_of(form, activation), torch.randn(4, 100).half()
    save_file(layer.file_state() if as_files else layer.state_dict(), tmp_path / "layer.safetensors")
    state = load_file(tmp_path / "layer.safetensors")
    with torch.device("meta" if assign else "cpu"):
        fresh = W4A8Fp4Linear(100, 33, format=form, activation=activation)
    fresh.load_state_dict(state, strict=True, assign=assign)
    if not assign:
        fresh.half()
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(seed: int, duplicate: Callable[[Any], Any]) -> None:
    layer, x = layer_of("nvfp4"), torch.randn(4, 100).half()
    expected, other = layer(x), duplicate(layer)
    for parameter in layer.parameters():
        parameter.zero_()
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_compiles_into_one_graph(seed: int, device: str, form: str, activation: str) -> None:
    layer, x = layer_of(form, activation).to(device), torch.randn(2, 3, 100, device=device).half()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_the_input(seed: int, form: str) -> None:
    """That of the product with the weight; rounding of tokens passes it on."""
    layer = layer_of(form, dtype=torch.float32)
    x, dy = torch.randn(2, 5, 100, requires_grad=True), torch.randn(2, 5, 33)
    layer(x).backward(dy)
    weight = weight_of(layer)
    assert x.grad is not None
    bound = 2.0**-23 * 33**0.5 * (dy.double().abs() @ weight.abs()) + 2.0**-23 * (dy.double() @ weight).abs()
    assert ((x.grad.double() - dy.double() @ weight).abs() <= bound).all()


def test_meta_gives_meta() -> None:
    layer = W4A8Fp4Linear.from_linear(nn.Linear(100, 17, device="meta", dtype=torch.bfloat16), format="nvfp4")
    assert all(parameter.is_meta for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: W4A8Fp4Linear(4, 4, activation="fp4"),
            "activation: expected one of fp8, int8, fp8-group, fp8-static, got 'fp4'",
        ),
        (
            lambda: W4A8Fp4Linear.from_linear(nn.Linear(4, 4), activation="fp8-static"),
            r"input_scale: expected float from 1.17549e-38 to 3.40282e\+38, got None",
        ),
        (
            lambda: W4A8Fp4Linear.from_linear(nn.Linear(4, 4), input_scale=1.0),
            "input_scale: expected None with this kind of activation, got 1.0",
        ),
        (lambda: W4A8Fp4Linear(4, 4, format="fp4"), "format: expected one of mxfp4, nvfp4, got 'fp4'"),
        (lambda: W4A8Fp4Linear(4, 0), "out_features: expected at least 1, got 0"),
        (lambda: W4A8Fp4Linear.from_linear(nn.Linear(4, 4), activation="none"), "activation: expected one of"),
        (lambda: W4A8Fp4Linear.from_linear(nn.Linear(4, 4), format="fp8"), "format: expected one of"),
        (lambda: W4A8Fp4Linear.from_linear(nn.Linear(4, 4).double()), "linear.weight: expected"),
        (lambda: W4A8Fp4Linear.from_linear(nn.Identity()), "linear: expected a torch.nn.Linear"),  # type: ignore[arg-type]
        (lambda: layer_of()(torch.randn(3, 99).half()), r"x: expected shape \[…, 100\], got \[3, 99\]"),
        (lambda: layer_of()(torch.zeros(3, 100, dtype=torch.int32)), "x: expected one of"),
    ],
)
def test_refuses(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"W4A8Fp4Linear: {message}"):
        make()


@pytest.mark.parametrize("form", FORMS)
def test_weight_only_below(seed: int, device: str, form: str) -> None:
    """Fewer tokens run as in an `Fp4Linear`, bit for bit, with its gradient; the state dict is the same."""
    linear = nn.Linear(100, 17, dtype=torch.bfloat16, device=device)
    layer, alone = W4A8Fp4Linear.from_linear(linear, format=form), Fp4Linear.from_linear(linear, format=form)
    x, before = torch.randn(3, 5, 100, dtype=torch.bfloat16, device=device), layer.state_dict().keys()
    quantised_tokens = layer(x)
    layer.weight_only_below = 15
    assert torch.equal(layer(x), quantised_tokens) and layer.state_dict().keys() == before
    for few in (x[:, :4], x[:2], x[0, 0], x[:0]):
        assert torch.equal(layer(few), alone(few))
    few = x[:2].clone().requires_grad_()
    layer(few).sum().backward()
    assert few.grad is not None and few.grad.shape == few.shape
    assert copy.deepcopy(layer).weight_only_below == 15
    with epiloq.config(batch_invariant=True), pytest.raises(NotImplementedError, match=r"nn\.W4A8Fp4Linear"):
        layer(x)
