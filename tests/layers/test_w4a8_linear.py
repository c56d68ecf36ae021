"""epiloq.nn.W4A8Linear: its numbers, its life, and what it refuses."""

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
from epiloq.nn import W4A8Linear, WeightOnlyLinear
from weight_reference import make_weight

ACTIVATIONS = ("fp8", "int8")


def quantised(x: Tensor, activation: str) -> Tensor:
    """Tokens as the quantisers restore them, in float64."""
    if activation == "int8":
        q, scale, _ = epiloq.quantize_int8(x)
    else:
        q, scale = epiloq.quantize_fp8(x, granularity="token")
    return q.double() * scale.double()


@pytest.mark.parametrize("zeros", ["none", "zero"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_from_linear(seed: int, device: str, dtype: torch.dtype, activation: str, zeros: str) -> None:
    """The weight that `WeightOnlyLinear` has, by the tokens that the quantiser gives."""
    for k, n, group_size, leading in ((100, 17, 32, (3, 2)), (256, 40, 128, (20,)), (67, 9, -1, ()), (67, 9, 64, (0,))):
        linear = nn.Linear(k, n, dtype=dtype, device=device)
        options: dict[str, Any] = {"group_size": group_size, "zeros": zeros}
        layer = W4A8Linear.from_linear(linear, activation=activation, **options)
        same = WeightOnlyLinear.from_linear(linear, bits=4, **options)
        assert torch.equal(layer.dequantized_weight(), same.dequantized_weight())
        assert (layer.activation, layer.zeros, layer.bits) == (activation, zeros, 4)
        x = torch.randn(*leading, k, dtype=dtype, device=device)
        y = layer(x)
        assert y.shape == (*leading, n) and y.dtype == dtype and y.is_contiguous()
        rows, weight = quantised(x.reshape(-1, k), activation), layer.dequantized_weight().double()
        exact = rows @ weight.t() + linear.bias.double()
        size = rows.abs() @ weight.abs().t() + 1
        eps = torch.finfo(torch.bfloat16 if device == "cuda" else dtype).eps
        of_sums = 2.0**-23 * k**0.5  # as docs/numerics.md bounds sums of k products in fp32
        assert ((y.double().view(-1, n) - exact).abs() <= (2 * eps + of_sums) * size).all()


def layer_of(activation: str = "fp8", kind: str = "zero", *, act_order: bool = True) -> W4A8Linear:
    weight = make_weight(33, 100, 4, 32, kind, act_order=act_order)
    return W4A8Linear.from_packed(weight.packed, torch.randn(33).half(), activation=activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_from_packed_in_another_order(seed: int, activation: str) -> None:
    layer, x = layer_of(activation), torch.randn(2, 7, 100).half()
    rows, weight = quantised(x, activation), layer.dequantized_weight().double()
    assert layer.bias is not None
    exact = rows @ weight.t() + layer.bias.double()
    error = (layer(x).double() - exact).abs()
    assert (error <= 2.0**-10 * (rows.abs() @ weight.abs().t() + layer.bias.double().abs())).all()
    assert f"activation={activation}, group_size=32, zeros=zero, act_order=True" in repr(layer)


def test_tokens_are_independent(seed: int) -> None:
    layer, x = layer_of("int8"), torch.randn(9, 100)
    alone, together = torch.cat([layer(row) for row in x.split(1)]), layer(x)
    # One token may have its sums in another order: twice 100 roundings by 2^-24 of the sum of magnitudes, and as much
    # again for quantised magnitudes above x's.
    magnitudes = x.abs() @ layer.dequantized_weight().float().abs().t()
    assert ((together - alone).abs() <= 4 * 100 * 2.0**-24 * magnitudes).all()
    x[4] = float("nan")
    y = layer(x)
    assert y[4].isnan().all() and torch.equal(y[:4], together[:4]) and torch.equal(y[5:], together[5:])


@pytest.mark.parametrize("kind", ["symmetric", "zero"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_through_safetensors(seed: int, tmp_path: Path, kind: str, assign: bool) -> None:
    layer, x = layer_of("fp8", kind), torch.randn(4, 100).half()
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    state = load_file(tmp_path / "layer.safetensors")
    with torch.device("meta" if assign else "cpu"):
        fresh = W4A8Linear(100, 33, group_size=32, zeros="none" if kind == "symmetric" else kind, act_order=True)
    fresh.load_state_dict(state, strict=True, assign=assign)
    if not assign:
        fresh.half()
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(seed: int, duplicate: Callable[[Any], Any]) -> None:
    layer, x = layer_of(), torch.randn(4, 100).half()
    expected, other = layer(x), duplicate(layer)
    for parameter in layer.parameters():
        parameter.zero_()
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_into_one_graph(seed: int, device: str, activation: str) -> None:
    layer, x = layer_of(activation).to(device), torch.randn(2, 3, 100, device=device).half()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_meta_gives_meta() -> None:
    layer = W4A8Linear.from_linear(nn.Linear(100, 17, device="meta", dtype=torch.bfloat16), group_size=32)
    assert all(parameter.is_meta for parameter in layer.parameters())


OFFSETS = make_weight(33, 100, 4, 32, "offset").packed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: W4A8Linear(4, 4, activation="fp4"), "activation: expected one of fp8, int8, got 'fp4'"),
        (lambda: W4A8Linear(4, 4, zeros="offset"), "zeros: expected none or zero, got 'offset'"),
        (lambda: W4A8Linear(4, 0), "out_features: expected at least 1, got 0"),
        (lambda: W4A8Linear.from_packed(OFFSETS), "weight: expected 4 bits without real offsets"),
        (lambda: W4A8Linear.from_packed(make_weight(3, 4, 8).packed), "weight: expected 4 bits"),
        (lambda: W4A8Linear.from_linear(nn.Linear(4, 4), activation="none"), "activation: expected one of"),
        (lambda: W4A8Linear.from_linear(nn.Linear(4, 4).double()), "linear.weight: expected"),
        (lambda: W4A8Linear.from_linear(nn.Identity()), "linear: expected a torch.nn.Linear"),  # type: ignore[arg-type]
        (lambda: layer_of()(torch.randn(3, 99).half()), r"x: expected shape \[…, 100\], got \[3, 99\]"),
    ],
)
def test_refuses(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"W4A8Linear: {message}"):
        make()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weight_only_below(seed: int, device: str, activation: str) -> None:
    """Fewer tokens run as in a `WeightOnlyLinear`, bit for bit, with its gradient; the state dict is the same."""
    linear = nn.Linear(100, 17, dtype=torch.bfloat16, device=device)
    layer = W4A8Linear.from_linear(linear, activation=activation, group_size=32)
    alone = WeightOnlyLinear.from_packed(layer.packed, layer.bias)
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
