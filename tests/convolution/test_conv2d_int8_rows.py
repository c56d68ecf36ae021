"""Every tile of conv2d_int8 by name, with every split of K: exact integers, whatever the shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
from conv_arguments import assert_same, conv2d_int8, int8_arguments
from epiloq import _core
from epiloq.ops.convolutions.conv2d import Geometry, geometry

NAME = "conv2d_int8"
# Of the rows in src/dispatch/conv2d_int8/tables.h: the columns of a stage and the channels that are copied at a time.
DEPTHS = (128,) * 6 + (64,) * 4 + (32,)
VECTORS = (16,) * 9 + (4, 1)
WGMMA_ROWS, SPLITS = 5, range(1, 9)
# Image, kernel, stride, padding, dilation, channels and outputs of a group, groups.
SHAPES: dict[int, tuple[tuple[Any, ...], ...]] = {
    16: (
        ((7, 7), (3, 3), 1, 1, 1, 512, 136, 1),
        ((9, 14), (1, 1), 1, 0, 1, 272, 300, 1),
        ((15, 8), (3, 3), 2, (1, 0, 0, 1), 1, 64, 64, 1),
        ((11, 12), (5, 3), (2, 1), (2, 1), (1, 2), 32, 40, 2),
        ((40, 33), (1, 1), 1, 0, 1, 16, 17, 1),
        ((6, 5), (3, 3), 1, 1, 2, 48, 257, 1),
    ),
    4: (((9, 14), (3, 3), 1, 1, 1, 36, 70, 1), ((8, 7), (5, 5), (1, 2), 2, 1, 12, 9, 3)),
    1: (
        ((23, 20), (7, 7), 2, 3, 1, 3, 40, 1),
        ((9, 9), (3, 3), 1, 1, 1, 17, 5, 2),
        ((12, 9), (2, 3), 1, (2, 1, 0, 3), (2, 1), 1, 70, 1),
    ),
}  # fmt: skip


def has_wgmma() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def operands(shape: tuple[Any, ...]) -> tuple[dict[str, Any], Geometry]:
    image, kernel, stride, padding, dilation, channels, outputs, groups = shape
    arguments = int8_arguments(image, kernel, channels, outputs, groups, batch=3)
    arguments |= {"stride": stride, "padding": padding, "dilation": dilation}
    return arguments, geometry(NAME, kernel, stride, padding, dilation, groups)


def run(
    arguments: dict[str, Any], where: Geometry, dtype: torch.dtype, like: Tensor, kernel: tuple[int, int]
) -> Tensor:
    output = (1.0, 5) if dtype == torch.int8 else None
    weight = epiloq.PreparedInt8Weight.prepare(
        arguments["weight"].cuda(),
        arguments["weight_scale"].cuda(),
        arguments["bias"].cuda(),
        input=(1.0, arguments["input_zero"]),
        output=output,
    )
    parameters = weight.parameters(NAME, to_int8=output is not None, clamp=(-90.0, 100.0))
    # An int8 output cannot hold NaN: what should be there, one bit off.
    out = torch.full_like(like, math.nan) if dtype.is_floating_point else like ^ 1
    out = out.cuda()
    _core.conv2d_int8(out, arguments["x_q"].cuda(), weight.q, *parameters, *where, kernel=kernel)
    return out.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("row", range(len(DEPTHS)))
def test_every_row_and_split(seed: int, row: int) -> None:
    if row < WGMMA_ROWS and not has_wgmma():
        pytest.skip("no wgmma")
    dtypes = (torch.int8, torch.int8, torch.float32, torch.bfloat16, torch.float16)
    for shape in SHAPES[VECTORS[row]]:
        arguments, where = operands(shape)
        stages = math.ceil(arguments["weight"][0].numel() / DEPTHS[row])
        expected = {
            dtype: conv2d_int8(
                **arguments,
                **({"output_scale": 1.0, "output_zero": 5} if dtype == torch.int8 else {}),
                clamp=(-90.0, 100.0),
                out_dtype=dtype,
            )
            for dtype in set(dtypes)
        }
        for split in SPLITS:
            dtype = dtypes[(split + row) % len(dtypes)]
            if split > stages or (split > 1 and torch.cuda.get_device_capability() < (9, 0)):
                with pytest.raises(ValueError, match="kernel: expected one that fits"):
                    run(arguments, where, dtype, expected[dtype], (row, split))
                continue
            assert_same(run(arguments, where, dtype, expected[dtype], (row, split)), expected[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("row", [0, 1, 4, 5, 8])
def test_splits_of_every_tie(row: int) -> None:
    """Sums that lie half-way between integers, added up over a cluster: the exact path after the fast one."""
    if row < WGMMA_ROWS and not has_wgmma():
        pytest.skip("no wgmma")
    x = torch.zeros(1, 300, 1, 1024, dtype=torch.int8)
    x[0, :, 0, :] = torch.arange(300)[:, None].sub(150).clamp(-128, 127)
    weight = torch.zeros(70, 1, 1, 1024, dtype=torch.int8)
    weight[:, 0, 0, ::100] = 1
    arguments = {
        "x_q": x,
        "weight": weight,
        "bias": torch.zeros(70),
        "input_zero": 0,
        "weight_scale": torch.ones(1) / 2,
    }
    where = geometry(NAME, (1, 1), 1, 0, 1, 1)
    expected = conv2d_int8(**arguments, input_scale=1.0, output_scale=1.0, output_zero=5, clamp=(-90.0, 100.0))
    for split in (1, 3, 8):
        if split == 1 or torch.cuda.get_device_capability() >= (9, 0):
            assert_same(run(arguments, where, torch.int8, expected, (row, split)), expected)


def test_problems_without_a_kernel_are_refused(seed: int) -> None:
    arguments, where = operands(SHAPES[4][0])
    weight = epiloq.PreparedInt8Weight.prepare(
        arguments["weight"], arguments["weight_scale"], input=(1.0, 0), output=(1.0, 0)
    )
    parameters = weight.parameters(NAME, to_int8=True, clamp=None)
    out = conv2d_int8(arguments["x_q"], weight, padding=1)

    def words(arch: str, kernel: tuple[int, int]) -> str:
        with epiloq.config(arch=arch):
            return _core.explain_conv2d_int8(out, arguments["x_q"], weight.q, *parameters, *where, kernel=kernel)

    assert "mma.sync 64 pixels x 64 channels" in words("sm75", (9, 1))
    assert "K over clusters of 5" in words("sm90", (10, 5))
    refused = (
        ("sm90", (0, 1)), ("sm80", (6, 1)), ("sm90", (len(DEPTHS), 1)), ("sm90", (-1, 1)), ("sm80", (9, 2)),
        ("sm90", (9, 7)), ("sm90", (9, 0)), ("sm90", (9, 9)),
    )  # fmt: skip
    for arch, kernel in refused:
        with pytest.raises(ValueError, match=r"epiloq\.conv2d_int8: kernel: expected one that fits"):
            words(arch, kernel)
