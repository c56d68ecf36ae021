"""Derivatives are refused with an error; vmap is exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_torch_layer import linear, problem, same
from torch import Tensor

import epiloq
from reference import Problem


def forward_ad(p: Problem) -> Any:
    with torch.autograd.forward_ad.dual_level():
        scale = torch.autograd.forward_ad.make_dual(p.scale_a, p.scale_a)
        return epiloq.scaled_mm(p.a, p.b, scale, p.scale_b)


def product(p: Problem, scale_a: Tensor) -> Tensor:
    return epiloq.scaled_mm(p.a, p.b, scale_a, p.scale_b).float().sum()


@pytest.mark.parametrize(
    "derive",
    [
        lambda p: torch.func.grad(partial(product, p))(p.scale_a),
        lambda p: torch.func.jvp(partial(product, p), (p.scale_a,), (p.scale_a,)),
        lambda p: product(p, p.scale_a.clone().requires_grad_()).backward(),
        lambda p: epiloq.quantize_int8(p.scale_a.clone().requires_grad_())[1].sum().backward(),
        lambda p: epiloq.quantize_int8(p.scale_a.clone().requires_grad_(), granularity="tensor")[1].sum().backward(),
        forward_ad,
    ],
    ids=["func.grad", "func.jvp", "backward", "backward of a scale", "backward of a tensor's scale", "forward_ad"],
)
def test_derivatives_are_refused(seed: int, derive: Callable[[Problem], Any]) -> None:
    """Operations without derivatives raise instead of silently dropping the gradient."""
    p, _ = problem()
    with pytest.raises(
        NotImplementedError, match=r"epiloq.(scaled_mm|quantize_int8).* no (gradient|forward derivative)"
    ):
        derive(p)


_PACKED = epiloq.nn.WeightOnlyLinear.from_linear(torch.nn.Linear(64, 48, bias=False), group_size=32).packed
_BLOCKS = epiloq.nn.OnlineQuantLinear.from_linear(torch.nn.Linear(64, 48, bias=False)).prepared
_WITHOUT_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: epiloq.rms_norm(x, torch.ones(64)),
    "rms_norm_quant": lambda x: epiloq.rms_norm_quant(x, torch.ones(64))[1],
    "silu_and_mul": epiloq.silu_and_mul,
    "silu_and_mul_quant": lambda x: epiloq.silu_and_mul_quant(x)[1],
    "quantize_int8": lambda x: epiloq.quantize_int8(x)[1],
    "quantize_fp8": lambda x: epiloq.quantize_fp8(x)[1],
    "quantize_blockwise_int8": lambda x: epiloq.quantize_blockwise_int8(x, 32)[1],
    "weight_only_mm": lambda x: epiloq.weight_only_mm(x, _PACKED),
    "online_quant_mm": lambda x: epiloq.online_quant_mm(x, _BLOCKS),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", _WITHOUT_GRADIENT)
def test_compiled_functions_refuse_a_backward_pass(name: str, dynamic: bool, seed: int) -> None:
    """Otherwise only the other addend would contribute to the gradient. The forward pass alone raises nothing."""

    def total(x: Tensor) -> Tensor:
        return x.sum() + _WITHOUT_GRADIENT[name](x).sum()

    torch.compiler.reset()
    x = torch.randn(3, 64, requires_grad=True)
    y = torch.compile(total, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x)
    torch.testing.assert_close(y.detach(), total(x.detach()))
    with pytest.raises(NotImplementedError, match=rf"epiloq\.{name} has no gradient"):
        y.backward()


def test_operators_by_name_refuse_a_backward_pass(seed: int) -> None:
    x = torch.randn(3, 64, requires_grad=True)
    y = torch.ops.epiloq.silu_and_mul(x)
    with pytest.raises(NotImplementedError, match=r"epiloq\.silu_and_mul has no gradient"):
        y.sum().backward()


def test_forward_with_gradients_on(seed: int, device: str) -> None:
    """A module's bias and activations may require grad while nobody asks for a gradient."""
    p, x = problem(device=device)
    expected = linear(p, x)
    p.bias = torch.nn.Parameter(p.bias)
    assert same(linear(p, x.clone().requires_grad_()), expected)
    compiled = torch.compile(partial(linear, p), fullgraph=True, backend="aot_eager")
    assert same(compiled(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right_or_refused(seed: int) -> None:
    p, _ = problem(4, 8, 16)
    batch = torch.randint(-128, 128, (3, 4, 16), dtype=torch.int8)
    weights = torch.randint(-128, 128, (3, 8, 16), dtype=torch.int8)

    def call(a: Tensor, weight: Tensor) -> Tensor:
        return epiloq.scaled_mm(a, weight.t(), p.scale_a, p.scale_b, p.bias, out_dtype=torch.float16)

    for dims, args in (((0, None), (batch, p.weight)), ((None, 0), (p.a, weights)), ((0, 0), (batch, weights))):
        slices = [[arg[i] if dim == 0 else arg for dim, arg in zip(dims, args, strict=True)] for i in range(3)]
        assert torch.equal(torch.vmap(call, dims)(*args), torch.stack([call(*pair) for pair in slices]))
    x = torch.randn(3, 4, 16)
    quantised = torch.vmap(lambda part: epiloq.quantize_int8(part, symmetric=False, pad_to=5))(x)
    assert same(quantised, epiloq.quantize_int8(x, symmetric=False, pad_to=5))
    out = torch.zeros(4, 8, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="out="):
        torch.vmap(lambda a: epiloq.scaled_mm(a, p.b, p.scale_a, p.scale_b, out=out))(batch)
    assert (out == 0).all()
