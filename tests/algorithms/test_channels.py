"""Which channel comes from which: grouped heads, permutations and repeats are found; what only looks alike is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from epiloq.quantize import fold_, smooth_scale, smoothquant_
from epiloq.quantize.algorithms.smoothquant import foldings
from epiloq.quantize.calibration.channels import channel_map, reduce_by_channel
from epiloq.quantize.calibration.inputs import observe


class Attention(nn.Module):
    """Heads that share values in groups, as in Llama 2 and later."""

    def __init__(self, width: int, heads: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, 6
        self.q = nn.Linear(width, heads * self.size, bias)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias) for _ in range(2))
        self.norm, self.o = nn.RMSNorm(width), nn.Linear(heads * self.size, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (
            layer(y)
            .unflatten(-1, (self.groups, self.size))
            .transpose(1, 2)
            .repeat_interleave(self.heads // self.groups, 1)
            for layer in (self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def expected(heads: int, groups: int, size: int = 6) -> list[int]:
    return [(h // (heads // groups)) * size + i for h in range(heads) for i in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1), (12, 3)])
def test_heads_that_share_values(seed: int, heads: int, groups: int, bias: bool, dtype: torch.dtype) -> None:
    model, x = Attention(20, heads, groups, bias).to(dtype), torch.randn(2, 9, 20, dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    found = channel_map(model.v, model.o, lambda: model(x))
    assert found is not None and found.tolist() == expected(heads, groups)
    for other in (model.q, model.k):
        assert channel_map(other, model.o, lambda: model(x)) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("size", [2.0**-12, 2.0**-8, 2.0**-4, 16.0])
def test_values_that_are_subnormal_in_float16(seed: int, size: float) -> None:
    """Some of them, or nearly all: below 2^-14 there are fewer bits, and sums of such values round another way."""
    model, x = Attention(20, 6, 2, True).half(), torch.randn(2, 64, 20).half()
    with torch.no_grad():
        for parameter in model.v.parameters():
            parameter.mul_(size)
    found = channel_map(model.v, model.o, lambda: model(x))
    assert found is not None and found.tolist() == expected(6, 2)
    assert channel_map(model.q, model.o, lambda: model(x)) is None


def test_searching_foldings_keeps_float16_weights(seed: int) -> None:
    model, x = nn.Sequential(Attention(64, 6, 2, True)).half().eval(), torch.randn(2, 9, 64).half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0**-9)
    before = copy.deepcopy(model.state_dict())
    foldings(model, observe(model, lambda m: m(x)), lambda module, name: True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("width", [1, 64])
def test_channel_map_of_an_independent_input_is_none(seed: int, width: int) -> None:
    first, second, x, other = nn.Linear(5, width), nn.Linear(7, 3), torch.randn(6, 5), torch.randn(6, 7)
    assert channel_map(first, second, lambda: (first(x), second(other))) is None


def test_any_order_and_many_channels(seed: int) -> None:
    first, second = nn.Linear(5, 600), nn.Linear(900, 3)
    order = torch.randint(0, 600, (900,))
    found = channel_map(first, second, lambda: second(first(torch.ones(4, 5))[:, order]))
    assert found is not None and torch.equal(found, order)


@pytest.mark.parametrize("between", [torch.relu, torch.tanh, lambda x: x + 1, lambda x: x + x.roll(1, -1)])
def test_channel_map_of_a_nonlinear_input_is_none(seed: int, between: object) -> None:
    first, second = nn.Linear(5, 8), nn.Linear(8, 3)
    x = torch.randn(6, 5)
    found = channel_map(first, second, lambda: second(between(first(x))))  # type: ignore[operator]
    if between is torch.relu:  # A power of two passes it; every channel has to be seen above zero.
        assert found is None or found.tolist() == list(range(8))
    else:
        assert found is None


def test_a_channel_that_is_never_seen(seed: int) -> None:
    first, second = nn.Linear(5, 8, bias=False), nn.Linear(8, 3)
    with torch.no_grad():
        first.weight[3] = 0
    assert channel_map(first, second, lambda: second(first(torch.randn(6, 5)))) is None


def test_one_value_for_channels_of_one_number(seed: int) -> None:
    values, channels = torch.tensor([1.0, 5.0, 3.0, 2.0]), torch.tensor([1, 0, 1, 0])
    assert reduce_by_channel(values, channels, "amax").tolist() == [3, 5, 3, 5]
    assert reduce_by_channel(values, channels, "mean").tolist() == [2, 3.5, 2, 3.5]
    assert reduce_by_channel(values, None, "amax") is values
    weights = [torch.randn(7, 4)]
    scale = smooth_scale(values, weights, 0.5, channels)
    assert scale[0] == scale[2] and scale[1] == scale[3]
    column = weights[0].abs().amax(0)
    assert float(scale[0]) == pytest.approx((3 / float(column[[0, 2]].max())) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_folding_values_into_grouped_heads_changes_nothing(seed: int, bias: bool) -> None:
    model, x = Attention(20, 6, 2, bias).eval(), torch.randn(3, 11, 20)
    with torch.no_grad():
        model.v.weight[::5] *= 30
    before, rows = model(x), model.v.weight.detach().clone()
    channels = torch.tensor(expected(6, 2))
    scale = (torch.rand(12) + 0.5)[channels]
    fold_(model.v, [model.o], scale, channels)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    ratio = (rows / model.v.weight).mean(1)
    torch.testing.assert_close(ratio[channels], scale)


def test_smoothquant_finds_values_by_itself(seed: int) -> None:
    model, x = Attention(20, 6, 2, True).eval(), torch.randn(3, 11, 20)
    before = model(x)
    smoothed = {s.producer: s for s in smoothquant_(nn.Sequential(model), lambda m: m(x))}
    assert {name: s.consumers for name, s in smoothed.items()} == {
        "0.norm": ("0.q", "0.k", "0.v"),
        "0.v": ("0.o",),
    }
    assert smoothed["0.v"].scale.shape == (36,) and (smoothed["0.v"].scale != 1).any()
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


def test_values_with_other_readers_are_not_folded(seed: int) -> None:
    class Peeking(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.v(self.norm(x)).sum(-1, keepdim=True)

    model, x = Peeking(20, 6, 2, False).eval(), torch.randn(3, 11, 20)
    assert "0.v" not in {s.producer for s in smoothquant_(nn.Sequential(model), lambda m: m(x))}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads_on_a_gpu(seed: int, dtype: torch.dtype) -> None:
    """Whatever attention kernel runs there, powers of two pass it exactly."""
    model = Attention(20, 6, 2, True).to("cuda", dtype)
    x = torch.randn(2, 64, 20, device="cuda", dtype=dtype)
    found = channel_map(model.v, model.o, lambda: model(x))
    assert found is not None and found.tolist() == expected(6, 2)
    assert channel_map(model.q, model.o, lambda: model(x)) is None
