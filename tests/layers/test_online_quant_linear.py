"""epiloq.nn.OnlineQuantLinear: against its own weight in float64, state dicts, dtypes, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from blockwise_reference import RawWeight, assert_close
from epiloq.nn import OnlineQuantLinear
from int8_reference import make_linear

KINDS = [(8, True), (8, False), (4, True), (4, False)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features", "group"), [(1, 1, 32), (100, 17, 32), (576, 40, 128)])
def test_matches_float64(
    seed: int, in_features: int, out_features: int, group: int, dtype: torch.dtype, bits: int, symmetric: bool
) -> None:
    linear = make_linear(in_features, out_features, dtype)
    layer = OnlineQuantLinear.from_linear(linear, bits=bits, group_size=group, symmetric=symmetric)
    x = torch.randn(5, in_features).mul_(torch.rand(5, 1) * 4).add_(0.3).to(dtype)
    q, scale, offset = layer.prepared.unpack()
    assert (offset is None) == symmetric
    assert_close(layer(x), x, RawWeight(q, scale, offset, group, bits), linear.bias.detach())
    # The weights are the nearest that there are.
    error = (layer.prepared.dequantize() - linear.weight.detach().float()).abs()
    step = scale.repeat_interleave(group, 1)[:, :in_features]
    assert (error <= 0.502 * step + 1e-6).all()


@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
def test_constant_and_zero_blocks(bits: int, symmetric: bool) -> None:
    linear = nn.Linear(64, 3, bias=False)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.weight[1:2], 0.3)
    layer = OnlineQuantLinear.from_linear(linear, bits=bits, group_size=32, symmetric=symmetric)
    torch.testing.assert_close(layer.prepared.dequantize(), linear.weight.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("leading", [(), (0,), (1,), (2, 3), (2, 0, 3)])
def test_leading_dimensions_and_views(seed: int, leading: tuple[int, ...]) -> None:
    layer = OnlineQuantLinear.from_linear(make_linear(33, 17), group_size=32)
    x = torch.randn(*leading, 33)
    y = layer(x)
    assert y.shape == (*leading, 17) and y.is_contiguous()
    assert torch.equal(y.reshape(-1, 17), layer(x.reshape(-1, 33)))
    columns = torch.randn(33, 5).t()
    assert torch.equal(layer(columns), layer(columns.contiguous()))


def unpacked(layer: OnlineQuantLinear) -> dict[str, torch.Tensor]:
    """The state of a layer as files have it."""
    q, scale, offset = layer.prepared.unpack()
    if layer.bits == 4:
        low, high = torch.nn.functional.pad(q, (0, q.shape[1] % 2)).view(torch.uint8).view(q.shape[0], -1, 2).unbind(2)
        q = ((low & 15) | (high << 4)).view(torch.int8)
    assert torch.equal(layer.file_state()["weight"], q)
    state = {"weight": q, "weight_scale": scale, "weight_offset": offset, "bias": layer.bias}
    return {name: tensor.detach() for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(("bits", "symmetric"), KINDS)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(seed: int, bits: int, symmetric: bool, assign: bool) -> None:
    layer = OnlineQuantLinear.from_linear(make_linear(101, 17), bits=bits, group_size=32, symmetric=symmetric)
    state = unpacked(layer)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    assert shapes["weight"] == (torch.int8, (17, 101 if bits == 8 else 51))
    assert shapes["weight_scale"] == (torch.float32, (17, 4))
    assert ("weight_offset" in shapes) != symmetric and shapes["bias"] == (torch.float32, (17,))
    with torch.device("meta" if assign else "cpu"):
        other = OnlineQuantLinear(101, 17, bits=bits, group_size=32, symmetric=symmetric)
    model, values = nn.Sequential(other), other.weight_q.data_ptr()
    model.load_state_dict({f"0.{name}": tensor.clone() for name, tensor in state.items()}, assign=assign)
    x = torch.randn(3, 101)
    assert torch.equal(model(x), layer(x))
    assert assign or other.weight_q.data_ptr() == values


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": torch.zeros(17, 100, dtype=torch.int8)}, "weight: expected torch.int8"),
        ({"weight_scale": torch.zeros(17, 3)}, "weight_scale: expected torch.float32"),
        ({"weight_scale": torch.zeros(17, 4, dtype=torch.float16)}, "weight_scale: expected torch.float32"),
        ({"bias": torch.zeros(16)}, "bias"),
        ({"more": torch.zeros(1)}, "Unexpected"),
        ({"weight": None}, "Missing"),
    ],
)
def test_state_dicts_that_do_not_fit(seed: int, change: dict[str, torch.Tensor | None], text: str) -> None:
    layer = OnlineQuantLinear.from_linear(make_linear(101, 17), group_size=32)
    x = torch.randn(3, 101)
    before = layer(x)
    state = {name: t for name, t in (unpacked(layer) | change).items() if t is not None}
    with pytest.raises(RuntimeError, match=text):
        layer.load_state_dict(state)
    assert torch.equal(layer(x), before)


def test_casts_move_the_bias_alone(seed: int) -> None:
    layer = OnlineQuantLinear.from_linear(make_linear(64, 16), group_size=32)
    expected = layer(torch.ones(2, 64))
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.bias is not None and half.bias.dtype == torch.bfloat16
    assert half.weight_parameters.dtype == torch.float32
    torch.testing.assert_close(half(torch.ones(2, 64)), expected, rtol=0, atol=1e-2)
    assert half(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_meta_and_repr() -> None:
    with torch.device("meta"):
        layer = OnlineQuantLinear.from_linear(nn.Linear(64, 16), bits=4, group_size=64, symmetric=False)
        assert layer.weight_q.is_meta and layer(torch.empty(2, 64)).shape == (2, 16)
    assert "bits=4, group_size=64, symmetric=False" in repr(layer)
    assert layer.weight_bytes == 16 * 64 + 2 * 3 * 16 * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"bits": 3}, "bits"), ({"group_size": 0}, "group_size"), ({"in_features": 0}, "in_features")],
)
def test_bad_arguments(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=f"OnlineQuantLinear: {text}: expected"):
        OnlineQuantLinear(**({"in_features": 8, "out_features": 8} | arguments))
    with pytest.raises(ValueError, match=r"OnlineQuantLinear: linear: expected a torch.nn.Linear"):
        OnlineQuantLinear.from_linear(nn.Embedding(3, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"OnlineQuantLinear: x: expected shape"):
        OnlineQuantLinear(8, 8)(torch.ones(9))


def test_compiles_whole(seed: int) -> None:
    layer = OnlineQuantLinear.from_linear(make_linear(100, 17), bits=4, group_size=32, symmetric=False)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 7):
        x = torch.randn(rows, 100)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
