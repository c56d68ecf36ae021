"""Layers in eager torch go to C++ in one call, where they may, and give what their operations give one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from epiloq import _core
from epiloq.nn import (
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    Int8Linear,
    OnlineQuantLinear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from every_layer import FROM_LINEAR

CALLS: dict[type[nn.Module], str] = {
    Int8Linear: "int8_linear",
    Fp8Linear: "fp8_linear",
    Fp8BlockLinear: "fp8_block_linear",
    WeightOnlyLinear: "weight_only_linear",
    OnlineQuantLinear: "online_quant_linear",
    W4A8Linear: "w4a8_linear",
    Fp4Linear: "fp4_linear",
    W4A8Fp4Linear: "w4a8_fp4_linear",
}


class ThroughTheDispatcher(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def make_layer(
    kind: str, device: str, k: int = 144, n: int = 64, dtype: torch.dtype = torch.bfloat16, bias: bool = True
) -> nn.Module:
    return FROM_LINEAR[kind](nn.Linear(k, n, bias=bias, dtype=dtype, device=device)).requires_grad_(False)


def counted(monkeypatch: pytest.MonkeyPatch, layer: nn.Module) -> list[None]:
    """Grows by one with every direct call of the layer's that gave a result."""
    name = CALLS[type(layer)]
    real, calls = getattr(_core, name), []

    def call(*args: Any) -> Any:
        result = real(*args)
        if result is not None:
            calls.append(None)
        return result

    monkeypatch.setattr(_core, name, call)
    return calls


