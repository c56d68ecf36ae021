"""Shards of layers of every scheme, of fresh random sizes and cuts: their weights are the layer's, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epiloq.parallel import join, shard_columns, shard_rows
from epiloq.schemes import SCHEMES, available

# Around the ends of groups and blocks, and below one.
INPUTS = (1, 3, 17, 31, 90, 127, 128, 129, 200, 257, 300)
OUTPUTS = (1, 2, 15, 33, 58, 130, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDS = 3


def one_of(choices: tuple[Any, ...]) -> Any:
    return choices[int(torch.randint(len(choices), ()))]


def cuts(size: int) -> list[tuple[int, int]]:
    """One to four parts of any lengths."""
    inner = torch.randperm(size - 1)[: int(torch.randint(4, ()))] + 1 if size > 1 else torch.empty(0)
    ends = [0, *sorted(int(end) for end in inner), size]
    return list(itertools.pairwise(ends))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


@pytest.mark.parametrize("scheme", available())
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_any_size_and_cut(seed: int, scheme: str, along: str) -> None:
    for _ in range(ROUNDS):
        k, n, dtype = one_of(INPUTS), one_of(OUTPUTS), one_of(DTYPES)
        linear = nn.Linear(k, n, bias=bool(torch.randint(2, ()))).to(dtype)
        seen = {"input_scale": 0.05, "input_zero_point": 7} if SCHEMES[scheme].static else {}
        layer: Any = SCHEMES[scheme].convert(linear, **seen)
        x = torch.randn(5, k).clamp(-4, 4).to(dtype)
        case = scheme, k, n, dtype
        weight, whole, parts = layer.dequantized_weight(), layer(x), []
        for begin, end in cuts(n if along == "rows" else k):
            part: Any = (shard_rows if along == "rows" else shard_columns)(layer, begin, end)
            parts.append(part)
            own = weight[begin:end] if along == "rows" else weight[:, begin:end]
            assert torch.equal(part.dequantized_weight(), own), (*case, begin, end)
            assert part.weight.shape == own.shape and torch.equal(part.weight.float(), own.to(dtype).float())
            given = x if along == "rows" else x[:, begin:end]
            y = part(given)
            if along == "rows" and "int8" in scheme:
                assert torch.equal(y, whole[:, begin:end]), (*case, begin, end)
            exact, reach = given.double() @ own.double().t(), given.double().abs() @ own.double().abs().t()
            if along == "rows" and layer.bias is not None:
                exact = exact + layer.bias[begin:end].double()
                reach = reach + layer.bias[begin:end].double().abs()
            # Floats are rounded to the type of the output; activations, by the coarsest of schemes, to a 16th of each
            # or a 127th of the largest.
            largest = given.double().abs().amax(-1, keepdim=True) @ own.double().abs().sum(1)[None]
            bound = 2.0 ** (-7 if dtype == torch.bfloat16 else -10) * (reach + 1)
            if "a16" not in scheme:
                bound = bound + reach / 16 + largest / 100 + 0.05 * own.double().abs().sum(1)
            assert ((y.double() - exact).abs() <= bound).all(), (*case, begin, end)
        again: Any = join(parts)
        state, expected = again.state_dict(), layer.state_dict()
        assert state.keys() == expected.keys(), case
        assert all(same_bits(state[name], tensor) for name, tensor in expected.items()), case
        assert torch.equal(again(x), whole), case
