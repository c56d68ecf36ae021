"""Input gradients of convolutions and of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, silu

from epiloq.nn import (
    ExpertLinears,
    Fp8BlockExperts,
    Fp8BlockLinear,
    Fp8Experts,
    Fp8Linear,
    GatedExperts,
    Int8Conv2d,
    Int8Experts,
    Int8Linear,
    WeightOnlyConv2d,
)

CONVOLUTIONS: dict[str, Callable[..., Any]] = {
    "int8": lambda conv, **clamp: Int8Conv2d.from_conv2d(conv, input_scale=0.02, input_zero_point=-3, **clamp),
    "w4a16": lambda conv, **clamp: WeightOnlyConv2d.from_conv2d(conv, **clamp),
    "w8a16-zero": lambda conv, **clamp: WeightOnlyConv2d.from_conv2d(conv, bits=8, group_size=8, zeros="zero", **clamp),
}
# in, out, kernel, and what nn.Conv2d takes besides.
PLACES: list[tuple[int, int, Any, dict[str, Any]]] = [
    (8, 12, 3, {"padding": 1}),
    (8, 12, (2, 3), {"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1)}),
    (16, 8, 1, {}),
    (8, 8, 3, {"groups": 8, "stride": 2}),
    (16, 12, 3, {"groups": 2, "padding": "same"}),
]


@pytest.fixture(autouse=True)
def exact_float32_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own product in the gradient would round float32 to TF32 on a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def taps_of(layer: Any) -> Tensor:
    if isinstance(layer, Int8Conv2d):
        return (layer.weight_q.double() * layer.weight_scale.double().view(-1, 1, 1, 1)).permute(0, 3, 1, 2)
    return layer.packed.dequantize().double()


def exact_convolution(layer: Any, x: Tensor, taps: Tensor) -> Tensor:
    place = layer.geometry
    top, bottom, left, right = place.padding
    return conv2d(pad(x, (left, right, top, bottom)), taps, None, place.stride, 0, place.dilation, place.groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_gradients_of_images(kind: str, place: Any, dtype: torch.dtype, device: str, seed: int) -> None:
    inputs, outputs, kernel, more = place
    layer = CONVOLUTIONS[kind](nn.Conv2d(inputs, outputs, kernel, device=device, dtype=dtype, **more))
    layer.bias.requires_grad = True
    x = torch.randn(2, inputs, 9, 10, device=device).to(dtype).requires_grad_()
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(y, layer(x))
    dy = torch.randn_like(y)
    y.backward(dy)
    exact_x = x.detach().double().requires_grad_()
    exact_convolution(layer, exact_x, taps_of(layer)).backward(dy.double())
    assert x.grad is not None and exact_x.grad is not None and x.grad.dtype == dtype
    bound = 8 * torch.finfo(dtype).eps * exact_x.grad.abs().max()
    assert ((x.grad.double() - exact_x.grad).abs() <= bound).all()
    torch.testing.assert_close(layer.bias.grad, dy.sum((0, 2, 3)).to(layer.bias.dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_clamped_outputs_have_no_gradient(kind: str, device: str, seed: int) -> None:
    layer = CONVOLUTIONS[kind](nn.Conv2d(8, 8, 3, device=device), clamp=(0.0, 0.5))
    x = torch.randn(2, 8, 7, 7, device=device, requires_grad=True)
    y = layer(x)
    inside = (y > 0) & (y < 0.5)
    assert inside.any() and not inside.all()
    dy = torch.randn_like(y)
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    exact_convolution(layer, exact, taps_of(layer)).backward(dy.double() * inside)
    torch.testing.assert_close(x.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_transforms_and_compilers(kind: str, device: str, seed: int) -> None:
    layer = CONVOLUTIONS[kind](nn.Conv2d(8, 8, 3, padding=1, device=device), clamp=(-1.0, 1.0))
    x = torch.randn(2, 8, 5, 6, device=device)

    def total(x: Tensor) -> Tensor:
        return layer(x).square().sum() + x.sum()

    given = x.clone().requires_grad_()
    total(given).backward()
    close: Any = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.func.grad(total)(x), given.grad, **close)
    torch.testing.assert_close(torch.func.jvp(total, (x,), (x,))[1], (given.grad * x).sum(), rtol=1e-3, atol=1e-3)
    each = torch.vmap(torch.func.grad(lambda image: total(image[None])))(x)
    torch.testing.assert_close(each, given.grad, **close)
    for f in (torch.func.grad(total), None):
        torch._dynamo.reset()
        if f is not None:
            found = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
        else:
            again = x.clone().requires_grad_()
            torch.compile(total, fullgraph=True, backend="aot_eager")(again).backward()
            found = again.grad
        torch.testing.assert_close(found, given.grad, **close)


def test_int8_outputs_are_refused_under_transforms() -> None:
    """Rather than give zeros."""
    layer = Int8Conv2d.from_conv2d(nn.Conv2d(8, 8, 3), input_scale=0.02, input_zero_point=0, output=(0.1, 0))
    x = torch.randn(1, 8, 5, 5)
    with pytest.raises(NotImplementedError, match="no gradient with int8 output"):
        torch.func.grad(lambda x: layer(x).float().sum())(x)
    assert not layer(x.requires_grad_()).requires_grad


def test_a_bias_that_is_trained_is_used(seed: int) -> None:
    layer = Int8Conv2d.from_conv2d(nn.Conv2d(8, 8, 3), input_scale=0.02, input_zero_point=0)
    x = torch.randn(1, 8, 5, 5)
    before = layer(x)
    with torch.no_grad():
        layer.bias += 1
    torch.testing.assert_close(layer(x), before + 1)


EXPERTS = [Int8Experts, Fp8Experts, Fp8BlockExperts]


def dense(experts: Any, expert: int) -> Tensor:
    state = experts.state_dict()
    q, scale = state["weight_q"][expert], state[experts.SCALE][expert].double()
    weight = (q.view(torch.float8_e4m3fn) if q.dtype == torch.uint8 else q).float().double()
    if isinstance(experts, Fp8BlockExperts):
        rows, columns = (torch.arange(size, device=scale.device) // 128 for size in weight.shape)
        return weight * scale[rows[:, None], columns]
    return weight * scale[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", EXPERTS)
def test_gradients_of_experts_rows(kind: Any, dtype: torch.dtype, device: str, seed: int) -> None:
    n, k = 140, 150
    experts = kind.from_weight(torch.randn(4, n, k, device=device) * 0.1)
    assert torch.allclose(experts.dequantized_weight().double(), torch.stack([dense(experts, e) for e in range(4)]))
    eps = 4 * torch.finfo(dtype).eps + 2**-18
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32, device=device)
    x = torch.randn(11, k, device=device).to(dtype).requires_grad_()
    y = experts(x, offs=ends)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None and (x.grad[9:] == 0).all()
    for expert, (begin, end) in enumerate(((0, 3), (3, 3), (3, 8), (8, 9))):
        w, rows = dense(experts, expert), dy[begin:end].double()
        assert ((x.grad[begin:end].double() - rows @ w).abs() <= eps * (rows.abs() @ w.abs())).all()
    counts = torch.tensor([0, 2, 3, 1], dtype=torch.int32, device=device)
    x = torch.randn(4, 3, k, device=device).to(dtype).requires_grad_()
    y = experts(x, masked_m=counts)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None
    for expert, count in enumerate(counts.tolist()):
        w, rows = dense(experts, expert), dy[expert, :count].double()
        assert ((x.grad[expert, :count].double() - rows @ w).abs() <= eps * (rows.abs() @ w.abs())).all()
        assert (x.grad[expert, count:] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_under_transforms_and_compilers(kind: Any, device: str, seed: int) -> None:
    experts = kind.from_weight(torch.randn(3, 24, 32, device=device) * 0.1)
    ends = torch.tensor([3, 3, 5], dtype=torch.int32, device=device)
    x = torch.randn(5, 32, device=device)

    def total(x: Tensor) -> Tensor:
        return experts(x, offs=ends).square().sum() + x.sum()

    given = x.clone().requires_grad_()
    total(given).backward()
    torch.testing.assert_close(torch.func.grad(total)(x), given.grad)
    for f in (torch.func.grad(total), lambda x: torch.autograd.grad(total(x), x)[0]):
        torch._dynamo.reset()
        found = torch.compile(total, fullgraph=True, backend="aot_eager") if f is None else f
        torch.testing.assert_close(found(x.clone().requires_grad_()), given.grad)
    torch._dynamo.reset()
    again = x.clone().requires_grad_()
    torch.compile(total, fullgraph=True, backend="aot_eager")(again).backward()
    torch.testing.assert_close(again.grad, given.grad)


@pytest.mark.parametrize("act_fn", [nn.SiLU(), nn.GELU()], ids=["silu", "gelu"])
@pytest.mark.parametrize("linear", [Int8Linear, Fp8Linear, Fp8BlockLinear])
def test_gradients_through_gated_experts(linear: Any, act_fn: nn.Module, device: str, seed: int) -> None:
    """Of hidden states and of the weights of experts, against the same experts in float64."""
    e, hidden, inner, tokens, top = 4, 48, 40, 7, 2
    layers = [
        {
            name: linear.from_linear(nn.Linear(i, o, bias=False, device=device))
            for name, i, o in (("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden))
        }
        for _ in range(e)
    ]
    linears = ExpertLinears(layers, act_fn)
    gated = GatedExperts.from_linears(linears)
    assert gated is not None
    x = torch.randn(tokens, hidden, device=device, requires_grad=True)
    index = torch.stack([torch.randperm(e, device=device)[:top] for _ in range(tokens)])
    weights = torch.rand(tokens, top, device=device, requires_grad=True)
    y = gated(x, index, weights)
    dy = torch.randn_like(y)
    y.backward(dy)
    with torch.no_grad():
        torch.testing.assert_close(y.detach(), gated(x, index, weights), rtol=0.05, atol=0.02)
    slow_x, slow_weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    linears(slow_x, index, slow_weights).backward(dy)
    # CUDA kernels write bfloat16 between the layers, on whose edges the next one's 8-bit activations differ.
    rounding = 2.0**-4 if device == "cuda" else 1e-3
    torch.testing.assert_close(x.grad, slow_x.grad, rtol=rounding, atol=rounding * slow_x.grad.abs().max().item())
    largest = slow_weights.grad.abs().max().item()
    torch.testing.assert_close(weights.grad, slow_weights.grad, rtol=rounding, atol=rounding * largest)
    # Rounding of activations aside, it is the derivative of the experts in floating point.
    exact_x = x.detach().double().requires_grad_()
    total = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    act: Any = silu if isinstance(act_fn, nn.SiLU) else act_fn
    for token in range(tokens):
        for j, expert in enumerate(index[token].tolist()):
            w = [layer.dequantized_weight().double() for layer in layers[expert].values()]
            row = act(exact_x[token] @ w[0].t()) * (exact_x[token] @ w[1].t())
            total[token] = total[token] + weights[token, j].detach().double() * (row @ w[2].t())
    total.backward(dy.double())
    assert exact_x.grad is not None and x.grad is not None
    # E4M3 rounds a number by up to 2^-4 of it; int8 by half a step of its token's range.
    of_activations = 0.03 if linear is Int8Linear else 2.0**-4
    assert (x.grad.double() - exact_x.grad).norm() <= of_activations * exact_x.grad.norm()
