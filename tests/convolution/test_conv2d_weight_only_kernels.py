"""The kernels of convolutions with low-bit weights, against float64 of the dequantised weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import epiloq
from conv_arguments import ARCHS, FLOATS, weight_only_arguments
from reference import ulp


def check_weight_only(arguments: dict[str, Any], geometry: dict[str, Any], *, kernel: bool) -> None:
    """docs/numerics.md's bound of `weight_only_mm`, against float64 of the dequantised weight."""
    moved = {name: value.to("cuda") if hasattr(value, "to") else value for name, value in arguments.items()}
    assert epiloq.explain("conv2d_weight_only", **moved, **geometry).startswith("dequantise") is not kernel
    out = epiloq.conv2d_weight_only(**moved, **geometry, clamp=(-4.0, 5.0)).cpu()
    x, bias, dense = arguments["x"].double(), arguments["bias"].double(), arguments["weight"].dequantize().double()
    top = {**geometry, "groups": arguments["groups"]}
    exact = torch.nn.functional.conv2d(x, dense, bias, **top).clamp(-4.0, 5.0)
    size = torch.nn.functional.conv2d(x.abs(), dense.abs(), bias.abs(), **top)
    # Of offsets the terms may cancel in a weight, but they are no more than 6.
    terms = dense[0].numel()
    slack = torch.nn.functional.conv2d(x.abs(), torch.ones_like(dense), None, **top)
    precision = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}[out.dtype]
    bound = ulp(exact, out.dtype) + 2.0**-23 * terms**0.5 * (size + 6 * slack)
    # cuDNN may transform a dense convolution, which costs it a few roundings.
    bound += 0 if kernel else 4 * precision * size + 2.0**-20 * slack
    error = (out.double() - exact).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    assert (error <= bound).all(), f"worst element {float((error / bound).max()):.2f} times the bound"


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["symmetric", "zero", "offset"])
def test_weight_only_kernels(seed: int, kind: str, bits: int, arch: str) -> None:
    geometries = (
        ((7, 9), (3, 3), {"stride": 1, "padding": 1, "dilation": 1}),
        ((13, 6), (3, 5), {"stride": (2, 1), "padding": (1, 4), "dilation": (1, 2)}),
        ((10, 9), (1, 1), {"stride": 2, "padding": 0, "dilation": 1}),
    )
    dtypes = (torch.float16,) if arch == "sm75" else (torch.float16, torch.bfloat16)
    for (image, kernel, geometry), (channels, outputs), dtype in itertools.product(
        geometries, ((64, 48), (40, 300), (8, 17), (200, 136)), dtypes
    ):
        for group_size in (32, 64, 128):
            arguments = weight_only_arguments(
                image, kernel, channels, outputs, 1, kind, bits=bits, group_size=group_size, dtype=dtype
            )
            with epiloq.config(arch=arch):
                check_weight_only(arguments, geometry, kernel=True)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_weight_only_of_a_deep_layer(seed: int, arch: str) -> None:
    """Long enough for K to be shared by a cluster, and for every stage to be used again."""
    for image, dtype in itertools.product(((7, 7), (14, 14)), (torch.float16, torch.bfloat16)):
        arguments = weight_only_arguments(image, (3, 3), 512, 512, 1, "zero", bits=4, group_size=128, dtype=dtype)
        with epiloq.config(arch=arch):
            check_weight_only(arguments, {"stride": 1, "padding": 1, "dilation": 1}, kernel=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["symmetric", "zero", "offset"])
def test_weight_only_depthwise(seed: int, kind: str, dtype: torch.dtype) -> None:
    for groups, outputs in ((32, 1), (100, 1), (7, 1), (5, 3)):
        for image, kernel, stride in (((14, 9), (3, 3), 1), ((15, 8), (5, 3), 2)):
            arguments = weight_only_arguments(
                image, kernel, 1, outputs, groups, kind, bits=4, group_size=-1, dtype=dtype
            )
            geometry = {"stride": stride, "padding": (kernel[0] // 2, kernel[1] // 2), "dilation": 1}
            check_weight_only(arguments, geometry, kernel=True)


@pytest.mark.gpu
def test_weight_only_leaves_the_rest_to_a_dense_convolution(seed: int) -> None:
    geometry = {"stride": 1, "padding": 1, "dilation": 1}
    for image, channels, groups, dtype in (((160, 160), 64, 1, torch.float16), ((7, 7), 3, 1, torch.bfloat16)):
        arguments = weight_only_arguments(
            image, (3, 3), channels, 24, groups, "symmetric", bits=4, group_size=32, dtype=dtype
        )
        check_weight_only(arguments, geometry, kernel=False)
