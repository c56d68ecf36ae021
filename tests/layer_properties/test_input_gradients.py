"""Every layer with a frozen weight hands gradients on, exact for the integers that it stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4_reference
from epiloq.nn import (
    Fp4Linear,
    Fp8BlockLinear,
    OnlineQuantLinear,
    TableLinear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from epiloq.nn.base import frozen
from every_layer import FROM_LINEAR

Make = Callable[[nn.Linear], nn.Module]

LAYERS: dict[str, Make] = FROM_LINEAR | {
    "w4a16-zero": lambda linear: WeightOnlyLinear.from_linear(linear, group_size=32, zeros="zero"),
    "w2a16": lambda linear: WeightOnlyLinear.from_linear(linear, bits=2, group_size=64),
    "w3a16": lambda linear: WeightOnlyLinear.from_linear(linear, bits=3, group_size=-1),
    "w4a16-order": lambda linear: in_another_order(linear),
    "w4a8-fp8": lambda linear: W4A8Linear.from_linear(linear, group_size=32, zeros="zero"),
    "w4a8-int8": lambda linear: W4A8Linear.from_linear(linear, activation="int8", group_size=-1),
    "w4a16-mxfp4": lambda linear: Fp4Linear.from_linear(linear, format="mxfp4"),
    "w4a16-nvfp4": Fp4Linear.from_linear,
    "w4a8-mxfp4-fp8": W4A8Fp4Linear.from_linear,
    "w4a8-nvfp4-int8": lambda linear: W4A8Fp4Linear.from_linear(linear, format="nvfp4", activation="int8"),
    "table": lambda linear: of_a_table(linear),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def in_another_order(linear: nn.Linear) -> WeightOnlyLinear:
    """Input features permuted, and offsets."""
    import epiloq

    n, k = linear.weight.shape
    groups = -(-k // 32)
    scale, offset = torch.rand(n, groups) * 0.02 + 1e-3, torch.randn(n, groups) * 0.05
    q, perm = torch.randint(0, 16, (n, k)), torch.randperm(k)
    packed = epiloq.pack_weight(q, scale.half(), None, offset.half(), bits=4, group_size=32, perm=perm)
    return WeightOnlyLinear.from_packed(packed, linear.bias)


@torch.no_grad()
def of_a_table(linear: nn.Linear) -> TableLinear:
    """With scales that go on from row to row."""
    n, k = linear.weight.shape
    layer = TableLinear(k, n, linear.bias is not None, block_size=24, dtype=linear.weight.dtype)
    layer.weight_q.random_(0, 256)
    layer.weight_table.normal_()
    layer.weight_scale.uniform_(0.01, 0.03)
    if layer.bias is not None:
        layer.bias.copy_(linear.bias)
    return layer


def make(
    kind: str, k: int = 100, n: int = 61, dtype: torch.dtype = torch.float32, bias: bool = True, device: str = "cpu"
) -> tuple[nn.Module, Tensor]:
    """A layer, and in float64 the weight that its integers stand for."""
    layer = LAYERS[kind](nn.Linear(k, n, bias=bias, dtype=dtype)).to(device)
    return layer, weight_of(layer).double()


def weight_of(layer: Any) -> Tensor:
    """By the stored tensors' meaning as the classes document it, not by what the gradient uses."""
    n, k = layer.out_features, layer.in_features
    if isinstance(layer, (W4A8Linear, WeightOnlyLinear)):
        q, scale, other = layer.packed.unpack()
        width = k if layer.group_size == -1 else layer.group_size
        group = torch.arange(k, device=q.device) // width  # of the columns as they are packed
        other = torch.zeros_like(scale) if other is None else other
        q, scale, other = q.double(), scale.double()[:, group], other.double()[:, group]
        packed = scale * q + other if layer.weight_offset is not None else scale * (q - other)
        return packed if layer.weight_perm is None else packed[:, layer.weight_perm.argsort()]
    if isinstance(layer, TableLinear):
        flat = torch.stack((layer.weight_q >> 4, layer.weight_q & 15), 1).flatten()[: n * k].long()
        scale = layer.weight_scale.double().repeat_interleave(layer.block_size)[: n * k]
        return (layer.weight_table.double()[flat] * scale).view(n, k)
    if isinstance(layer, Fp4Linear):
        state = layer.file_state()
        factor = None if layer.weight_global_scale is None else 1 / layer.weight_global_scale
        return fp4_reference.dequantized(state["weight"], state["weight_scale"], factor, k)
    if isinstance(layer, OnlineQuantLinear):
        q, scale, offset = layer.prepared.unpack()
        group = torch.arange(k, device=q.device) // layer.group_size
        return q.double() * scale.double()[:, group] + (0 if offset is None else offset.double()[:, group])
    q = layer.weight_q
    weight = (q.view(torch.float8_e4m3fn) if q.dtype == torch.uint8 else q).float().double()
    if isinstance(layer, Fp8BlockLinear):
        rows, columns = (torch.arange(size, device=weight.device) // 128 for size in (n, k))
        return weight * layer.weight_scale_inv.double()[rows[:, None], columns]
    return weight * layer.weight_scale.double().view(-1, 1)


def assert_gradient(found: Tensor, dy: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Within the roundings of a product in `dtype`: of the weight's elements, of the sums, and of the result."""
    exact, size = dy.double() @ weight, dy.double().abs() @ weight.abs()
    assert found.dtype == dtype and found.shape == exact.shape
    bound = size * (3 * torch.finfo(dtype).eps + 2**-20) + torch.finfo(dtype).tiny
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_inputs(kind: str, dtype: torch.dtype, device: str, seed: int) -> None:
    for k, n, shape in ((100, 61, (5,)), (144, 64, (2, 3)), (16, 300, (1,)), (33, 7, (0,)), (32, 8, ())):
        layer, weight = make(kind, k, n, dtype, device=device)
        x = torch.randn(*shape, k, device=device).to(dtype).requires_grad_()
        y = layer(x)
        assert torch.allclose(layer.dequantized_weight().double(), weight)
        dy = torch.randn_like(y)
        with torch.no_grad():
            assert torch.equal(y, layer(x))  # what the layer gives without gradients
        y.backward(dy)
        assert x.grad is not None
        assert_gradient(x.grad, dy, weight, dtype)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_biases(kind: str, device: str, seed: int) -> None:
    """Which kernels may read padded, and read as it is after a step."""
    layer, _ = make(kind, device=device)
    bias = layer.bias
    bias.requires_grad = True
    x = torch.randn(2, 5, 100, device=device)
    for given in (x, x.clone().requires_grad_()):
        bias.grad = None
        y = layer(given)
        dy = torch.randn_like(y)
        y.backward(dy)
        assert bias.grad is not None and bias.grad.shape == bias.shape
        torch.testing.assert_close(bias.grad, dy.sum((0, 1)))
    with torch.no_grad():
        bias += 1
    rounding = 2.0**-7 if device == "cuda" else 1e-4  # CUDA kernels write bfloat16
    torch.testing.assert_close(layer(x), y + 1, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("kind", LAYERS)
def test_transforms_of_torch_func(kind: str, device: str, seed: int) -> None:
    """Never zeros in silence."""
    layer, weight = make(kind, 32, 24, device=device)
    w = weight.float()
    x = torch.randn(3, 32, device=device)
    dy = torch.randn(3, 24, device=device)

    def total(x: Tensor) -> Tensor:
        return (layer(x) * dy).sum()

    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.func.grad(total)(x), dy @ w, **close)
    torch.testing.assert_close(torch.func.jacrev(layer)(x[0]), w, **close)
    torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,))[1], x @ w.t(), **close)
    torch.testing.assert_close(torch.func.jacfwd(layer)(x[0]), w, **close)
    each = torch.vmap(torch.func.grad(lambda row, of: (layer(row) * of).sum()))(x, dy)
    torch.testing.assert_close(each, dy @ w, **close)


