"""Layers under torch's tools: make_fx, linearisation, ensembles by vmap, functions without gradient, dynamic shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import epiloq
from every_layer import LAYERS, LINEAR, SIZES, arguments, run

FP8 = ("fp8", "fp8-block", "w4a8-fp8")


# Experts read on the host how many rows each has.
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("experts")])
def test_make_fx(name: str, seed: int) -> None:
    layer, given = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    graph = make_fx(lambda *x: run(name, layer, x))(*given)
    assert torch.equal(graph(*given), run(name, layer, given))


@pytest.mark.parametrize("name", LINEAR)
def test_linearised(name: str, seed: int) -> None:
    layer: Any = LAYERS[name](*SIZES[1])
    x, dx = torch.randn(2, 4, SIZES[1][0])
    y, push = torch.func.linearize(layer, x)
    assert torch.equal(y, layer(x))
    torch.testing.assert_close(push(dx), dx @ layer.dequantized_weight().T, rtol=1e-5, atol=1e-5)


# The scale of an int8 convolution's input is a number on the host, and so the same for all.
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "conv-int8"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_ensembles(name: str, size: tuple[int, int], seed: int) -> None:
    layers, given = [LAYERS[name](*size) for _ in range(2)], arguments(name, size[0])
    offs = {"offs": torch.tensor([2, 6], dtype=torch.int32)} if name.startswith("rows") else {}
    parameters, buffers = torch.func.stack_module_state(layers)

    def one(*state: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers[0], state, given, offs)  # type: ignore[no-any-return]

    together = torch.func.vmap(one)(parameters, buffers)
    for y, layer in zip(together, layers, strict=True):
        torch.testing.assert_close(y, run(name, layer, given), rtol=1e-5, atol=1e-6)


def test_embeddings_of_mapped_ids(seed: int) -> None:
    embedding = epiloq.nn.QuantizedEmbedding.from_embedding(nn.Embedding(20, 32))
    ids = torch.randint(20, (3, 4))
    assert torch.equal(torch.func.vmap(embedding)(ids), embedding(ids))


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


@pytest.mark.parametrize("name", [*LINEAR, "conv-w4a16", "rows-int8"])
def test_a_function_without_gradient_may_follow(name: str, seed: int) -> None:
    layer, (x, *rest) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    _Stop.apply(run(name, layer, (x.requires_grad_(), *rest))).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("name", FP8)
def test_gradients_through_two_layers_in_a_dynamic_graph(name: str, seed: int) -> None:
    model = nn.Sequential(LAYERS[name](32, 48), LAYERS[name](48, 16))
    x = torch.randn(5, 32, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    (found,), (expected,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, model))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["experts-w4a8-nvfp4"])
def test_experts_in_a_dynamic_graph(name: str, seed: int) -> None:
    layer, (x, *rest) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, *rest), layer(x, *rest))
    x.requires_grad_()
    (found,), (expected,) = (torch.autograd.grad(f(x, *rest).square().sum(), x) for f in (compiled, layer))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*LINEAR, "conv-int8", "conv-w4a16"])
def test_the_input_has_the_name_that_torch_gives_it(name: str, seed: int) -> None:
    layer, (x,) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    assert torch.equal(layer(input=x), layer(x))


@pytest.mark.parametrize("name", ["conv-int8", "conv-w4a16"])
def test_images_without_a_batch(name: str, seed: int) -> None:
    layer, (x,) = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    image = x[0].requires_grad_()
    y = layer(image)
    assert torch.equal(y, layer(x[:1])[0])
    if y.is_floating_point():
        (found,) = torch.autograd.grad(y.square().sum(), image)
        assert found.shape == image.shape and found.any()
    with pytest.raises(ValueError, match=r"x: expected \[B, 37, H, W\] or \[37, H, W\], got"):
        layer(x[0, 0])
