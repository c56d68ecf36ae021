"""quantize_blockwise_int8 against the definition in scalar float32; the GPU's bits against the CPU's."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
import int8_reference
from epiloq.ops.quantizers.quantize_blockwise_int8 import _lanes

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SMALLEST = np.float32(np.finfo(np.float32).tiny)


def define_block(x: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.float32, np.float32]:
    """One block of float32, an operation and a rounding at a time."""
    one = np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        lo, hi = one(x.min()), one(x.max())
        reach = one(max(abs(lo), abs(hi))) if symmetric else one(hi - lo)
        if not np.isfinite(reach):
            return np.zeros(len(x), np.int8), one(math.nan), one(math.nan)
    scale = one(1) if reach == 0 else max(one(reach / one(127 if symmetric else 255)), SMALLEST)
    offset = one(0)
    if not symmetric:
        offset = hi if reach == 0 else one(hi - one(one(127) * scale))
    q = [min(max(round(float(one(one(v - offset) / scale))), -128), 127) for v in x]
    return np.array(q, np.int8), scale, offset


def assert_defined(
    x: Tensor, group: int, symmetric: bool, result: tuple[Tensor, Tensor, Tensor | None, Tensor]
) -> None:
    q, scale, offset, total = result
    blocks = -(-x.shape[-1] // group)
    assert q.shape == x.shape and q.dtype == torch.int8
    assert scale.shape == total.shape == (*x.shape[:-1], blocks) and total.dtype == torch.int32
    assert (offset is None) == symmetric
    rows = x.float().cpu().reshape(-1, x.shape[-1]).numpy()
    for r, row in enumerate(rows):
        for b in range(blocks):
            expected, s, o = define_block(row[b * group : (b + 1) * group], symmetric)
            np.testing.assert_array_equal(q.cpu().reshape(rows.shape)[r, b * group : (b + 1) * group], expected)
            np.testing.assert_array_equal(scale.cpu().reshape(-1, blocks)[r, b].numpy(), s)
            if offset is not None:
                np.testing.assert_array_equal(offset.cpu().reshape(-1, blocks)[r, b].numpy(), o)
            assert total.reshape(-1, blocks)[r, b] == expected.sum(dtype=np.int64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("shape", "group"),
    [((1, 1), 32), ((3, 17), 8), ((2, 5, 100), 32), ((7, 576), 128), ((2, 4095), 64), ((5,), 1), ((3, 300), 100)],
)
def test_definition(
    seed: int, device: str, shape: tuple[int, ...], group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    x = (torch.randn(shape) + 0.5).to(dtype).to(device)
    assert_defined(x, group, symmetric, epiloq.quantize_blockwise_int8(x, group, symmetric=symmetric))


@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)),
    st.integers(1, 48),
    st.booleans(),
)
@settings(max_examples=200)
def test_any_row(row: np.ndarray, group: int, symmetric: bool) -> None:
    """All of float32: subnormals, ranges that overflow, NaN and infinities."""
    x = torch.from_numpy(row)[None]
    assert_defined(x, group, symmetric, epiloq.quantize_blockwise_int8(x, group, symmetric=symmetric))


def awkward_rows(columns: int, dtype: torch.dtype) -> Tensor:
    """More of them: the largest of the type, infinities alone, zeros of both signs."""
    x = int8_reference.awkward_rows(16, columns, dtype).float()
    x[12] = torch.randn(columns).sign() * torch.finfo(dtype).max
    x[13] = math.inf
    x[14, ::2] = -0.0
    x[14, 1::2] = 0.0
    return x.to(dtype)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = a.cpu(), b.cpu()
    if not a.is_floating_point():
        return torch.equal(a, b)
    equal = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
    return a.shape == b.shape and bool(equal.all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 8, 17, 100, 576, 4095, 8192])
@pytest.mark.parametrize("group", [1, 8, 16, 17, 32, 64, 100, 128, 256, 512, 1000])
def test_gpu_bits_are_the_cpus(seed: int, columns: int, group: int, dtype: torch.dtype) -> None:
    x = awkward_rows(columns, dtype)
    for symmetric in (True, False):
        cpu = epiloq.quantize_blockwise_int8(x, group, symmetric=symmetric)
        gpu = epiloq.quantize_blockwise_int8(x.cuda(), group, symmetric=symmetric)
        assert all(same_bits(a, b) for a, b in zip(cpu, gpu, strict=True)), symmetric


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [2056, 4095])
@pytest.mark.parametrize("group", [8, 16, 32, 64, 128, 512, 1024])
def test_gpu_bits_of_many_values(seed: int, columns: int, group: int, dtype: torch.dtype) -> None:
    """More than 2^21, of which a thread takes more at a time; the awkward rows among them."""
    awkward = awkward_rows(columns, dtype)
    x = torch.cat((torch.randn(1100 - len(awkward), columns, dtype=dtype) * 3 + 1, awkward))
    assert x.numel() > 1 << 21
    for symmetric in (True, False):
        cpu = epiloq.quantize_blockwise_int8(x, group, symmetric=symmetric)
        gpu = epiloq.quantize_blockwise_int8(x.cuda(), group, symmetric=symmetric)
        assert all(same_bits(a, b) for a, b in zip(cpu, gpu, strict=True)), symmetric


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_awkward_rows(seed: int, device: str, dtype: torch.dtype, symmetric: bool) -> None:
    x = awkward_rows(100, dtype)
    result = epiloq.quantize_blockwise_int8(x.to(device), 32, symmetric=symmetric)
    assert_defined(x, 32, symmetric, result)


@pytest.mark.parametrize("group", [32, 48])
def test_blocks_come_back_within_half_a_step(seed: int, device: str, group: int) -> None:
    x = (torch.randn(9, 200) * torch.rand(9, 1) * 50 + 7).to(device)
    q, scale, offset, _ = epiloq.quantize_blockwise_int8(x, group)
    assert offset is not None
    spread = [part.double().repeat_interleave(group, -1)[:, :200] for part in (scale, offset)]
    error = (spread[0] * q.double() + spread[1] - x.double()).abs()
    assert (error <= 0.501 * spread[0] + 1e-6 * x.double().abs()).all()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_strided_rows(seed: int, device: str, group: int) -> None:
    wide = torch.randn(40, 640, dtype=torch.bfloat16).to(device)
    for view in (wide[:, 64:576], wide[::2, 8:520], wide[:, 3:515], wide.view(5, 8, 640)[:, :, :512]):
        strided = epiloq.quantize_blockwise_int8(view, group)
        dense = epiloq.quantize_blockwise_int8(view.contiguous(), group)
        assert all(same_bits(a, b) for a, b in zip(strided, dense, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    q, scale, offset, total = epiloq.quantize_blockwise_int8(torch.empty(shape, device=device), 4)
    assert offset is not None and q.shape == shape
    assert scale.shape == offset.shape == total.shape == (*shape[:-1], shape[-1] // 4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("columns", "first"), [(100, 9), (104, 8), (1160, 16)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_out(seed: int, device: str, group: int, columns: int, first: int, symmetric: bool) -> None:
    """Written whole, and nothing around it: q lies inside wider rows, of whole vectors and of others."""
    x = torch.randn(5, columns, device=device, dtype=torch.float16)
    expected = epiloq.quantize_blockwise_int8(x, group, symmetric=symmetric)
    end, blocks = first + columns, -(-columns // group)
    wide = torch.full((7, columns + 24), 99, dtype=torch.int8, device=device)
    scale, offset = (torch.full((5, blocks), math.nan, device=device) for _ in range(2))
    total = torch.full((5, blocks), 10**6, dtype=torch.int32, device=device)
    out = (wide[1:6, first:end], scale, None if symmetric else offset, total)
    assert epiloq.quantize_blockwise_int8(x, group, symmetric=symmetric, out=out) is out
    assert all(same_bits(a, b) for a, b in zip(expected, out, strict=True))
    assert (wide[:, :first] == 99).all() and (wide[:, end:] == 99).all() and (wide[[0, 6]] == 99).all()


def outs() -> list[Tensor | None]:
    return [
        torch.full((4, 16), 9, dtype=torch.int8),
        torch.ones(4, 2),
        torch.ones(4, 2),
        torch.ones(4, 2, dtype=torch.int32),
    ]


@pytest.mark.parametrize(
    ("position", "wrong", "named"),
    [
        (0, torch.zeros(4, 17, dtype=torch.int8), "out"),
        (0, torch.zeros(4, 16, dtype=torch.uint8), "out"),
        (1, torch.zeros(4, 3), "scale"),
        (1, torch.zeros(4, 4)[:, ::2], "scale"),
        (1, torch.zeros(8), "scale"),
        (2, torch.zeros(3, 2), "offset"),
        (2, None, "offset"),
        (3, torch.zeros(4, 2), "sum"),
    ],
)
def test_mismatching_outputs_are_refused(position: int, wrong: Tensor | None, named: str) -> None:
    out = outs()
    out[position] = wrong
    for call in (epiloq.quantize_blockwise_int8, lambda *a, **k: epiloq.explain("quantize_blockwise_int8", *a, **k)):
        with pytest.raises(ValueError, match=f"epiloq.quantize_blockwise_int8: {named}: expected"):
            call(torch.randn(4, 16), 8, out=tuple(out))
    assert out[0] is None or position == 0 or (out[0] == 9).all()


def test_outs_that_overlap() -> None:
    x = torch.randn(4, 16)
    q, scale, offset, total = outs()
    for out, named in (
        ((x.view(torch.int8)[:, :16], scale, offset, total), "out"),
        ((q, scale, scale, total), "offset"),
        ((q, scale, offset, scale.view(torch.int32)), "sum"),
        ((q, x.view(-1)[:8].view(4, 2), offset, total), "scale"),
    ):
        with pytest.raises(ValueError, match=f"{named}: expected memory apart"):
            epiloq.quantize_blockwise_int8(x, 8, out=out)


@pytest.mark.parametrize(
    ("x", "group", "text"),
    [
        (torch.zeros(4, 4, dtype=torch.int8), 2, "x: expected float32 or float16 or bfloat16, got int8"),
        (torch.randn(4, 8).t(), 2, "x: expected row-major"),
        (torch.tensor(1.0), 2, "x: expected at least one dimension"),
        (torch.randn(4, 8), 0, "group_size: expected a positive integer, got 0"),
        (torch.randn(4, 8), 2**30, "group_size: expected 1 to"),
    ],
)
def test_bad_arguments_are_named(x: Tensor, group: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        epiloq.quantize_blockwise_int8(x, group)


def test_explain() -> None:
    assert epiloq.supports("quantize_blockwise_int8", torch.randn(3, 5), 2) == (True, "cpu, vectorised blocks")
    assert not epiloq.supports("quantize_blockwise_int8", torch.randn(3, 5), 0)[0]


def test_explain_describes_threads_per_block() -> None:
    groups = (1, 8, 16, 32, 48, 128, 512, 1024)
    assert [_lanes(group, whole=True) for group in groups] == [32, 32, 1, 2, 32, 4, 32, 32]
    assert [_lanes(group, whole=False) for group in groups] == [32, 32, 1, 2, 32, 8, 32, 32]
