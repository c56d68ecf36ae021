"""Fp4Experts, the layer of GPT-OSS's experts in MXFP4: against float64, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fp4_reference
from epiloq.nn import Fp4Experts

EXPERTS, HIDDEN, INTERMEDIATE = 5, 64, 96


def blocks(experts: Fp4Experts, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random tensors as the checkpoints hold them."""
    state = {name: torch.randint(0, 256, shape, dtype=torch.uint8) for name, shape in experts.shapes().items()}
    for name, tensor in state.items():
        if name.endswith("scales"):
            state[name] = tensor % 6 + 120
        if name.endswith("bias"):
            state[name] = torch.randn(tensor.shape).to(dtype)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_float64(dtype: torch.dtype, seed: int, device: str) -> None:
    tokens, top_k = 11, 3
    outline = Fp4Experts(EXPERTS, HIDDEN, INTERMEDIATE, limit=2.0, device="meta", dtype=dtype)
    state = blocks(outline, dtype)
    experts = outline.from_blocks(state).to(device)
    assert all(torch.equal(tensor.cpu(), state[name]) for name, tensor in experts.file_state().items())
    x = torch.randn(tokens, HIDDEN).to(dtype)
    index = torch.rand(tokens, EXPERTS).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k).to(dtype)
    found = experts(x.to(device), index.to(device), weights.to(device))
    wide = {
        name: fp4_reference.dequantized(blocks.flatten(2).flatten(0, 1), state[f"{name}_scales"].flatten(0, 1), None, k)
        for name, k in (("gate_up_proj", HIDDEN), ("down_proj", INTERMEDIATE))
        for blocks in [state[f"{name}_blocks"]]
    }
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token in range(tokens):
        for place in range(top_k):
            expert = int(index[token, place])
            gate_up = wide["gate_up_proj"].view(EXPERTS, -1, HIDDEN)[expert] @ x[token].double()
            gate_up += state["gate_up_proj_bias"][expert].double()
            gate, up = gate_up[::2].clamp(max=2.0), gate_up[1::2].clamp(-2.0, 2.0)
            gated = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            down = (
                wide["down_proj"].view(EXPERTS, HIDDEN, -1)[expert] @ gated + state["down_proj_bias"][expert].double()
            )
            expected[token] += weights[token, place].double() * down
    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert found.dtype == dtype and error < (1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gates_with_and_without_gradients(dtype: torch.dtype, seed: int, device: str) -> None:
    """Rounded once without gradients, and at each step with them."""
    experts, eps = Fp4Experts(2, 32, 64, dtype=dtype), torch.finfo(dtype).eps
    rows = (4 * torch.randn(65, 128)).to(dtype).to(device)
    gate, up = rows.cpu().double()[:, ::2].clamp(max=7), rows.cpu().double()[:, 1::2].clamp(-7, 7)
    exact = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    for given, bound in ((rows, 2 * eps), (rows.clone().requires_grad_(), 8 * eps)):
        found = experts._gated(given)
        assert found.dtype == dtype and found.requires_grad == given.requires_grad
        assert float((found.detach().cpu().double() - exact).norm() / exact.norm()) < bound


def test_gradients_reach_the_input(seed: int) -> None:
    # Without limits, at which the slope is another one on either side.
    outline = Fp4Experts(2, 32, 32, limit=1e6, device="meta")
    experts = outline.from_blocks(blocks(outline, torch.float32))
    x = torch.randn(3, 32, requires_grad=True)
    index, weights = torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    v, dy = torch.randn(3, 32), torch.randn(3, 32)
    (dx,) = torch.autograd.grad(experts(x, index, weights), x, dy)
    step = 1e-2
    with torch.no_grad():
        slope = ((experts(x + step * v, index, weights) - experts(x - step * v, index, weights)) * dy).sum() / 2 / step
    torch.testing.assert_close((dx * v).sum(), slope, rtol=0.02, atol=0.02)


def test_no_tokens_and_wrong_inputs() -> None:
    experts = Fp4Experts(3, 32, 64)
    none = experts(torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert none.shape == (0, 32)
    for arguments, text in (
        ((torch.zeros(2, 31), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)), r"hidden_states: .*\[T, 32\]"),
        ((torch.zeros(2, 32), torch.full((2, 1), 3), torch.zeros(2, 1)), "top_k_index: expected indices from 0 to 2"),
        ((torch.zeros(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 2)), "top_k_weights: expected"),
    ):
        with pytest.raises(ValueError, match=text):
            experts(*arguments)
    for sizes, text in (((3, 33, 64), "hidden: expected a multiple of 32"), ((0, 32, 32), "experts: expected")):
        with pytest.raises(ValueError, match=text):
            Fp4Experts(*sizes)
