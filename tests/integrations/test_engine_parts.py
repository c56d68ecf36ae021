"""Layers that engines merge and divide among ranks, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine_schemes import LAYERS_OF_ENGINES, converted, keeps_inputs, products_of
from epiloq.formats import epiloq_modules
from epiloq.formats.epiloq_modules import Group
from epiloq.formats.layouts.base import FormatError
from epiloq.integrations.engines.parts import Part, PartsLinear
from epiloq.nn import Fp4Linear, W4A8Fp4Linear
from epiloq.weights.fp4 import divisor_of

K = 416
CPU = torch.device("cpu")


def quantised(scheme: str, n: int) -> tuple[Any, Group]:
    layer = converted(scheme, nn.Linear(K, n, bias=False))
    name = type(layer).__name__
    return layer, Group(name, epiloq_modules.KINDS[name].options_of(layer), ["layer"])


def part_of(layer: Any, group: Group, rows: tuple[int, int], columns: tuple[int, int] = (0, K)) -> Part:
    part = Part("layer", group, columns, K)
    for name, tensor in layer.file_state().items():
        part.take(name, tensor, rows, CPU)
    return part


@pytest.mark.parametrize("scheme", LAYERS_OF_ENGINES)
def test_rows_and_columns_of_ranks(seed: int, scheme: str) -> None:
    """Of 90 rows and 416 columns each of two ranks has half, which no unit of rows or columns divides."""
    layer, group = quantised(scheme, 90)
    x, bias = torch.randn(3, K), torch.randn(90)
    whole = layer(x) + bias
    for rows in ((0, 45), (45, 90)):
        y = PartsLinear([part_of(layer, group, rows)], torch.float32)(x, bias[slice(*rows)])
        torch.testing.assert_close(y, whole[:, slice(*rows)], rtol=1e-4, atol=1e-4)
    total = torch.zeros(3, 90, dtype=torch.float64)
    for first, last in ((0, 208), (208, K)):
        product = PartsLinear([part_of(layer, group, (0, 90), (first, last))], torch.float32)
        total += product(x[:, first:last]).double()
    expected = x.double() @ layer.dequantized_weight().double().t()
    error = (total - expected).norm() / expected.norm()
    assert error < (1e-5 if keeps_inputs(scheme) else 0.04), float(error)


@pytest.mark.parametrize("activation", ["fp8-group", "fp8-static"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_fp4_with_other_activations(seed: int, format: str, activation: str) -> None:
    """A rank's groups of inputs begin with its own; a static scale is every rank's."""
    options: Any = {"input_scale": 0.01} if activation == "fp8-static" else {}
    layer: Any = W4A8Fp4Linear.from_linear(
        nn.Linear(K, 90, bias=False), format=format, activation=activation, **options
    )
    group = Group("W4A8Fp4Linear", epiloq_modules.KINDS["W4A8Fp4Linear"].options_of(layer), ["layer"])
    x = torch.randn(3, K)
    y = PartsLinear([part_of(layer, group, (45, 90))], torch.float32)(x)
    torch.testing.assert_close(y, layer(x)[:, 45:], rtol=1e-4, atol=1e-4)
    total = torch.zeros(3, 90)
    for first, last in ((0, 208), (208, K)):
        total += PartsLinear([part_of(layer, group, (0, 90), (first, last))], torch.float32)(x[:, first:last])
    expected = x @ layer.dequantized_weight().t()
    assert (total - expected).norm() / expected.norm() < 0.04


def test_sibling_layers_are_merged_if_possible(seed: int) -> None:
    x = torch.randn(3, K)
    for schemes, sizes, count in (
        (("fp8", "fp8"), (32, 48), 1),
        (("w4a16-g32", "w4a16-g32"), (32, 48), 1),
        (("w4a16-g32", "w4a16-g32"), (40, 48), 2),
        (("w4a16-g32", "w8a8-int8"), (32, 48), 2),
        (("w2a16-g32", "w2a16-g32"), (32, 48), 1),
        (("w4a8-mxfp4-fp8", "w4a8-mxfp4-fp8"), (33, 48), 1),
    ):
        layers = [quantised(scheme, n) for scheme, n in zip(schemes, sizes, strict=True)]
        product = PartsLinear([part_of(m, g, (0, n)) for (m, g), n in zip(layers, sizes, strict=True)], torch.float32)
        assert len(product.products) == count
        expected = torch.cat([layer(x) for layer, _ in layers], -1)
        torch.testing.assert_close(product(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_nvfp4_siblings_are_merged_if_they_share_a_global_scale(seed: int, shared: bool) -> None:
    linears = [nn.Linear(K, n, bias=False) for n in (33, 48)]
    nn.init.constant_(linears[0].weight[:1], 3.0)
    divisors = [divisor_of(*(linear.weight for linear in linears))] * 2 if shared else [None, None]
    layers = [Fp4Linear.from_linear(linear, divisor=d) for linear, d in zip(linears, divisors, strict=True)]
    group = Group("Fp4Linear", epiloq_modules.KINDS["Fp4Linear"].options_of(layers[0]), ["layer"])
    product = PartsLinear([part_of(layer, group, (0, layer.out_features)) for layer in layers], torch.float32)
    assert len(product.products) == products_of(*layers) == (1 if shared else 2)
    x = torch.randn(3, K)
    torch.testing.assert_close(product(x), torch.cat([layer(x) for layer in layers], -1), rtol=1e-5, atol=1e-5)


def test_mismatching_arguments_are_refused_by_name(seed: int) -> None:
    layer, group = quantised("w8a16", 32)
    part = Part("layer", group, (0, 208), K)
    with pytest.raises(FormatError, match=r"layer: expected of this layer weight_q, .*, got qweight"):
        part.take("qweight", layer.weight_q, (0, 32), CPU)
    with pytest.raises(FormatError, match="layer: expected no activation order where inputs are divided"):
        part.take("weight_perm", torch.arange(K), (0, 32), CPU)
    with pytest.raises(FormatError, match=r"layer.weight_scale: expected 3 dimensions, got \[32\]"):
        part.take("weight_scale", torch.ones(32), (0, 32), CPU)
    with pytest.raises(FormatError, match="layer: expected tensors, found none"):
        PartsLinear([part], torch.float32)
    part.take("weight_scale", layer.weight_scale, (0, 32), CPU)
    with pytest.raises(FormatError, match=r"layer: .*weight_q"):
        PartsLinear([part], torch.float32)
    with pytest.raises(FormatError, match="TableLinear: expected a class of layer that serving engines run"):
        Part("layer", Group("TableLinear", {"block_size": 64}, ["layer"]), (0, K), K)
