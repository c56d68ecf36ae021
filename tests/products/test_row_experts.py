"""epiloq.nn.Int8Experts and Fp8Experts: against the linear layers of their kinds, and their state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from epiloq.nn import Fp8Experts, Fp8Linear, Int8Experts, Int8Linear

KINDS = [(Int8Experts, Int8Linear), (Fp8Experts, Fp8Linear)]
Kind = tuple[type[Int8Experts] | type[Fp8Experts], type[Int8Linear] | type[Fp8Linear]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS, ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (17, 100)])
@pytest.mark.parametrize("counts", [(3, 0, 5), (1, 7, 0), (0, 0, 0)])
def test_matches_linear_layers(
    counts: tuple[int, ...], n: int, k: int, dtype: torch.dtype, kind: Kind, seed: int, device: str
) -> None:
    """Each expert as the layer with a scale a token and a channel, which is tested against float64."""
    experts, linear = kind
    weight, x = torch.randn(3, n, k).to(dtype).to(device), torch.randn(3, 9, k).to(dtype).to(device)
    layer = experts.from_weight(weight)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    masked = layer(x, masked_m=masked_m)
    rows = torch.cat([x[e, :count] for e, count in enumerate(counts)])
    sorted_rows = layer(rows, offs=masked_m.cumsum(0, dtype=torch.int32))
    assert (masked.shape, masked.dtype) == ((3, 9, n), dtype)
    assert (sorted_rows.shape, sorted_rows.dtype) == ((sum(counts), n), dtype)
    rounding = 2.0**-8 if dtype == torch.bfloat16 or device == "cuda" else 2.0**-11
    for expert, (part, count) in enumerate(zip(sorted_rows.split(counts), counts, strict=True)):
        plain = nn.Linear(k, n, bias=False, device=device, dtype=dtype)
        plain.weight.data.copy_(weight[expert])
        expected = linear.from_linear(plain)(x[expert, :count])
        for got in (part, masked[expert, :count]):
            torch.testing.assert_close(got, expected, rtol=2 * rounding, atol=2.0**-8 * k**0.5 * 2)
            assert device == "cuda" or torch.equal(got, expected)


@pytest.mark.parametrize("experts", [Int8Experts, Fp8Experts])
def test_state(seed: int, experts: type[Int8Experts] | type[Fp8Experts]) -> None:
    layer, x = experts.from_weight(torch.randn(2, 17, 150)), torch.randn(6, 150)
    offs = torch.tensor([2, 6], dtype=torch.int32)
    expected = layer(x, offs=offs)
    state = layer.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "weight_q": (2, 17, 150),
        "weight_scale": (2, 17),
    }
    fresh = experts(2, 150, 17, device="meta")
    fresh.load_state_dict(state, assign=True)
    for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half()):
        assert torch.equal(other(x, offs=offs), expected)
    assert layer.weight_bytes == 2 * (17 * 150 + 17 * 4 + 24 * 160 + 24 * 4)
    assert repr(layer) == f"{experts.__name__}(experts=2, in_features=150, out_features=17)"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, offs=offs), expected)
    assert torch.equal(layer(x.t().contiguous().t(), offs=offs), expected)


@pytest.mark.parametrize("experts", [Int8Experts, Fp8Experts])
def test_refuses(experts: type[Int8Experts] | type[Fp8Experts]) -> None:
    name = experts.__name__
    with pytest.raises(ValueError, match=f"{name}: experts: expected at least 1"):
        experts(0, 8, 8)
    with pytest.raises(ValueError, match=rf"{name}: weight: expected \[E, N, K\]"):
        experts.from_weight(torch.ones(4, 4))
    layer = experts(2, 8, 8)
    with pytest.raises(ValueError, match=r"x: expected shape \[…, 8\]"):
        layer(torch.ones(2, 9), offs=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="offs: expected either offs or masked_m, got neither"):
        layer(torch.ones(2, 8))
