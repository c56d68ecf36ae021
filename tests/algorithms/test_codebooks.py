"""float8 grids and integers with offsets: the modules' own weights, and what GPTQ, AWQ and clipping gain on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq.formats import epiloq_modules
from epiloq.quantize import (
    CodedWeight,
    Float8Grid,
    Fp4Grid,
    InputStatistics,
    OffsetGrid,
    awq,
    awq_scale,
    fit,
    gptq,
    output_error,
    rtn,
    search_smooth_scale,
)
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.static import Static
from epiloq.quantize.targets import TARGETS
from epiloq.schemes import SCHEMES

GRIDS = {
    "fp8": Float8Grid(rows=-1),
    "fp8-token": Float8Grid(),
    "fp8-block": Float8Grid(128, 128),
    "w8a16-fp8": Float8Grid(),
    "w8a16-fp8-block": Float8Grid(128, 128),
    "w4a16-mxfp4": Fp4Grid("mxfp4"),
    "w4a16-nvfp4": Fp4Grid("nvfp4"),
    "w8a8-block": OffsetGrid(8, 128, symmetric=True),
    "w4a8-block": OffsetGrid(4, 128),
    "w4a8-block-g32": OffsetGrid(4, 32),
}
OTHERS = {
    "offsets of 8 bits": OffsetGrid(8, 48),
    "narrow blocks": Float8Grid(7, 20),
    "4 bits around 0": OffsetGrid(4, 32, True),
}
E2M1 = torch.tensor([-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ALL = pytest.mark.parametrize("grid", [*GRIDS.values(), *OTHERS.values()], ids=[*GRIDS, *OTHERS])


def inputs(channels: int, tokens: int = 1500) -> Tensor:
    mixed = torch.randn(tokens, channels // 6) @ torch.randn(channels // 6, channels)
    return (mixed + 0.2 * torch.randn(tokens, channels)) * (torch.rand(channels) * 3)


def hessian(x: Tensor) -> Tensor:
    statistics = InputStatistics(x.shape[1], device=x.device)
    statistics.add(x)
    return statistics.hessian


def lost(value: CodedWeight, weight: Tensor, x: Tensor) -> float:
    exact = x.double() @ weight.double().t()
    return float((x.double() @ value.dequantize().double().t() - exact).norm() / exact.norm())


def test_targets_have_them() -> None:
    assert {name: TARGETS[name].grid() for name in GRIDS} == GRIDS
    assert TARGETS.keys() == {name for name, scheme in SCHEMES.items() if scheme.layer is nn.Linear}


@pytest.mark.parametrize("scheme", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (17, 100), (130, 576), (300, 257)])
def test_to_nearest_it_is_the_modules_weight(
    seed: int, scheme: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    linear = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-3, 3, shape[0])[:, None])
        linear.weight[-1] = 0
        linear.weight[0] = 0.75
    module = SCHEMES[scheme].convert(linear)
    stored = TARGETS[scheme].stored_form(rtn(linear.weight, GRIDS[scheme]))
    name, options = epiloq_modules.described(stored, None)
    built = epiloq_modules.KINDS[name].build(
        linear, options, epiloq_modules.state_of(stored, None), linear.weight.device
    )
    found, expected = built.state_dict(), module.state_dict()
    assert type(built) is type(module) and options == dict(SCHEMES[scheme].options) and found.keys() == expected.keys()
    for part, tensor in expected.items():
        assert found[part].dtype == tensor.dtype and torch.equal(found[part].float(), tensor.float()), part
    assert torch.equal(stored.dequantize(), rtn(linear.weight, GRIDS[scheme]).dequantize())


def reference(value: CodedWeight) -> np.ndarray:
    """``scale * q + offset`` in float64, element by element."""
    rows, columns = value.q.shape
    high = rows if value.grid.rows == -1 else value.grid.rows
    wide = columns if value.grid.group_size == -1 else value.grid.group_size
    q, scale = value.q.double().numpy(), value.scale.double().numpy()
    offset = np.zeros_like(scale) if value.offset is None else value.offset.double().numpy()
    assert scale.shape == (-(-rows // high), -(-columns // wide))
    at = np.ix_(np.arange(rows) // high, np.arange(columns) // wide)
    return q * scale[at] + offset[at]


@ALL
def test_parameters_and_values(seed: int, grid: Float8Grid | OffsetGrid) -> None:
    weight = torch.randn(41, 300) ** 3
    value = rtn(weight, grid)
    assert value.q.dtype == grid.dtype and value.scale.dtype == torch.float32
    expected = reference(value)
    # An offset is as large as its block's values, and rounded like them.
    slack = 2.0**-22 * float(weight.abs().max())
    np.testing.assert_allclose(value.dequantize().numpy(), expected, rtol=1e-5, atol=slack)
    assert value.dequantize(torch.float16).dtype == torch.float16
    # Nearest: no other q is nearer.
    error = np.abs(expected - weight.double().numpy())
    for step in (-1, 1):
        other = (
            value.q.view(torch.uint8).to(torch.int16) + step if isinstance(grid, Float8Grid) else value.q.float() + step
        )
        if isinstance(grid, Fp4Grid):
            at = torch.searchsorted(E2M1, value.q.float()) + step
            neighbour = E2M1[at.clamp(0, len(E2M1) - 1)].to(grid.dtype)
        elif isinstance(grid, Float8Grid):
            neighbour = other.clamp(0, 255).to(torch.uint8).view(torch.float8_e4m3fn)
        else:
            neighbour = other.clamp(-(1 << grid.bits - 1), (1 << grid.bits - 1) - 1).to(torch.int8)
        moved = np.abs(reference(CodedWeight(neighbour, value.scale, value.offset, grid)) - weight.double().numpy())
        assert (error <= moved * (1 + 1e-5) + slack)[~np.isnan(moved)].all()


@ALL
@pytest.mark.parametrize("options", [{}, {"act_order": False}, {"act_order": False, "static_groups": False}])
@pytest.mark.parametrize("clipped", [True, False])
def test_gptq_beats_rounding_to_nearest(
    seed: int, grid: Float8Grid | OffsetGrid, options: dict[str, bool], clipped: bool
) -> None:
    x, weight = inputs(300), torch.randn(140, 300)
    h = hessian(x)
    value = gptq(weight, h, grid, moments=h.diagonal() if clipped else None, **options)
    assert lost(value, weight, x) < 0.6 * lost(rtn(weight, grid), weight, x)
    np.testing.assert_allclose(value.dequantize().numpy(), reference(value), rtol=1e-5, atol=1e-6)
    assert value.q.float().isfinite().all()


@ALL
def test_without_correlation_gptq_is_rounding_to_nearest(seed: int, grid: Float8Grid | OffsetGrid) -> None:
    weight = torch.randn(30, 150)
    for options in ({}, {"act_order": False, "static_groups": False}):
        value = gptq(weight, 3 * torch.eye(150), grid, **options)
        assert torch.equal(value.dequantize(), rtn(weight, grid).dequantize())


@ALL
def test_clipping_minimises_its_objective(seed: int, grid: Float8Grid | OffsetGrid) -> None:
    weight, x = torch.randn(20, 100) ** 3, inputs(100, 400)
    moments = x.t() @ x
    for by, of in ((torch.ones(100), torch.eye(100)), (moments.diagonal(), moments.diagonal().diag())):
        clipped, plain = (output_error(rtn(weight, grid, m).dequantize() - weight, of) for m in (by, None))
        assert clipped <= plain * (1 + 1e-5)
    if grid.group_size == -1:
        clipped, plain = (
            output_error(v.dequantize() - weight, moments) for v in (awq(weight, moments, grid), rtn(weight, grid))
        )
        assert clipped <= plain * (1 + 1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (5, 32), (48, 100)])
def test_clipping_of_mxfp4_finds_the_best_power_of_two(seed: int, shape: tuple[int, int]) -> None:
    """Of all scales, block by block, the one of the least squared error; the format's own rule takes another for many
    blocks, whose largest number it cuts."""
    weight, grid = torch.randn(shape), Fp4Grid("mxfp4")
    found, nearest = rtn(weight, grid, torch.ones(shape[1])), rtn(weight, grid)
    blocks = torch.nn.functional.pad(weight, (0, -shape[1] % 32)).unflatten(1, (-1, 32)).double()
    scales = 2.0 ** torch.arange(-24, 6, dtype=torch.float64)[:, None, None, None]
    each = (blocks[..., None] / scales[..., None] - E2M1.double()).abs().amin(-1).mul(scales).square().sum(-1)
    lost = (found.dequantize() - weight).double().square().sum()
    torch.testing.assert_close(lost, each.amin(0).sum(), rtol=1e-6, atol=1e-12)
    if weight.numel() > 1000:
        assert lost < 0.97 * (nearest.dequantize() - weight).double().square().sum()


def test_clipping_of_nvfp4_tries_wider_ranges(seed: int) -> None:
    """A block whose numbers lie near its largest loses less where that becomes 4 rather than 6."""
    weight, grid = torch.randn(48, 96), Fp4Grid("nvfp4")
    found, nearest = rtn(weight, grid, torch.ones(96)), rtn(weight, grid)
    assert (found.scale > 1.2 * nearest.scale).any()
    assert (found.dequantize() - weight).norm() < 0.9 * (nearest.dequantize() - weight).norm()


@ALL
def test_searches_take_any_grid(seed: int, grid: Float8Grid | OffsetGrid) -> None:
    x = torch.randn(300, 96) * torch.logspace(-1, 1, 96)
    weights, h = [torch.randn(24, 96), torch.randn(30, 96)], hessian(x)
    scale = awq_scale(weights, h, x.abs().mean(0), grid)
    found, plain = (
        sum(output_error(rtn(w * s, grid).dequantize() / s - w, h) for w in weights) for s in (scale, torch.ones(96))
    )
    assert found <= plain
    smooth = search_smooth_scale(x, x.abs().amax(0), weights, grid=grid, inputs=Float8Grid())
    assert smooth.shape == (96,) and bool((smooth > 0).all())


def test_stacked_rows_of_their_own(seed: int) -> None:
    weight = torch.randn(30, 64)
    for grid in (Float8Grid(), OffsetGrid(4, 32)):
        first, second = rtn(weight, grid).split((10, 20))
        assert torch.equal(first.dequantize(), rtn(weight[:10], grid).dequantize())
        assert torch.equal(second.dequantize(), rtn(weight[10:], grid).dequantize())
    whole = rtn(weight, Float8Grid(rows=-1))
    assert whole.split((30,)) == [whole]
    with pytest.raises(ValueError, match="share scales"):
        whole.split((10, 20))


def test_errors() -> None:
    for grid in (Float8Grid(group_size=32), OffsetGrid(4, 32)):
        value = rtn(torch.randn(6, 64), grid)
        with pytest.raises(ValueError, match="layer's order"):
            grid.make_weight(value.q, value.parameters, torch.arange(64).flip(0))
    for grid in GRIDS.values():
        with pytest.raises(ValueError, match="finite"):
            rtn(torch.tensor([[1.0, torch.inf]]), grid)
        with pytest.raises(ValueError, match="at least one"):
            fit(torch.zeros(3, 0), grid)
        stack = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8)])}).eval()
        with pytest.raises(ValueError, match="static: expected integers"):
            calibrate(stack, [torch.zeros(1, 3)], grid, ALGORITHMS["rtn"], static=Static())


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", GRIDS)
def test_on_a_gpu(seed: int, scheme: str) -> None:
    x, weight, grid = inputs(300), torch.randn(140, 300), GRIDS[scheme]
    value = gptq(weight.cuda(), hessian(x.cuda()), grid)
    assert value.q.is_cuda and value.scale.is_cuda
    assert lost(value, weight.cuda(), x.cuda()) < 0.6 * lost(rtn(weight, grid), weight, x)
    assert torch.equal(rtn(weight.cuda(), grid).dequantize().cpu(), rtn(weight, grid).dequantize())
    linear = nn.Linear(300, 140, bias=False)
    linear.weight.data.copy_(weight)
    quantised = epiloq.quantize_(nn.Sequential(linear).cuda(), scheme)
    assert torch.isfinite(quantised(x.cuda())).all()