def test_second_derivatives(seed: int) -> None:
    """Of what surrounds a layer, which is linear itself."""
    layer, weight = make("w4a16", 32, 24)
    x, w = torch.randn(32), weight.float()
    second = torch.func.hessian(lambda x: layer(x.sin()).square().sum())(x)
    frozen_y = layer(x.sin()).detach()
    cos, inner = torch.diag(x.cos()), 2 * frozen_y @ w
    torch.testing.assert_close(second, 2 * cos @ w.t() @ w @ cos - torch.diag(inner * x.sin()), rtol=1e-3, atol=1e-4)


COMPILED = ["int8-static-azp", "fp8-token", "fp8-block", "w4a16-order", "w4a8-block"]


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled(kind: str, device: str, seed: int) -> None:
    layer, weight = make(kind, 32, 24, device=device)
    w = weight.float()
    x, dy = torch.randn(3, 32, device=device), torch.randn(3, 24, device=device)

    def beside(x: Tensor) -> Tensor:
        return (layer(x) * dy).sum() + x.sum()

    torch._dynamo.reset()
    given = x.clone().requires_grad_()
    torch.compile(beside, fullgraph=True, backend="aot_eager")(given).backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, dy @ w + 1, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    transformed = torch.compile(torch.func.grad(beside), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(transformed(x), dy @ w + 1, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    of_compiled = torch.func.grad(torch.compile(beside, backend="aot_eager"))
    torch.testing.assert_close(of_compiled(x), dy @ w + 1, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_large_weights_are_dequantised_in_chunks(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "_CHUNK", 128 * 100)
    layer, weight = make(kind, 100, 300)
    assert len(layer._chunks()) == 3
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 100).to(dtype).requires_grad_()
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        assert x.grad is not None
        assert_gradient(x.grad, dy, weight, dtype)
        torch.testing.assert_close(
            torch.func.jvp(layer, (x.detach(),), (x.detach(),))[1].float(),
            (x.double() @ weight.t()).float(),
            rtol=0.02,
            atol=0.1,
        )


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_weights_are_refused(kind: str, seed: int) -> None:
    """Where they are asked for by force; `requires_grad_` leaves them frozen."""
    layer, _ = make(kind)
    layer.requires_grad_(True)
    layer(torch.randn(3, 100))
    names = [name for name, t in layer.named_parameters() if t.is_floating_point() and t.itemsize > 1]
    assert len(names) > ("mxfp4" not in kind)  # whose scales are bytes
    for name in names:
        fresh, _ = make(kind)
        getattr(fresh, name).requires_grad = True
        if name == "bias":
            fresh(torch.randn(3, 100))
            continue
        with pytest.raises(NotImplementedError, match=rf"{type(layer).__name__} has no gradient of {name}, "):
            fresh(torch.randn(3, 100))


def test_float_copies_are_not_kept(seed: int) -> None:
    """Between forward and backward a graph holds the layer's own tensors alone."""
    layer, _ = make("w4a16", 128, 64)
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        layer(torch.randn(4, 128, requires_grad=True))
    own = {t.data_ptr() for t in layer.parameters()}
    assert held and all(t.data_ptr() in own for t in held)


def test_autocast_does_not_round_gradients(seed: int) -> None:
    layer, weight = make("int8")
    x = torch.randn(4, 100, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(dy)
    assert x.grad is not None
    assert_gradient(x.grad, dy, weight, torch.float32)
