"""The kernel of conv2d_int8 on CPUs (depthwise, few input channels): extremes, strips, parts of the output, bounds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from conv_arguments import as_image, conv2d_int8
from conv_reference import Int8Problem, Place, int8_problem, sums
from epiloq import PreparedInt8Weight, _core


def run(p: Int8Problem, **options: Any) -> Tensor:
    return conv2d_int8(p.x, p.weight, p.bias, **p.scales, **p.output, **p.place.arguments, **options)


def is_direct(p: Int8Problem) -> bool:
    arguments = {**p.scales, **p.output, **p.place.arguments}
    return epiloq.explain("conv2d_int8", as_image(p.x), p.weight, p.bias, **arguments).startswith("cpu, one pass")


@settings(max_examples=60)
@given(st.data())
def test_any_geometry(data: st.DataObject) -> None:
    def draw(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    torch.manual_seed(draw(0, 2**31))
    depthwise = data.draw(st.booleans())
    channels, copies = (draw(2, 40), draw(1, 3)) if depthwise else (draw(1, 4), 1)
    place = Place(
        (draw(1, 9), draw(1, 9)),
        (draw(0, 9), draw(0, 9), draw(0, 9), draw(0, 9)),
        (draw(1, 6), draw(1, 6)),
        channels if depthwise else 1,
    )
    image, kernel = (draw(1, 20), draw(1, 60)), (draw(1, 4), draw(1, 5))
    assume(place.fits(image, kernel))
    n = channels * copies if depthwise else draw(1, 40)
    p = int8_problem((draw(1, 2), *image, channels), n, kernel, place, input_zero=draw(-128, 127))
    assert is_direct(p)
    assert torch.equal(run(p).double(), p.requantized())


@pytest.mark.parametrize(("side", "direct"), [(32, True), (33, False)])
@pytest.mark.parametrize("channels", [1, 24])
def test_sums_stay_exact_at_the_extremes(seed: int, side: int, direct: bool, channels: int) -> None:
    """1024 products of -128 by -128 are 2^24; odd values beside them show a sum that was rounded."""
    p = int8_problem((1, side + 1, side + 7, channels), channels, (side, side), Place(groups=channels))
    p.x.fill_(-128), p.weight.fill_(-128)
    p.x[:, ::5, ::3], p.weight[:, 1::7] = -127, 127
    assert is_direct(p) is direct
    p.weight_scale, p.bias = torch.ones(channels), None
    acc = sums(p.x.double() + 5, p.weight, p.place)
    out = conv2d_int8(
        p.x,
        p.weight,
        input_scale=1.0,
        input_zero=-5,
        weight_scale=p.weight_scale,
        groups=channels,
        out_dtype=torch.float32,
    )
    assert torch.equal(out.double(), acc.float().double())


@pytest.mark.parametrize("width", [1, 5, 6, 7, 255, 256, 257, 1400])
def test_strips_of_a_row(seed: int, width: int) -> None:
    for channels, groups, n in ((16, 16, 16), (17, 17, 17), (100, 100, 100), (576, 576, 576), (3, 1, 16), (3, 1, 25)):
        place = Place(padding=(1, 1, 1, 1), groups=groups)
        p = int8_problem((1, 3, min(width, 40000 // channels), channels), n, (3, 3), place)
        assert is_direct(p) and torch.equal(run(p).double(), p.requantized())


def test_threads(seed: int) -> None:
    """Rows shared among any number of threads, over images, are those of one."""
    p = int8_problem((3, 23, 40, 72), 72, (3, 3), Place((2, 1), (1, 1, 1, 1), groups=72))
    w = PreparedInt8Weight.prepare(
        p.weight, p.weight_scale, p.bias, input=(p.input_scale, p.input_zero), output=(p.output_scale, p.output_zero)
    )
    given = w.parameters("conv2d_int8", to_int8=True, clamp=None)
    where = (p.place.stride, p.place.padding, p.place.dilation, p.place.groups)
    expected = run(p)
    assert torch.equal(expected.double(), p.requantized())
    for threads in (0, 1, 2, 3, 100):
        out = torch.full_like(expected, 99)
        _core.conv2d_int8_on_host(out, p.x, w.q, *given, *where, threads=threads)
        assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match=r"conv2d_int8: x: expected few channels of a group"):
        dense = torch.zeros(72, 3, 3, 72, dtype=torch.int8)
        _core.conv2d_int8_on_host(out, p.x, dense, *given, *where[:3], 1)


@pytest.mark.parametrize(("channels", "groups"), [(32, 32), (7, 7), (3, 1)])
def test_views_and_guards(seed: int, channels: int, groups: int) -> None:
    """Slices of wider images and of wider outputs; what lies beside stays as it was."""
    for begin, pad, stride in itertools.product((0, 3), (0, 5), (1, 2)):
        p = int8_problem((2, 9, 10, channels), channels, (3, 3), Place((stride, stride), (1, 1, 1, 1), groups=groups))
        expected = run(p)
        wide = torch.full((*p.x.shape[:3], begin + channels + pad), -77, dtype=torch.int8)
        wide[..., begin : begin + channels] = p.x
        p.x = wide[..., begin : begin + channels]
        target = torch.full((*expected.shape[:3], begin + channels + pad), 99, dtype=torch.int8)
        assert torch.equal(run(p, out=target[..., begin : begin + channels]), expected)
        assert (target[..., :begin] == 99).all() and (target[..., begin + channels :] == 99).all()
