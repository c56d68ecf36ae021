"""epiloq.nn.Fp8BlockExperts: against float64, and its state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from epiloq.nn import Fp8BlockExperts
from float8_reference import ACCURATE
from fp8_layer_reference import rounded, scales
from reference import ulp

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_expert(y: Tensor, x: Tensor, weight: Tensor, span_bound: float) -> None:
    a, w = rounded(x, scales(x, (1, 128))), rounded(weight, scales(weight, (128, 128)))
    reference, span = a @ w.t(), (a.square() @ w.t().square()).sqrt()
    assert ((y.double() - reference).abs() <= ulp(reference, y.dtype) + span_bound * span).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (17, 100), (300, 130)])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 1), (1, 7, 0), (0, 0, 0)])
def test_matches_float64(counts: tuple[int, ...], n: int, k: int, dtype: torch.dtype, seed: int, device: str) -> None:
    weight = torch.randn(3, n, k).to(dtype)
    layer = Fp8BlockExperts.from_weight(weight.to(device))
    bound = 2.0**-18 if device == "cpu" else ACCURATE
    most = 9
    x = torch.randn(3, most, k).to(dtype)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    masked = layer(x.to(device), masked_m=masked_m).cpu()
    rows = torch.cat([x[e, :count] for e, count in enumerate(counts)])
    sorted_rows = layer(rows.to(device), offs=masked_m.cumsum(0, dtype=torch.int32)).cpu()
    assert (masked.shape, masked.dtype) == ((3, most, n), dtype)
    assert (sorted_rows.shape, sorted_rows.dtype) == ((sum(counts), n), dtype)
    for expert, (part, count) in enumerate(zip(sorted_rows.split(counts), counts, strict=True)):
        assert_expert(part, x[expert, :count], weight[expert], bound)
        assert_expert(masked[expert, :count], x[expert, :count], weight[expert], bound)
        assert device == "cuda" or torch.equal(masked[expert, :count], part)


def test_columns_as_input(seed: int) -> None:
    layer, x = Fp8BlockExperts.from_weight(torch.randn(2, 16, 40)), torch.randn(40, 6)
    offs = torch.tensor([2, 6], dtype=torch.int32)
    assert torch.equal(layer(x.t(), offs=offs), layer(x.t().contiguous(), offs=offs))


def test_state(seed: int) -> None:
    layer, x = Fp8BlockExperts.from_weight(torch.randn(2, 17, 150)), torch.randn(6, 150)
    offs = torch.tensor([2, 6], dtype=torch.int32)
    expected = layer(x, offs=offs)
    state = layer.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "weight_q": (2, 17, 150),
        "weight_scale_inv": (2, 1, 2),
    }
    fresh = Fp8BlockExperts(2, 150, 17, device="meta")
    fresh.load_state_dict(state, assign=True)
    for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half()):
        assert torch.equal(other(x, offs=offs), expected)
    assert layer.weight_bytes == 2 * (17 * 150 + 24 * 160 + 2 * 4)
    assert repr(layer) == "Fp8BlockExperts(experts=2, in_features=150, out_features=17)"
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, offs=offs), expected)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="Fp8BlockExperts: experts: expected at least 1"):
        Fp8BlockExperts(0, 8, 8)
    with pytest.raises(ValueError, match=r"weight: expected \[E, N, K\]"):
        Fp8BlockExperts.from_weight(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"weight: .*float64"):
        Fp8BlockExperts.from_weight(torch.ones(1, 4, 4, dtype=torch.float64))
    layer = Fp8BlockExperts(2, 8, 8)
    with pytest.raises(ValueError, match=r"x: expected shape \[…, 8\]"):
        layer(torch.ones(2, 9), offs=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="offs: expected either offs or masked_m, got neither"):
        layer(torch.ones(2, 8))
    with pytest.raises(ValueError, match="offs"):
        layer(torch.ones(2, 8), offs=torch.tensor([2, 1], dtype=torch.int32))