def is_direct(layer: nn.Module, x: Tensor) -> bool:
    """What layers promise for dense tokens.

    CUDA kernels have 16-bit outputs; those of packed weights read rows of a multiple of 16 bytes, and do nothing for no
    rows of float32. Products of 4-bit weights with 8-bit tokens are of few tokens. FP4 has no kernel for tokens in
    groups, and on a CPU none for 8-bit ones.
    """
    tokens, k = x.numel() // x.shape[-1], x.shape[-1]
    if not x.is_cuda:
        if isinstance(layer, Fp4Linear):
            return tokens > 0 and not isinstance(layer, W4A8Fp4Linear)
        return not isinstance(layer, W4A8Linear) or 0 < tokens <= 16
    if isinstance(layer, W4A8Linear | W4A8Fp4Linear):
        takes_tokens = layer.activation != "fp8-group"
        return takes_tokens and 0 < tokens < 256 and x.dtype == torch.bfloat16 and k % 8 == 0
    if isinstance(layer, Fp4Linear):
        return tokens > 0 and x.dtype != torch.float32 and k % 8 == 0
    if isinstance(layer, WeightOnlyLinear):
        return (x.dtype != torch.float32 or tokens == 0) and k * x.element_size() % 16 == 0
    return not (isinstance(layer, Int8Linear | Fp8Linear) and x.dtype == torch.float32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", FROM_LINEAR)
def test_same_bits_as_the_operations(
    kind: str, dtype: torch.dtype, bias: bool, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in (100, 144, 576):
        layer = make_layer(kind, device, k, dtype=dtype, bias=bias)
        with monkeypatch.context() as patch:
            calls = counted(patch, layer)
            for shape in ((1, k), (17, k), (0, k), (2, 3, k), (2, 0, k), (1, 2, 1, 3, k), (130, k)):
                x = torch.randn(shape, device=device).add_(0.2).to(dtype)
                before = len(calls)
                with torch.no_grad():
                    y = layer(x)
                    assert len(calls) == before + is_direct(layer, x)
                    with ThroughTheDispatcher():
                        expected = layer(x)
                assert len(calls) == before + is_direct(layer, x)
                assert y.shape == expected.shape and y.dtype == dtype and y.is_contiguous()
                assert torch.equal(y, expected)


@pytest.mark.parametrize("kind", FROM_LINEAR)
def test_inputs_without_a_direct_call(kind: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(kind, device)
    calls = counted(monkeypatch, layer)
    x = torch.randn(6, 144, device=device).bfloat16()
    y, alone = layer(x), layer(x[2:3])
    del calls[:]
    wide = torch.zeros(6, 160, device=device).bfloat16()
    wide[:, :144] = x
    torch.testing.assert_close(layer(wide[:, :144]), y)
    torch.testing.assert_close(layer(x.t().contiguous().t()), y)
    torch.testing.assert_close(layer(x[2]), alone[0])
    assert layer(x.half()).dtype == torch.float16  # the bias is bfloat16
    assert not calls
    with pytest.raises(ValueError, match=r"x: expected shape \[…, 144\]"):
        layer(x[:, :100])
    layer(x.clone().requires_grad_())
    assert torch.equal(layer(x.view(1, 1, 1, 2, 1, 3, 144)).view(6, 64), y)
    layer.to("meta")
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        layer(x)
    assert not calls


@pytest.mark.parametrize("kind", ["int8", "w4a16"])
def test_outputs_are_tensors_as_any(kind: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(kind, device)
    calls = counted(monkeypatch, layer)
    x = torch.randn(6, 144, device=device).bfloat16()
    y = layer(x)
    assert not y.is_inference() and not y.requires_grad and y.is_leaf and y._version == 0
    with torch.inference_mode():
        assert layer(x).is_inference()
    assert len(calls) == 2
    (y.requires_grad_() * 2).sum().backward()
    assert y.grad is not None


@pytest.mark.parametrize("kind", ["int8", "w4a16"])
def test_lazily_negated(kind: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of such a tensor has the other sign, be it the input or the bias."""
    layer = make_layer(kind, device)
    calls = counted(monkeypatch, layer)
    x = torch.randn(6, 144, device=device).bfloat16()
    expected = layer(-x)
    del calls[:]
    assert torch.equal(layer(torch._neg_view(x)), expected)
    bias = layer._parameters["bias"]
    assert bias is not None
    layer._parameters["bias"] = nn.Parameter(torch._neg_view(-bias.data), requires_grad=False)
    assert torch.equal(layer(-x), expected)
    assert not calls or kind == "int8"  # whose prepared bias may be another tensor


@pytest.mark.parametrize("kind", FROM_LINEAR)
def test_empty_slices(kind: str, device: str) -> None:
    layer = make_layer(kind, device)
    for shape in ((0, 160), (2, 0, 160), (3, 0, 2, 160)):
        x = torch.zeros(shape, device=device).bfloat16()[..., :144]
        assert x.is_contiguous() and layer(x).shape == (*shape[:-1], 64)


@pytest.mark.parametrize("kind", FROM_LINEAR)
def test_tensors_that_are_no_longer_parameters(
    kind: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(kind, device)
    calls = counted(monkeypatch, layer)
    x = torch.randn(6, 144, device=device).bfloat16()
    y = layer(x)
    del calls[:]
    bias = layer._parameters.pop("bias")
    assert bias is not None
    layer.register_buffer("bias", bias.data)
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize("scale", ["input_scale", "weight_scale"])
def test_scales_with_requires_grad(scale: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("int8-static", device)
    calls = counted(monkeypatch, layer)
    getattr(layer, scale).requires_grad = True
    with pytest.raises(NotImplementedError, match=f"no gradient of {scale}"):
        layer(torch.ones(2, 144, device=device).bfloat16())
    assert not calls


@pytest.mark.parametrize("kind", ["int8", "fp8-token", "fp8-block"])
def test_outputs_padded_along_n_are_cut(kind: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(kind, device, n=61)
    calls = counted(monkeypatch, layer)
    y = layer(torch.randn(3, 144, device=device).bfloat16())
    assert y.shape == (3, 61) and y.is_contiguous() and not calls


def test_tensors_without_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("int8", "cpu")
    calls = counted(monkeypatch, layer)
    enormous = torch.zeros(1, dtype=torch.int8).expand(64, 1 << 50)
    layer._held = layer._held._replace(value=(enormous, *layer._held.value[1:]))
    with pytest.raises(RuntimeError, match=r"memory|allocate"):
        layer(torch.randn(1, 144).bfloat16())
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FROM_LINEAR)
def test_captured_in_a_cuda_graph(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(make_layer(kind, "cuda", 144, 144), make_layer(kind, "cuda", 144, 64))
    calls = counted(monkeypatch, layers[0])
    x = torch.randn(5, 144, device="cuda").bfloat16()
    with torch.no_grad():
        layers(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layers(x)
        assert len(calls) == (4 if is_direct(layers[0], x) else 0)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, layers(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FROM_LINEAR)
def test_two_streams_use_separate_workspaces(kind: str, seed: int) -> None:
    layer = make_layer(kind, "cuda", 1024, 1024)
    inputs = [torch.randn(300 + i, 1024, device="cuda").bfloat16() for i in range(8)]
    with torch.no_grad():
        expected = [layer(x) for x in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        outs: list[Tensor] = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                outs.append(layer(x))
        torch.cuda.synchronize()
    assert all(torch.equal(y, e) for y, e in zip(outs, expected, strict=True))
