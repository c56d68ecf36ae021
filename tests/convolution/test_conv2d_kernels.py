"""The int8 convolutions' kernels: which serves what, and on a GPU that they agree with the CPU, whatever the shape."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
from conv_arguments import (
    ARCHS,
    FLOATS,
    as_image,
    assert_same,
    conv2d_int8,
    int8_arguments,
    on,
    weight_only_arguments,
    where,
)

# Channels of a group, output channels of a group, groups: copies of 16, of 4 and of 1, ragged tiles, depthwise of both
# kinds, a single input channel.
CHANNELS = (
    (16, 16, 1), (64, 64, 1), (48, 200, 1), (128, 256, 1), (32, 40, 2), (24, 33, 1), (4, 7, 3), (20, 300, 1),
    (3, 32, 1), (17, 5, 2), (1, 1, 32), (1, 1, 100), (1, 1, 7), (1, 3, 5), (1, 24, 1),
)  # fmt: skip
# Image, kernel, stride, padding, dilation.
GEOMETRIES: tuple[tuple[Any, Any, Any, Any, Any], ...] = (
    ((9, 14), (1, 1), 1, 0, 1),
    ((9, 14), (1, 1), 2, 0, 1),
    ((14, 9), (3, 3), 1, 1, 1),
    ((15, 8), (3, 3), 2, (1, 0, 0, 1), 1),
    ((11, 12), (5, 3), (2, 1), (2, 1), (1, 2)),
    ((7, 7), (7, 7), 1, 3, 1),
    ((2, 3), (3, 3), 1, (4, 0, 3, 2), 2),
    ((33, 1), (9, 1), (3, 1), (8, 0), 1),
)


def tile_of(arch: str, shape: tuple[int, int, int, int], outputs: int) -> str:
    x = torch.empty(shape, dtype=torch.int8)
    weight = torch.empty((outputs, 1, 1, shape[-1]), dtype=torch.int8)
    with epiloq.config(arch=arch):
        return epiloq.explain(
            "conv2d_int8", as_image(x), weight, weight_scale=torch.ones(1), input_scale=1.0, output_scale=1.0
        )


def test_every_tile_is_chosen_for_some_problem() -> None:
    sizes = tuple(itertools.product((1, 8, 40, 130, 1000), (16, 24, 3, 64, 2048), (16, 64, 128, 256, 600, 2048)))
    answers = {arch: {tile_of(arch, (1, 30 * h, 30, c), n) for h, c, n in sizes} for arch in ARCHS}
    tiles = {arch: {words.partition(", K over clusters")[0] for words in answers[arch]} for arch in ARCHS}
    assert len(tiles["sm75"]) == 3 and all("64 pixels x 64 channels" in words for words in tiles["sm75"])
    assert len(tiles["sm80"]) == 6 and tiles["sm75"] < tiles["sm80"] == answers["sm80"]
    assert sum("wgmma" in words for words in tiles["sm90"]) == 5
    assert not any("wgmma" in words for words in tiles["sm80"])
    assert len(tiles["sm80"] | tiles["sm90"]) == 11
    splits = {int(words.partition("clusters of ")[2] or 1) for words in answers["sm90"]}
    assert {1, 2, 3} < splits <= set(range(1, 9))


def test_explain_names_the_depthwise_kernels() -> None:
    for channels, outputs, vector in ((32, 32, 4), (7, 7, 1), (8, 16, 1)):
        arguments = int8_arguments((8, 8), (3, 3), 1, outputs // channels, channels)
        pixels = arguments | {"x_q": as_image(arguments["x_q"])}
        with epiloq.config(arch="sm90"):
            assert f"depthwise dp4a, {vector} channel" in epiloq.explain("conv2d_int8", **pixels, output_scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_int8_equals_the_cpu(seed: int, channels: tuple[int, int, int], arch: str) -> None:
    with epiloq.config(arch=arch):
        for image, kernel, stride, padding, dilation in GEOMETRIES:
            arguments = int8_arguments(image, kernel, *channels) | where(stride, padding, dilation)
            output = {"output_scale": 1.0, "output_zero": int(torch.randint(-128, 128, ()))}
            clamp = (None, (0.0, math.inf), (-3.5, 60.25))[int(torch.randint(3, ()))]
            out = conv2d_int8(**on("cuda", arguments), **output, clamp=clamp)
            assert_same(out, conv2d_int8(**arguments, **output, clamp=clamp))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_restores_floats_as_the_cpu_does(seed: int, dtype: torch.dtype) -> None:
    for channels, (image, kernel, stride, padding, dilation) in itertools.product(CHANNELS, GEOMETRIES[2:5]):
        arguments = int8_arguments(image, kernel, *channels) | where(stride, padding, dilation)
        out = conv2d_int8(**on("cuda", arguments), out_dtype=dtype, clamp=(-50.0, 40.0))
        assert_same(out, conv2d_int8(**arguments, out_dtype=dtype, clamp=(-50.0, 40.0)))


@pytest.mark.gpu
@pytest.mark.parametrize(("pixels", "outputs"), [(20000, 256), (40000, 600), (70000, 24), (5000, 520), (333, 1000)])
def test_int8_of_many_pixels(seed: int, pixels: int, outputs: int) -> None:
    """Every tile with more blocks than SMs, and more K steps than stages; both forms of the operation."""
    for image, kernel in (((pixels, 1), (1, 1)), ((pixels // 50, 50), (3, 3))):
        arguments = int8_arguments(image, kernel, 32, outputs, 1, batch=1) | where(1, kernel[0] // 2, 1)
        expected = conv2d_int8(**arguments, output_scale=1.0)
        assert_same(conv2d_int8(**on("cuda", arguments), output_scale=1.0), expected)
    rows = arguments | {"x_q": arguments["x_q"].view(-1, 32), "weight": arguments["weight"][:, 0, 0]}
    rows = {name: rows[name] for name in rows if name not in ("groups", "stride", "padding", "dilation")}
    expected = epiloq.requantized_mm(**rows, output_scale=1.0)
    assert_same(epiloq.requantized_mm(**on("cuda", rows), output_scale=1.0), expected)


@pytest.mark.gpu
def test_rounding_of_every_tie() -> None:
    """Sums from -16384 to 16384, halves and quarters of them: float32 decides none of the ties by itself."""
    x = torch.arange(-128, 128, dtype=torch.int8).view(-1, 1)
    weight = torch.arange(-128, 128, dtype=torch.int8).view(-1, 1)
    parameters = {"input_scale": 1.0, "output_scale": 1.0, "weight_scale": torch.ones(1)}
    for scale, bias, zero in itertools.product((0.5, 0.25, 2.0**-7, 1 / 3), (0.0, 0.5, 12345.25, 3e6), (-7, 0, 8)):
        given = parameters | {"weight_scale": torch.tensor([scale]), "bias": torch.full((256,), bias)}
        expected = epiloq.requantized_mm(x, weight, **given, output_zero=zero)
        assert_same(
            epiloq.requantized_mm(**on("cuda", {"x_q": x, "weight": weight, **given}), output_zero=zero), expected
        )


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_parameters_count_as_on_the_cpu(seed: int, bad: float) -> None:
    for channels in ((16, 40, 1), (1, 1, 32)):
        arguments = int8_arguments((6, 7), (3, 3), *channels)
        arguments["bias"][3] = bad
        out = conv2d_int8(**on("cuda", arguments), output_scale=1.0)
        assert_same(out, conv2d_int8(**arguments, output_scale=1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [(32, 48, 1), (20, 48, 1), (1, 1, 32)])
def test_int8_views_and_guards(seed: int, channels: tuple[int, int, int]) -> None:
    """Slices of wider images, at every alignment; what lies beside the output stays as it was."""
    arguments = int8_arguments((9, 10), (3, 3), *channels) | where(1, 1, 1)
    x, n = arguments["x_q"], arguments["weight"].shape[0]
    expected = conv2d_int8(**arguments, output_scale=1.0)
    for begin, pad in ((0, 0), (16, 16), (4, 8), (1, 3)):
        wide = torch.zeros((*x.shape[:3], begin + x.shape[3] + pad), dtype=torch.int8, device="cuda")
        wide[..., begin : begin + x.shape[3]] = x.cuda()
        target = torch.full((*expected.shape[:3], begin + n + pad), 99, dtype=torch.int8, device="cuda")
        out = target[..., begin : begin + n]
        moved = on("cuda", arguments) | {"x_q": wide[..., begin : begin + x.shape[3]]}
        conv2d_int8(**moved, output_scale=1.0, out=out)
        assert_same(out, expected)
        assert (target[..., :begin] == 99).all() and (target[..., begin + n :] == 99).all()


@pytest.mark.gpu
def test_graphs_and_streams(seed: int) -> None:
    int8 = on("cuda", int8_arguments((14, 14), (3, 3), 64, 64, 1) | where(1, 1, 1))
    prepared = epiloq.PreparedInt8Weight.prepare(
        int8["weight"], int8["weight_scale"], int8["bias"], input=(1.0, int8["input_zero"]), output=(1.0, 3)
    )
    packed = weight_only_arguments((7, 7), (3, 3), 64, 64, 1, "zero", bits=4, group_size=64, dtype=torch.float16)
    x, weight = packed["x"].cuda(), packed["weight"].to("cuda")

    def both() -> tuple[Tensor, Tensor]:
        first = conv2d_int8(int8["x_q"], prepared, padding=1)
        return conv2d_int8(first, prepared, padding=1), epiloq.conv2d_weight_only(x, weight, padding=1)

    expected = both()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        assert all(torch.equal(a, b) for a, b in zip(both(), expected, strict=True))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
