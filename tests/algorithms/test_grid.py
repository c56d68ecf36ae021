"""Integer grids and rounding to nearest: the convention, the bounds, and what clipping gains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import epiloq
from epiloq.quantize import Grid, fit, rtn
from epiloq.quantize.targets import TARGETS

GRIDS = [Grid(bits, group, symmetric) for bits in (2, 3, 4, 8) for group in (-1, 32, 100) for symmetric in (0, 1)]


def dequantised(q: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> np.ndarray:
    """``scale * (q - zero)`` in float64, element by element."""
    out = np.empty(q.shape)
    length = q.shape[1] if group == -1 else group
    for k in range(q.shape[1]):
        offset = 0 if zero is None else zero[:, k // length].double().numpy()
        out[:, k] = scale[:, k // length].double().numpy() * (q[:, k].double().numpy() - offset)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme", ["w8a16", "w4a16", "w4a16-g128", "w4a16-g64", "w4a16-g32", "w4a8-fp8", "w4a8-int8", "w8a8-int8"]
)
def test_to_nearest_it_is_the_layer_s_weight(seed: int, scheme: str, dtype: torch.dtype) -> None:
    """But the layers of w8a8-int8 do not use -128."""
    linear = nn.Linear(256, 24, bias=False, dtype=dtype)
    weight = linear.weight.detach().clone()
    layer = epiloq.quantize_(nn.Sequential(linear), scheme)[0]
    if scheme == "w8a8-int8":
        assert torch.equal(layer.weight_scale.flatten(), weight.abs().amax(1).float() / 127)
        return
    value = rtn(weight, TARGETS[scheme].grid(scale_dtype=layer.weight_scale.dtype))
    found = layer.dequantized_weight()
    assert torch.equal(found, value.dequantize().to(found.dtype))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 100), (5, 576)])
def test_every_weight_is_within_half_a_step(seed: int, grid: Grid, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    value = rtn(weight, grid)
    columns = shape[1]
    length = columns if grid.group_size == -1 else grid.group_size
    groups = -(-columns // length)
    assert value.q.dtype == (torch.int8 if grid.symmetric else torch.uint8) and value.q.shape == shape
    assert value.scale.shape == (shape[0], groups) and value.scale.dtype == torch.float32
    assert value.q.min() >= grid.lowest and value.q.max() <= grid.highest
    if grid.symmetric:
        assert value.zero is None
    else:
        assert value.zero is not None and value.zero.dtype == torch.int32 and value.zero.shape == (shape[0], groups)
        assert value.zero.min() >= 0 and value.zero.max() <= grid.highest
    expected = dequantised(value.q, value.scale, value.zero, grid.group_size)
    np.testing.assert_allclose(value.dequantize().numpy(), expected, rtol=1e-6)
    steps = value.scale.double().numpy().repeat(length, 1)[:, :columns]
    # Half a step, and another half where rounding the zero point moved the ends of the range.
    bound = (0.5 if grid.symmetric else 1.0) + 1e-4
    assert (np.abs(expected - weight.double().numpy()) <= bound * steps).all()


def test_points_of_the_grid_are_kept(seed: int) -> None:
    q = torch.randint(0, 16, (6, 96))
    q[:, ::32], q[:, 1::32] = 0, 15
    scale, zero = torch.rand(6, 3) + 0.1, torch.randint(1, 15, (6, 3))
    weight = torch.from_numpy(dequantised(q, scale, zero, 32)).float()
    value = rtn(weight, Grid(4, 32))
    assert torch.equal(value.q.long(), q) and torch.equal(value.zero, zero)
    torch.testing.assert_close(value.scale, scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_survive_their_storage_type(seed: int, dtype: torch.dtype) -> None:
    for symmetric in (True, False):
        value = rtn(torch.randn(9, 70), Grid(4, 32, symmetric, dtype))
        assert torch.equal(value.scale.to(dtype).float(), value.scale)


def test_constant_groups() -> None:
    for grid in (Grid(4, 4), Grid(4, 4, symmetric=True), Grid(4, 4, scale_dtype=torch.float16)):
        assert torch.equal(rtn(torch.zeros(3, 8), grid).dequantize(), torch.zeros(3, 8))
        constant = rtn(torch.full((3, 8), -2.5), grid).dequantize()
        torch.testing.assert_close(constant, torch.full((3, 8), -2.5), rtol=0.07, atol=0)


def correlated(channels: int, tokens: int) -> Tensor:
    """Inputs with fewer directions than channels, of very different sizes."""
    mixed = torch.randn(tokens, channels // 4) @ torch.randn(channels // 4, channels)
    return (mixed + 0.3 * torch.randn(tokens, channels)) * torch.rand(channels) ** 2


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_minimises_its_objective(seed: int, symmetric: bool) -> None:
    weight, x = torch.randn(200, 100) ** 3, correlated(100, 400)
    moments = x.t() @ x
    grid = Grid(3, 32, symmetric)

    def group_errors(by: Tensor | None) -> dict[str, np.ndarray]:
        """Errors of whole ranges (None) or ranges clipped by moments, in each of three measures."""
        difference = (rtn(weight, grid, by).dequantize() - weight).double().numpy()
        parts = [slice(start, min(start + 32, 100)) for start in range(0, 100, 32)]
        h = moments.double().numpy()
        return {
            "mse": np.array([(difference[:, p] ** 2).sum(1) for p in parts]),
            "weighted": np.array([(difference[:, p] ** 2 * h.diagonal()[p]).sum(1) for p in parts]),
            "output": np.array([((difference[:, p] @ h[p, p]) * difference[:, p]).sum(1) for p in parts]),
        }

    plain = group_errors(None)
    for name, by in (("mse", torch.ones(100)), ("weighted", moments.diagonal()), ("output", moments)):
        clipped = group_errors(by)
        assert (clipped[name] <= plain[name] * (1 + 1e-4)).all(), name
        assert clipped[name].sum() < 0.97 * plain[name].sum(), name
        others = [group_errors(other)[name].sum() for other in (torch.ones(100), moments.diagonal(), moments)]
        assert clipped[name].sum() <= min(others) * (1 + 1e-4), name


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(2, 8), st.integers(-1, 80), st.booleans(), st.integers(0, 99))
def test_any_shape(rows: int, columns: int, bits: int, group: int, symmetric: bool, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    grid = Grid(bits, group or 1, symmetric)
    value = rtn(weight, grid)
    expected = dequantised(value.q, value.scale, value.zero, grid.group_size)
    np.testing.assert_allclose(value.dequantize().numpy(), expected, rtol=1e-6)
    error = np.abs(expected - weight.numpy())
    assert error.max() <= 1.01 * float(value.scale.max())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_packing_keeps_every_value(seed: int, bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    for group, perm in ((-1, None), (12, torch.randperm(100))):
        size = 1.0 if dtype == torch.float16 else 2.0**30  # past float16's range
        weight = replace(rtn(torch.randn(17, 100) * size, Grid(bits, group, symmetric, dtype)), perm=perm)
        packed = weight.pack()
        assert packed.bits == (bits if bits in (2, 3, 4) else 8)
        assert torch.equal(packed.dequantize(), weight.dequantize())
        assert packed.scale.dtype == dtype


def test_rows_are_independent(seed: int) -> None:
    first, second = torch.randn(5, 40), torch.randn(8, 40)
    both = rtn(torch.cat((first, second)), Grid(4, 16)).split((5, 8))
    for part, weight in zip(both, (first, second), strict=True):
        alone = rtn(weight, Grid(4, 16))
        assert torch.equal(part.q, alone.q) and torch.equal(part.scale, alone.scale)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits(seed: int) -> None:
    weight = torch.randn(50, 300)
    for grid in (Grid(4, 64), Grid(8, -1, True), Grid(4, 32, scale_dtype=torch.float16)):
        cpu, gpu = rtn(weight, grid), rtn(weight.cuda(), grid)
        assert torch.equal(cpu.q, gpu.q.cpu()) and torch.equal(cpu.scale, gpu.scale.cpu())
        assert torch.equal(cpu.dequantize(), gpu.dequantize().cpu())


def test_errors() -> None:
    with pytest.raises(ValueError, match="bits"):
        Grid(9)
    with pytest.raises(ValueError, match="group_size"):
        Grid(4, 0)
    with pytest.raises(ValueError, match="at least one element"):
        fit(torch.zeros(0, 4), Grid())
    with pytest.raises(ValueError, match="finite"):
        rtn(torch.tensor([[1.0, float("nan")]]), Grid())
    with pytest.raises(ValueError, match="float16"):
        rtn(torch.tensor([[1e9, 0.0]]), Grid(scale_dtype=torch.float16))


@pytest.mark.parametrize("grid", [Grid(8, -1, True), Grid(4, 32), Grid(4, 64, True), Grid(3, 32)])
@pytest.mark.parametrize("std", [8e-4, 1e-4, 3e-5])
def test_scales_below_the_normal_float16_numbers(seed: int, grid: Grid, std: float) -> None:
    """To one part in 64 or better they cost next to nothing, and no value is clipped."""
    weight = torch.randn(64, 256) * std
    exact = rtn(weight, grid)
    half = rtn(weight, replace(grid, scale_dtype=torch.float16))
    assert torch.equal(half.scale.half().float(), half.scale) and (half.scale > 0).all()
    if float(exact.scale.min()) > 64 * 2**-24:
        errors = [float((value.dequantize() - weight).norm() / weight.norm()) for value in (half, exact)]
        assert errors[0] < 1.04 * errors[1]
    small = exact.scale < 2**-14
    assert (half.scale >= exact.scale)[small].all()


def test_a_grid_that_widens_has_float32_scales_where_float16_is_too_coarse(seed: int) -> None:
    grid = Grid(4, 32, scale_dtype=torch.float16, widens=True)
    for size, dtype in ((1.0, torch.float16), (1e-3, torch.float16), (1e-6, torch.float32)):
        value = rtn(torch.randn(8, 64) * size, grid)
        assert value.pack().scale.dtype == dtype
        nearest = rtn(torch.randn(8, 64) * size, replace(grid, scale_dtype=torch.float32, widens=False))
        assert value.scale.shape == nearest.scale.shape
    dead = rtn(torch.zeros(8, 64), grid)
    assert not dead.dequantize().any() and dead.scale.isfinite().all()
