"""The tiles of groupwise_mm and grouped_mm: each is chosen for some sizes, and right on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

import epiloq
import tile_rows
from epiloq.tuning.timer import forced
from groupwise_reference import RECIPES, Problem, Recipe, assert_close, call, make, up
from reference import poisoned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_every_tile_is_chosen_somewhere() -> None:
    sizes_m, sizes_n = (1, 64, 65, 128, 200, 256, 1024, 4096), (64, 512, 2112, 4096, 6144, 7168, 8192, 24576, 28672)

    def explain(name: str, **sizes: object) -> str:
        return epiloq.explain(name, **sizes).partition(", K over")[0]

    dense = {explain("groupwise_mm", m=m, n=n, k=4096) for m, n in itertools.product(sizes_m, sizes_n)}
    assert len(dense) == tile_rows.GROUPS, sorted(dense)
    columns = {
        explain("groupwise_mm", m=m, n=n, k=4096, column_scales=True) for m, n in itertools.product(sizes_m, sizes_n)
    }
    assert len(columns) == tile_rows.COLUMNS, sorted(columns)
    whole_rows = {
        explain("groupwise_mm", m=m, n=n, k=4096, column_scales=True, whole_row_scales=True)
        for m, n in itertools.product(sizes_m, sizes_n)
    }
    assert sum("transposed" in kernel for kernel in whole_rows) == tile_rows.WHOLE_ROWS, sorted(whole_rows)
    assert "slow" in explain("groupwise_mm", m=1, n=64, k=100, aligned=False)


# M, N, K for which every tile of SM90 is chosen.
SIZES = [
    *itertools.product((1, 9, 64, 65, 130, 256, 1000), (2112, 4096, 6144, 7168, 8200, 24576), (640,)),
    *[(130, 6144, 1040), (130, 7168, 1040), (200, 9000, 1040), (300, 7168, 2064), (130, 6144, 2064)],
]


@pytest.mark.parametrize(("tiles", "column_scales"), [(tile_rows.GROUPS, False), (tile_rows.COLUMNS, True)])
def test_sizes_reach_every_tile(tiles: int, column_scales: bool) -> None:
    how = {"arch": "sm90", "sm_count": 132, "column_scales": column_scales}
    answers = (epiloq.explain("groupwise_mm", m=m, n=n, k=k, **how) for m, n, k in SIZES)
    kernels = {answer.partition(", K over")[0] for answer in answers}
    assert len(kernels) == tiles, kernels


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [0, 1, 4])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_on_a_gpu(seed: int, recipe: Recipe, dtype: torch.dtype, columns: int) -> None:
    kernels = set()
    for m, n, k in SIZES:
        p = make(m, n, k, device="cuda", recipe=recipe)  # an odd number of blocks
        if columns:
            p = p.in_columns(columns)
        bias = torch.randn(n).to(dtype).cuda()
        out = poisoned((m, n), dtype, "cuda")
        call(p, bias, out=out)
        assert_close(out, *p.operands(), bias)
        kernels.add(epiloq.explain("groupwise_mm", p.a, p.b, p.scale_a, p.scale_b, recipe=recipe))
    assert len(kernels) >= (tile_rows.COLUMNS if recipe[1] == 1 else tile_rows.GROUPS), kernels


# For one scale per token: partial tiles in M and N, one K step and several, waves with split-K.
WHOLE_ROW_SIZES = [
    (65, 8, 16),
    (129, 264, 144),
    (256, 4096, 640),
    (300, 7168, 2064),
    (1000, 8200, 272),
    (200, 4100, 272),
    (2049, 6144, 400),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_with_one_scale_each(seed: int, device: str, dtype: torch.dtype, bias: bool) -> None:
    """Scales expanded along K without a copy give the correct product; SM90 has kernels that apply them at the end."""
    for m, n, k in WHOLE_ROW_SIZES if device == "cuda" else [(9, 70, 640), (65, 8, 16), (3, 130, 2064)]:
        p = make(m, n, k, device=device, recipe=(1, 1, 128))
        blocks = p.scale_a.shape[1]
        p.scale_a = p.scale_a[:, :1].expand(-1, blocks)
        added = torch.randn(n, device=device).to(dtype) if bias else None
        out = poisoned((m, n), dtype, device)
        call(p, added, out=out)
        assert_close(out, *p.operands(), added)


def test_which_tokens_with_one_scale_each_have_kernels_of_their_own() -> None:
    """The tiles that compute D^T: M > 64, scales expanded along K without a copy, a 16-bit output, no experts."""

    def has_own(p: Problem, dtype: torch.dtype, offs: torch.Tensor | None = None) -> bool:
        operands, how = (p.a, p.b, p.scale_a, p.scale_b), {"recipe": p.recipe, "out_dtype": dtype}
        with epiloq.config(arch="sm90"):
            if offs is None:
                return "transposed" in epiloq.explain("groupwise_mm", *operands, **how)
            return "transposed" in epiloq.explain("grouped_mm", *operands, offs=offs, **how)

    for experts, m, own in ((0, 1000, True), (0, 64, False), (1, 1000, False)):
        p = make(m, 4096, 640, recipe=(1, 1, 128), experts=experts)
        offs = torch.tensor([m], dtype=torch.int32) if experts else None
        copied = p.scale_a[:, :1].repeat(1, p.scale_a.shape[1])
        p.scale_a = p.scale_a[:, :1].expand_as(copied)
        for dtype in DTYPES:
            assert has_own(p, dtype, offs) == (own and dtype != torch.float32)
        p.scale_a = copied
        assert not has_own(p, torch.bfloat16, offs)


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_tile_of_tokens_with_one_scale_each(seed: int, dtype: torch.dtype, by_rows: bool) -> None:
    """The tiles that compute D^T. TMA reads the weight's scales unless those of a row are contiguous."""
    reached = set()
    for m, n, k in WHOLE_ROW_SIZES[1:]:  # scales of a single block have no stride along K
        p = make(m, n, k, device="cuda", recipe=(1, 1, 128))
        if by_rows:
            p.scale_b = p.scale_b.t().contiguous().t()
        p.scale_a = p.scale_a[:, :1].expand(-1, p.scale_a.shape[1])
        bias = torch.randn(n, device="cuda").to(dtype)
        for weights in ("128 weights", "192 weights, 3 warpgroups", "256 weights"):
            with forced(f"sm90 transposed, per-column, wgmma, 128 tokens x {weights}"):
                for out in (poisoned((m, n), dtype, "cuda"), poisoned((m, n + 3), dtype, "cuda")[:, :n]):
                    call(p, bias, out=out)
                    assert_close(out, *p.operands(), bias)
                given = (p.a, p.b, p.scale_a, p.scale_b)
                reached.add(epiloq.explain("groupwise_mm", *given, recipe=p.recipe, out_dtype=dtype))
    assert sum("transposed" in kernel for kernel in reached) >= tile_rows.WHOLE_ROWS, reached


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_experts_of_tokens_with_one_scale_each(seed: int, masked: bool) -> None:
    counts, n, k = [0, 129, 1, 700, 300], 264, 640
    most, experts = max(counts), len(counts)
    rows = most * experts if masked else sum(counts)
    p = make(rows, n, k, device="cuda", recipe=(1, 1, 128), experts=experts)
    p.scale_a = p.scale_a[:, :1].expand(-1, p.scale_a.shape[1])
    out = poisoned((rows, n), torch.bfloat16, "cuda")
    if masked:
        limits = torch.tensor(counts, dtype=torch.int32, device="cuda")
        lead = (experts, most)
        scale_a = p.scale_a[:, :1].view(*lead, 1).expand(*lead, p.scale_a.shape[1])
        given = (p.a.view(*lead, k), p.b, scale_a, p.scale_b)
        epiloq.grouped_mm(*given, masked_m=limits, recipe=p.recipe, out=out.view(*lead, n))
        parts = [slice(e * most, e * most + count) for e, count in enumerate(counts)]
    else:
        ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, recipe=p.recipe, out=out)
        parts = [slice(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True)]
    left, right = p.operands()
    for expert, part in enumerate(parts):
        assert_close(out[part], left[part], right[expert])


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (100, 512), (264, 16384), (4096, 1536), (6144, 640), (16, 1000)])
def test_every_copy_of_scales_at_small_m(seed: int, n: int, k: int) -> None:
    for m in (1, 4, 7, 16, 33, 64):
        p = make(m, n, k, device="cuda")
        expected = call(p)
        assert_close(expected, *p.operands())
        blocks = p.scale_b.shape[0]
        for pitch, first in ((blocks, 0), (up(blocks, 4) * 4, 0), (up(blocks, 4) * 4 + 1, 0), (up(blocks, 4) * 4, 1)):
            memory = torch.full((p.scale_b.shape[1] * pitch + first,), float("nan"), device="cuda")
            rows = memory[first:].view(-1, pitch)[:, :blocks]
            rows.copy_(p.scale_b.t())
            for columns in (p, p.in_columns(1), p.in_columns(4)):
                assert torch.equal(epiloq.groupwise_mm(p.a, p.b, columns.scale_a, rows.t()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sm89_tiles_on_a_gpu(seed: int, recipe: Recipe, dtype: torch.dtype) -> None:
    kernels = set()
    with epiloq.config(arch="sm89"):
        for (m, n), k in itertools.product([(1, 16), (64, 264), (65, 40), (300, 1032)], (16, 128, 400, 2064)):
            p = make(m, n, k, device="cuda", recipe=recipe)
            bias = torch.randn(n).to(dtype).cuda()
            out = poisoned((m, n), dtype, "cuda")
            call(p, bias, out=out)
            assert_close(out, *p.operands(), bias)
            kernels.add(epiloq.explain("groupwise_mm", p.a, p.b, p.scale_a, p.scale_b, recipe=recipe))
        assert len(kernels) == 2 and all("mma.sync" in kernel for kernel in kernels), kernels
        counts = [0, 1, 129, 70, 0, 300, 64, 2]
        p = make(sum(counts), 520, 640, device="cuda", experts=len(counts))
        out = poisoned((sum(counts), 520), dtype, "cuda")
        ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, out=out)
    left, right = p.operands()
    for expert, rows in enumerate(torch.arange(sum(counts), device="cuda").split(counts)):
        assert_close(out[rows], left[rows], right[expert])


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counts", [[0, 1, 129, 700, 0, 1300, 64, 2000], [1, 0, 3, 2] * 16])
def test_experts_of_many_tiles_on_a_gpu(seed: int, counts: list[int], masked: bool) -> None:
    """CTAs that continue from one expert to the next, with large and with small tiles."""
    experts, most = len(counts), max(counts)
    n, k = 4096, 640
    if masked:
        p = make(most * experts, n, k, device="cuda", experts=experts)
        a, scale_a = p.a.view(experts, most, k), p.scale_a.view(experts, most, -1)
        out = poisoned((experts, most, n), torch.bfloat16, "cuda")
        masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
        epiloq.grouped_mm(a, p.b, scale_a, p.scale_b, masked_m=masked_m, out=out)
        rows = [slice(e * most, e * most + count) for e, count in enumerate(counts)]
        out = out.view(-1, n)
    else:
        p = make(sum(counts), n, k, device="cuda", experts=experts).in_columns(4)
        ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        out = poisoned((sum(counts), n), torch.bfloat16, "cuda")
        epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, out=out)
        rows = [slice(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True)]
    left, right = p.operands()
    for expert, part in enumerate(rows):
        assert_close(out[part], left[part], right[expert])


@pytest.mark.gpu
def test_graphs_and_repeats_give_the_same_bits(seed: int) -> None:
    p = make(77, 4096, 2048, device="cuda").in_columns(4)
    expected, out = call(p), torch.empty(77, 4096, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call(p, out=out)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
