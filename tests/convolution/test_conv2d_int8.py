"""int8 convolutions against float64: geometry, requantisation, borders, views, compilation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from conv_arguments import as_image, conv2d_int8
from conv_reference import Int8Problem, Place, assert_float_close, int8_problem
from epiloq import PreparedInt8Weight
from reference import poisoned

RELU = (0.0, math.inf)


def run(p: Int8Problem, **options: Any) -> Tensor:
    return conv2d_int8(p.x, p.weight, p.bias, **p.scales, **p.place.arguments, **options)


def assert_exact(p: Int8Problem, **options: Any) -> None:
    out = run(p, **p.output, **options)
    assert out.dtype == torch.int8
    assert torch.equal(out.cpu().double(), p.requantized(**options))


GEOMETRIES = list(itertools.product((1, 2, 3), (0, 1, 2), (1, 2), (1, 2, 4)))


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), GEOMETRIES)
def test_every_geometry(seed: int, device: str, stride: int, padding: int, dilation: int, groups: int) -> None:
    sides = (padding, padding, padding, padding)
    place = Place((stride, stride), sides, (dilation, dilation), groups)
    for kernel in ((1, 1), (3, 3), (2, 5)):
        assert_exact(int8_problem((2, 11, 12, 4), 8, kernel, place, device=device), clamp=RELU)


@pytest.mark.parametrize("channels", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("n", [1, 3, 17, 64])
def test_channels(seed: int, device: str, channels: int, n: int) -> None:
    for kernel, sides in (((1, 1), (0, 0, 0, 0)), ((3, 3), (1, 1, 1, 1)), ((3, 1), (2, 0, 0, 1))):
        assert_exact(int8_problem((1, 7, 5, channels), n, kernel, Place(padding=sides), device=device))


@pytest.mark.parametrize("channels", [1, 3, 24, 65])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise(seed: int, device: str, channels: int, outputs: int, stride: int) -> None:
    for kernel in (3, 5):
        half = kernel // 2
        place = Place((stride, stride), (half, half, half, half), (1, 1), channels)
        p = int8_problem((2, 9, 14, channels), channels * outputs, (kernel, kernel), place, device=device)
        assert_exact(p, clamp=(0.0, 6.0))


@settings(max_examples=120)
@given(st.data(), st.integers(0, 2**31))
def test_any_problem(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    draw = data.draw
    groups = draw(st.integers(1, 4))
    image = (
        draw(st.integers(0, 2)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
        groups * draw(st.integers(1, 5)),
    )
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    sides = draw(st.tuples(*(st.integers(0, 3) for _ in range(4))))
    place = Place(draw(pair), sides, draw(pair), groups)
    numbers = {"input_zero": draw(st.integers(-128, 127)), "output_zero": draw(st.integers(-128, 127))}
    p = int8_problem(
        image,
        groups * draw(st.integers(1, 5)),
        kernel,
        place,
        bias=draw(st.booleans()),
        per_channel=draw(st.booleans()),
        **numbers,
    )
    if place.fits(image[1:3], kernel):
        assert_exact(p)
    else:
        with pytest.raises(ValueError, match=r"conv2d_int8: x: expected a (height|width) of at least"):
            run(p, **p.output)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clamp", [None, (0.0, 6.0)])
def test_floating_point_output(seed: int, device: str, dtype: torch.dtype, clamp: tuple[float, float] | None) -> None:
    p = int8_problem((2, 9, 8, 20), 17, (3, 3), Place(padding=(1, 1, 1, 1)), device=device)
    reference, terms = p.real()
    out = poisoned(tuple(reference.shape), dtype, device)
    assert run(p, out=out, clamp=clamp).data_ptr() == out.data_ptr()
    assert_float_close(out, reference if clamp is None else reference.clamp(*clamp), terms)
    assert torch.equal(run(p, out_dtype=dtype, clamp=clamp), out)


@pytest.mark.parametrize("channels", [1, 3, 20])
def test_memory_formats(seed: int, device: str, channels: int) -> None:
    """Shapes are torch's, results are channels_last; images in any memory are taken."""
    p = int8_problem((2, 9, 8, channels), 17, (3, 3), Place(padding=(1, 1, 1, 1)), device=device)
    image = as_image(p.x)
    expected = epiloq.conv2d_int8(image, p.weight, p.bias, **p.scales, **p.output, **p.place.arguments)
    assert expected.shape[:2] == (2, 17) and expected.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(expected.permute(0, 2, 3, 1), run(p, **p.output))
    for other in (image.contiguous(), image.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)):
        y = epiloq.conv2d_int8(other, p.weight, p.bias, **p.scales, **p.output, **p.place.arguments)
        assert torch.equal(y, expected) and y.stride() == expected.stride()
    out = torch.empty_like(expected)
    assert epiloq.conv2d_int8(image, p.weight, p.bias, **p.scales, **p.output, **p.place.arguments, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("zero", [-128, -1, 0, 127])
def test_borders_hold_the_zero_point(device: str, zero: int) -> None:
    """Of an image of the number 0, every output is the bias, borders included."""
    x = torch.full((1, 4, 5, 3), zero, dtype=torch.int8, device=device)
    weight = torch.randint(-128, 128, (7, 3, 3, 3), dtype=torch.int8, device=device)
    bias = torch.arange(7.0, device=device)
    numbers = {"input_scale": 1.0, "input_zero": zero, "weight_scale": torch.ones(1, device=device), "padding": 2}
    out = conv2d_int8(x, weight, bias, output_scale=1.0, output_zero=2, **numbers)
    assert torch.equal(out, (bias + 2).to(torch.int8).expand_as(out))
    real = conv2d_int8(x, weight, bias, out_dtype=torch.float32, **numbers)
    assert torch.equal(real, bias.expand_as(real))


def test_views(seed: int, device: str) -> None:
    """A crop of a wider image, and an output between others, whose neighbours stay."""
    p = int8_problem((2, 12, 13, 24), 10, (3, 3), Place(padding=(1, 1, 1, 1)), device=device)
    whole = p.x
    p.x = whole[:, 2:9, 1:11, 4:20]
    p.weight = p.weight[..., :16].contiguous()
    around = torch.full((2, 7, 10, 14), 99, dtype=torch.int8, device=device)
    run(p, **p.output, out=around[..., 2:12])
    assert torch.equal(around[..., 2:12].cpu().double(), p.requantized())
    assert (around[..., :2] == 99).all() and (around[..., 12:] == 99).all()


@pytest.mark.parametrize("groups", [1, 4])
def test_empty(device: str, groups: int) -> None:
    p = int8_problem((0, 5, 6, 4), 8, (3, 3), Place(groups=groups), device=device)
    assert run(p, **p.output).shape == (0, 3, 4, 8)
    p = int8_problem((2, 5, 6, 4), 0, (3, 3), device=device)
    assert run(p, **p.output).shape == (2, 3, 4, 0)


def test_prepared_weight_changes_its_scales(seed: int, device: str) -> None:
    p = int8_problem((1, 6, 6, 8), 5, (3, 3), device=device)
    before = PreparedInt8Weight.prepare(p.weight, p.weight_scale, p.bias, input=(0.5, 9))
    after = before.updated((p.input_scale, p.input_zero), (p.output_scale, p.output_zero))
    assert after.q is before.q and before.output is None
    assert torch.equal(conv2d_int8(p.x, after).cpu().double(), p.requantized())
    assert torch.equal(after.updated(output=(1.0, 0)).scale, before.updated(after.input).scale)
    weight = torch.randn(5, 8, 3, 3, device=device)
    rounded = PreparedInt8Weight.quantize(weight, input=(1.0, 0))
    restored = rounded.q.float() * rounded.weight_scale.view(-1, 1, 1, 1)
    assert ((restored.permute(0, 3, 1, 2) - weight).abs() <= 0.5001 * rounded.weight_scale.view(-1, 1, 1, 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(seed: int, device: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    p = int8_problem((2, 9, 8, 4), 6, (3, 3), device=device)
    prepared = PreparedInt8Weight.prepare(
        p.weight, p.weight_scale, p.bias, input=(p.input_scale, p.input_zero), output=(p.output_scale, p.output_zero)
    )

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = conv2d_int8(x, prepared, padding=1, clamp=RELU)
        return y, conv2d_int8(x, p.weight, p.bias, **p.scales, out_dtype=torch.float16)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for image in ((2, 9, 8, 4), (1, 5, 11, 4)):
        x = torch.randint(-128, 128, image, dtype=torch.int8, device=device)
        for ours, theirs in zip(compiled(x), both(x), strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_compiled_outputs_are_in_channels_last_memory(seed: int, device: str) -> None:
    """Which Dynamo does not let an operator write."""
    x, weight = (
        torch.randint(-9, 9, (2, 4, 5, 6)).to(torch.int8).to(device),
        torch.ones(8, 1, 1, 4).to(torch.int8).to(device),
    )
    numbers: Any = {"input_scale": 0.1, "weight_scale": torch.ones(8, device=device), "output_scale": 0.5}
    packed = epiloq.pack_conv2d_weight(weight, torch.ones(8, device=device), bits=4, group_size=-1)

    def both(x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return epiloq.conv2d_int8(x, weight, **numbers, out=one), epiloq.conv2d_weight_only(
            x.float(), packed, out=other
        )

    expected = epiloq.conv2d_int8(x, weight, **numbers), epiloq.conv2d_weight_only(x.float(), packed)
    outputs = [torch.zeros_like(each) for each in expected]
    found = torch.compile(both, fullgraph=True, backend="aot_eager")(x, *outputs)
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, outputs, expected))
    with pytest.raises(Exception, match=r"out: expected \[2, 8, 5, 6\], got \[1, 8, 5, 6\]"):
        torch.compile(both, backend="aot_eager")(x, outputs[0][:1], outputs[1])


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_zero": 128}, ValueError, "input_zero: expected an integer from -128 to 127, got 128"),
    ({"output_zero": -129}, ValueError, "output_zero: expected an integer"),
    ({"input_scale": 0.0}, ValueError, "input_scale: expected a positive, finite number"),
    ({"input_scale": None}, TypeError, "input_scale: expected one with a plain weight"),
    ({"output_scale": math.inf}, ValueError, "output_scale: expected a positive"),
    ({"output_scale": None}, ValueError, "output_scale: expected one with int8 output"),
    ({"out_dtype": torch.float32}, ValueError, "output_scale: expected None with floating-point output"),
    ({"out_dtype": torch.int32}, ValueError, "out_dtype: expected torch.int8"),
    ({"groups": 3}, ValueError, "groups: expected a divisor of 8 output channels"),
    ({"groups": 2}, ValueError, "x_q: expected 8 channels"),
    ({"groups": 0}, ValueError, "groups: expected values from 1"),
    ({"stride": 0}, ValueError, "stride: expected values from 1"),
    ({"stride": (1, 2, 3)}, ValueError, r"stride: expected an integer below 2\^31, or two"),
    ({"padding": -1}, ValueError, "padding: expected values from 0"),
    ({"padding": "same", "stride": 2}, ValueError, 'padding: expected "same" with unit strides'),
    ({"dilation": 5}, ValueError, "x: expected a height of at least 11"),
    ({"clamp": (1.0, 0.0)}, ValueError, r"clamp: expected \(lo, hi\) with lo <= hi"),
    ({"clamp": (6, None)}, ValueError, r"conv2d_int8: clamp: expected \(lo, hi\).*got \(6, None\)"),
    ({"clamp": (6.0, 0.0), "output_scale": 0.02}, ValueError, r"got \(6.0, 0.0\)"),
    ({"weight_scale": torch.ones(3)}, ValueError, r"conv2d_int8: weight_scale: expected 1 element or \[8\]"),
    ({"weight": torch.ones(8, 3, 3, 4)}, ValueError, "conv2d_int8: weight: expected torch.int8"),
    ({"weight": torch.ones(8, 4, dtype=torch.int8)}, ValueError, "conv2d_int8: weight: expected .Co, Kh, Kw"),
    ({"padding": "wide"}, ValueError, r"padding: expected an integer below 2\^31, two, four"),
    ({"output_scale": None, "output_zero": 3, "out_dtype": torch.float32}, ValueError, "output_zero: expected None"),
    ({"bias": torch.ones(7)}, ValueError, r"bias: expected shape \[8\]"),
    ({"bias": torch.ones(8, dtype=torch.float16)}, ValueError, "bias: expected a float32 tensor"),
    ({"x_q": torch.zeros(1, 6, 6, 4)}, ValueError, r"x_q: expected torch\.int8, got torch\.float32 \[1, 4, 6, 6\]"),
    (
        {"out": torch.zeros(1, 8, 4, 4, dtype=torch.int8).permute(0, 2, 3, 1)},
        ValueError,
        r"out: expected channels_last memory .*memory_format",
    ),
    ({"x_q": torch.zeros(6, 6, 4, dtype=torch.int8)}, ValueError, r"x_q: expected \[B, Ci, H, W\]"),
]


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[text[:30] for _, _, text in WRONG])
def test_errors(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    call: dict[str, Any] = {
        "x_q": torch.zeros(1, 6, 6, 4, dtype=torch.int8),
        "weight": torch.zeros(8, 3, 3, 4, dtype=torch.int8),
        "input_scale": 1.0,
        "weight_scale": torch.ones(8),
        "output_scale": 1.0,
    }
    with pytest.raises(kind, match=text):
        conv2d_int8(**{**call, **change})


def test_sizes_in_messages_are_in_the_callers_order() -> None:
    """Channels come second, as in torch, whatever the memory's order."""
    weight, scale = torch.zeros(8, 3, 3, 4, dtype=torch.int8), torch.ones(8)
    numbers: Any = {"input_scale": 1.0, "weight_scale": scale, "output_scale": 1.0}
    x, out = torch.zeros(1, 4, 6, 7, dtype=torch.int8), torch.zeros(1, 8, 5, 6, dtype=torch.int8)
    for image, options, text in (
        (x[:, :3], {}, r"x_q: expected 4 channels .*got \[1, 3, 6, 7\]"),
        (x[:, :, :0], {}, r"x_q: expected an image of at least one pixel, got \[1, 4, 0, 7\]"),
        (
            x,
            {"out": out.contiguous(memory_format=torch.channels_last)},
            r"out: expected \[1, 8, 4, 5\], got \[1, 8, 5, 6\]",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            epiloq.conv2d_int8(image, weight, **numbers, **options)


def test_same_and_valid_padding(seed: int) -> None:
    p = int8_problem((1, 6, 7, 4), 8, (2, 3))
    p.place = Place(padding=(0, 1, 2, 2), dilation=(1, 2))
    out = conv2d_int8(p.x, p.weight, p.bias, padding="same", dilation=(1, 2), **p.scales, **p.output)
    assert torch.equal(out.double(), p.requantized())
    p.place = Place()
    out = conv2d_int8(p.x, p.weight, p.bias, padding="valid", **p.scales, **p.output)
    assert torch.equal(out.double(), p.requantized())


def test_explain_and_supports() -> None:
    p = int8_problem((1, 6, 6, 4), 8, (3, 3))
    assert epiloq.explain("conv2d_int8", as_image(p.x), p.weight, p.bias, **p.scales, **p.output).startswith("cpu")
    fits, reason = epiloq.supports("conv2d_int8", as_image(p.x), p.weight, p.bias, **p.scales, dilation=9, **p.output)
    assert not fits and "height" in reason
    x, weight = p.x.view(-1, 4), p.weight[:, 0, 0]
    assert epiloq.supports("requantized_mm", x, weight, **p.scales, **p.output)[0]


def test_no_gradient() -> None:
    p = int8_problem((1, 6, 6, 4), 8, (3, 3))
    assert p.bias is not None
    out = conv2d_int8(p.x, p.weight, p.bias.requires_grad_(), **p.scales, out_dtype=torch.float32)
    assert not out.requires_grad
