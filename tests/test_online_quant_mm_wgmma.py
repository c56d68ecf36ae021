"""online_quant_mm by SM90's wgmma kernels: what their tiles, clusters and stores add to the other kernels' tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import epiloq
from blockwise_kernels import kernel, some, tile
from blockwise_reference import exact, make_weight
from reference import ulp


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_float32_sums_of_wgmma_kernels(seed: int, bits: int, offset: bool) -> None:
    """Scales and offsets' parts pass tensor cores in two tf32 parts, and are added there with their last bit cut off:
    terms of one sign, where that adds up with every block, stay within what docs/numerics.md says."""
    if "sm90" not in epiloq._core.built_archs():
        pytest.skip("built without sm90")
    for m, n, k in ((65, 200, 1000), (200, 4100, 4096), (130, 300, 16400), (300, 5000, 2048)):
        assert kernel(m, n, k, 128, bits, "sm90").startswith("sm90 wgmma")
        x = torch.rand(m, k, device="cuda") + 3
        weight = make_weight(n, k, 128, bits=bits, offset=offset, device="cuda")
        weight = replace(weight, q=weight.q.clamp(min=0), offset=weight.offset.abs() if offset else None)
        rows, columns = some(m, 40).cuda(), some(n, 60).cuda()
        with epiloq.config(arch="sm90"):
            out = epiloq.online_quant_mm(x, weight.prepared())[rows][:, columns]
        chosen = replace(
            weight,
            q=weight.q[columns],
            scale=weight.scale[columns],
            offset=weight.offset[columns] if offset else None,
        )
        result, magnitude = exact(x[rows], chosen, None)
        limit = ulp(result, torch.float32) + (2.0**-20 + -(-k // 128) * 2.0**-23) * magnitude
        assert ((out.double() - result).abs() <= limit).all(), (m, n, k)


# Of SM90: each tile, more of them than there are SMs and shared by a cluster, odd numbers of blocks along K, and one
# to three waves of which the last is shared.
WGMMA_SHAPES = (
    (300, 300, 600),
    (70, 200, 2300),
    (300, 8200, 600),
    (1100, 4100, 600),
    (220, 8200, 600),
    (560, 6144, 600),
    (1000, 8200, 600),
    (514, 8192, 128),
    (80, 2000, 2300),
    (96, 2000, 8320),
    (112, 2000, 8320),
    (128, 1900, 16400),
    (1, 300, 8320),
    (17, 260, 8320),
    (300, 6100, 4000),
    (512, 6144, 4100),
    (250, 28600, 2300),
)


@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_of_wgmma_reach_every_tile(bits: int) -> None:
    names = [kernel(*shape, 128, bits, "sm90") for shape in WGMMA_SHAPES]
    tiles = {f"128x{n}x128" for n in (64, 80, 96, 112, 128)}
    for shared in (False, True):
        assert {tile(name).split()[-1] for name in names if ("K over" in name) == shared} == tiles, shared
    assert sum("K of the last wave over clusters of 2" in name for name in names) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(40, 300, 700), *WGMMA_SHAPES])
def test_what_is_not_finite_stays_in_its_row(
    seed: int, m: int, n: int, k: int, offset: bool, bits: int, dtype: torch.dtype
) -> None:
    """Also where shared memory that held such a token's parameters comes again, in another block of K or tile."""
    x = torch.randn(m, k, device="cuda").to(dtype)
    weight = make_weight(n, k, 128, bits=bits, offset=offset, device="cuda")
    expected = epiloq.online_quant_mm(x, weight.prepared())
    x[min(3, m - 1), k - 1], x[m - 1, 0] = float("nan"), float("inf")
    out = epiloq.online_quant_mm(x, weight.prepared())
    spoiled = torch.tensor([min(3, m - 1), m - 1], device="cuda")
    assert out[spoiled].isnan().all()
    rest = torch.ones(m, dtype=torch.bool, device="cuda").index_fill(0, spoiled, False)
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_leave_as_floats_do(seed: int, dtype: torch.dtype, bits: int) -> None:
    """16-bit outputs leave by other ways than float32, by TMA while the next tile is multiplied; where K is short that
    is soon done. Their values are those of float32, rounded."""
    for m, n, k in WGMMA_SHAPES:
        weight = make_weight(n, k, 128, bits=bits, offset=False, device="cuda").prepared()
        for _ in range(5):
            x = torch.randn(m, k, device="cuda").to(dtype)
            expected = epiloq.online_quant_mm(x.float(), weight).to(dtype)
            assert torch.equal(epiloq.online_quant_mm(x, weight), expected), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_around_an_output_nothing_is_written(seed: int, dtype: torch.dtype, bits: int) -> None:
    """Views whose rows TMA can write and others, whose columns may be no multiple of 16 bytes, with the same bits."""
    for m, n, k in (*WGMMA_SHAPES, (129, 2050, 640)):
        x = torch.randn(m, k, device="cuda").to(dtype)
        weight = make_weight(n, k, 128, bits=bits, offset=False, device="cuda").prepared()
        bias = torch.randn(n, device="cuda").to(dtype)
        expected = epiloq.online_quant_mm(x, weight, bias=bias, clamp=(-20, 20))
        for first in (16, 5):
            memory = torch.full((m + 9, (n + 47) // 8 * 8), 99.0, device="cuda", dtype=dtype)
            inside = torch.zeros_like(memory, dtype=torch.bool)
            inside[4 : 4 + m, first : first + n] = True
            epiloq.online_quant_mm(x, weight, bias=bias, clamp=(-20, 20), out=memory[4 : 4 + m, first : first + n])
            assert torch.equal(memory[inside].view(m, n), expected), (m, n, k, first)
            assert (memory[~inside] == 99).all(), (m, n, k, first)
