"""conv2d_weight_only by wgmma on a Hopper GPU, whose pixels TMA copies in im2col mode; and when it is chosen."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import conv_reference
import epiloq
from conv_reference import Packed, Place
from epiloq import _core
from epiloq.weights.packed_conv2d_weight import PackedConv2dWeight
from reference import poisoned, ulp

# Weight rows and pixels of a tile, by row of kWgmmaRows in src/dispatch/conv2d_weight_only/tables.h.
TILES = ((128, 64), (64, 64), (64, 64))
HALVES = (torch.float16, torch.bfloat16)
KERNELS = ((1, 1), (3, 3), (5, 5), (7, 1))
# 40 and 104 fill no box of 64 channels, and are padded in the weight.
CHANNELS = (64, 128, 192, 320, 40, 104)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is SM90's")


def arguments(x: Tensor, weight: PackedConv2dWeight, place: Place, bias: Tensor | None, clamp: Any) -> tuple[Any, ...]:
    w = weight
    sizes = (w.bits, w.n, w.kernel, w.channels, w.padded_channels, w.group_size, w.depthwise)
    return (x, w.q, w.scale, w.zero, w.offset, bias, *sizes, *clamp, *place.arguments.values())


def run(
    kernel: tuple[int, int],
    x: Tensor,
    weight: PackedConv2dWeight,
    place: Place,
    bias: Tensor | None = None,
    clamp: tuple[float, float] = (-math.inf, math.inf),
) -> Tensor:
    """The kernel (row, CTAs that split K), whatever the tables choose: ``[B, H, W, Ci]`` to ``[B, P, Q, Co]``."""
    where = epiloq.ops.convolutions.conv2d.geometry("", weight.kernel, *list(place.arguments.values()))
    out = poisoned((x.shape[0], *where.output_size(x.shape[1:3], weight.kernel), weight.n), x.dtype, str(x.device))
    given = arguments(x, weight, place, bias, clamp)
    assert _core.conv2d_weight_only(out, *given, forced=("wgmma", *kernel))
    return out


def integers(n: int, kernel: tuple[int, int], channels: int, bits: int = 4) -> Packed:
    """Scales of 1, so that sums are exact in any order."""
    q = torch.randint(-(1 << bits - 1), 1 << bits - 1, (n, *kernel, channels))
    packed = epiloq.pack_conv2d_weight(q.cuda(), torch.ones(n, device="cuda").bfloat16(), bits=bits, group_size=-1)
    return Packed(packed, q.double())


def surrounded(shape: tuple[int, int, int, int], dtype: torch.dtype, integer: bool = False) -> Tensor:
    """An image within NaN: images, lines, pixels and channels before and behind."""
    batch, height, width, channels = shape
    memory = torch.full((batch + 2, height + 2, width + 2, -(-channels // 8) * 8 + 16), math.nan, device="cuda")
    inside = torch.randint(-2, 3, shape).float() if integer else torch.randn(shape)
    x = memory.to(dtype)[1:-1, 1:-1, 1:-1, 8 : 8 + channels]
    return x.copy_(inside)


def assert_equal(y: Tensor, expected: Tensor) -> None:
    """Bit for bit; which pixels and channels are wrong tells a box from a tap from a tile."""
    wrong = (y.cpu() != expected).nonzero().tolist()
    if wrong:
        b, p, q, n = wrong[0]
        sides = [sorted({place[i] for place in wrong})[:20] for i in range(4)]
        raise AssertionError(
            f"{len(wrong)} of {y.numel()} differ; images {sides[0]}, lines {sides[1]}, columns {sides[2]}, channels "
            f"{sides[3]}; first [{b}, {p}, {q}, {n}]: {float(y[b, p, q, n])} instead of {float(expected[b, p, q, n])}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("row", range(len(TILES)))
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_tap_is_used_at_its_position(
    seed: int, hopper: None, kernel: tuple[int, int], channels: int, row: int
) -> None:
    """Each output channel reads one channel of one tap back: strides, paddings, dilations, images after one another."""
    n, taps = 72, kernel[0] * kernel[1]
    column = torch.randint(taps * channels, (n, 1))
    q = torch.zeros(n, taps * channels, dtype=torch.int64).scatter_(1, column, 1).view(n, *kernel, channels)
    scale = torch.ones(n, *kernel, -(-channels // 64)).half()
    packed = epiloq.pack_conv2d_weight(q.cuda(), scale.cuda(), bits=4, group_size=64)
    for stride, padding, dilation in itertools.product(
        ((1, 1), (2, 2), (2, 1)), ((0, 0, 0, 0), (1, 2, 0, 3)), ((1, 1), (2, 1))
    ):
        place = Place(stride, padding, dilation)
        for batch, size in ((1, (13, 9)), (3, (14, 7))):
            if not place.fits(size, kernel):
                continue
            x = surrounded((batch, *size, channels), torch.float16)
            assert_equal(run((row, 1), x, packed, place), conv_reference.sums(x, q, place).half())


@pytest.mark.gpu
@pytest.mark.parametrize("row", range(len(TILES)))
@pytest.mark.parametrize("bits", [4, 8])
def test_split_k_over_a_cluster(seed: int, hopper: None, bits: int, row: int) -> None:
    """Splits that divide the steps and that do not, tiles full, short and several, K an odd number of halves."""
    for channels, kernel, image in ((64, (3, 3), (1, 17, 11)), (192, (3, 3), (2, 5, 5)), (320, (5, 5), (3, 9, 8))):
        w = integers(200, kernel, channels, bits)
        place = Place(padding=(kernel[0] // 2,) * 4)
        x = surrounded((*image, channels), torch.bfloat16, integer=True)
        expected = conv_reference.sums(x, w.exact, place).bfloat16()
        steps = -(-math.prod(kernel) * channels // 128)
        for split in range(1, min(steps, 8) + 1):
            for _ in range(3):
                assert_equal(run((row, split), x, w.packed, place), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("row", range(len(TILES)))
def test_persistent_cta_runs_several_tiles(seed: int, hopper: None, row: int) -> None:
    """More tiles than SMs: the pipeline, and the loop over taps, continue from tile to tile."""
    w, place = integers(130, (3, 3), 64), Place((1, 1), (1, 0, 2, 1))
    x = surrounded((2, 96, 97, 64), torch.bfloat16, integer=True)
    assert_equal(run((row, 1), x, w.packed, place), conv_reference.sums(x, w.exact, place).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("zeros", ["none", "zero"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_bias_and_clamp(
    seed: int, hopper: None, bits: int, group_size: int, zeros: str, dtype: torch.dtype
) -> None:
    """docs/numerics.md's bound without rounded weights, against float64."""
    for row, channels, scale_dtype in itertools.product(range(len(TILES)), (64, 192, 320), (dtype, torch.float32)):
        kernel = (3, 3)
        w = conv_reference.packed(137, kernel, channels, bits, group_size, zeros, dtype=scale_dtype, device="cuda")
        x, place = surrounded((2, 9, 7, channels), dtype), Place((2, 1), (1, 1, 1, 1))
        bias = torch.randn(137, device="cuda").to(dtype)
        out = run((row, 1 + channels // 128), x, w.packed, place, bias, (-1.5, 2.0))
        offset = bias.double().cpu()
        exact = conv_reference.sums(x, w.exact, place) + offset
        terms = conv_reference.sums(x.abs(), w.exact.abs(), place) + offset.abs()
        exact = exact.clamp(-1.5, 2.0)
        bound = ulp(exact, dtype) + 2.0**-23 * math.sqrt(w.exact[0].numel()) * terms
        error = (out.double().cpu() - exact).abs()
        assert not error.isnan().any(), "NaN: an element that was never written, or one from outside the image?"
        assert (error <= bound).all(), f"row {row}: worst element {float((error / bound).max()):.2f} times the bound"


@pytest.mark.gpu
def test_weights_written_by_the_previous_kernel(seed: int, hopper: None) -> None:
    """Overlapping launches: the image belongs to the kernel just before."""
    w, place = integers(256, (3, 3), 256), Place(padding=(1, 1, 1, 1))
    images = [torch.randint(-2, 3, (1, 14, 14, 256), device="cuda").bfloat16() for _ in range(4)]
    expected = [conv_reference.sums(x, w.exact, place).bfloat16() for x in images]
    x = torch.empty_like(images[0])
    outputs = []
    for turn in range(40):
        x.copy_(images[turn % 4])
        outputs.append(run((turn % 3, 1 + turn % 8), x, w.packed, place))
    for turn, out in enumerate(outputs):
        assert_equal(out, expected[turn % 4])


def explained(channels: int, image: int, n: int = 256, batch: int = 1, kind: str = "none", **where: Any) -> str:
    kernel = where.pop("kernel", (3, 3))
    w = conv_reference.packed(n, kernel, channels, 4, 32, kind)
    x = torch.empty(batch, channels, image, image, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    return epiloq.explain("conv2d_weight_only", x, w.packed, **{"padding": kernel[0] // 2, **where})


def test_kernel_chosen_for_sizes() -> None:
    with epiloq.config(arch="sm90"):
        for channels, image, n in ((64, 56, 64), (128, 28, 128), (256, 14, 256), (512, 7, 512)):
            assert "wgmma" in explained(channels, image, n)
        assert "wgmma" in explained(256, 28, kernel=(1, 1), stride=2)
        assert explained(64, 224, 64, batch=4).startswith("dequantise")
        # Offsets, two taps in half a step, strides and dilations beyond TMA's.
        for other in (
            explained(256, 14, kind="offset"),
            explained(32, 14),
            explained(64, 60, stride=9),
            explained(64, 20, dilation=128, padding=128),
        ):
            assert "mma.sync" in other, other
    with epiloq.config(arch="sm80"):
        assert "mma.sync" in explained(256, 14)


def test_every_row_is_chosen() -> None:
    with epiloq.config(arch="sm90"):
        answers = {
            explained(channels, image, n, batch)
            for channels, image, n in ((64, 56, 64), (128, 28, 128), (256, 14, 256), (512, 7, 512))
            for batch in (1, 4, 32)
        } | {explained(64, 56, 128, kernel=(1, 1), stride=2)}
    kernels = {answer.partition("wgmma ")[2].partition(", K over")[0] for answer in answers if "wgmma" in answer}
    assert kernels == {
        "128 weight rows x 64 pixels, 2 warpgroups",
        "64 weight rows x 64 pixels, 2 warpgroups, 2 along K",
        "64 weight rows x 64 pixels, 1 warpgroup",
    }


def test_a_kernel_that_cannot_serve_is_refused() -> None:
    w = conv_reference.packed(32, (3, 3), 64, 4, 32).packed
    x, place = torch.zeros(1, 5, 5, 64, dtype=torch.float16), Place()
    given = arguments(x, w, place, None, (-math.inf, math.inf))
    out = x.new_empty(1, 3, 3, 32)
    with epiloq.config(arch="sm90"):
        assert "clusters of 2" in _core.explain_conv2d_weight_only(out, *given, forced=("wgmma", 1, 2))
        for kernel in (("wgmma", len(TILES), 1), ("wgmma", -1, 1), ("wgmma", 0, 9), ("wgmma", 0, 0), ("patches", 2, 1)):
            with pytest.raises(ValueError, match="kernel: expected one that fits"):
                _core.explain_conv2d_weight_only(out, *given, forced=kernel)
        with pytest.raises(ValueError, match="kernel: expected patches or wgmma, got other"):
            _core.explain_conv2d_weight_only(out, *given, forced=("other", 0, 1))
