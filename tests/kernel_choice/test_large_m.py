"""scaled_mm's tiles on an SM90 GPU: every epilogue with per-row scales, outputs that TMA can or cannot store."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import epiloq
import tile_rows
from float8_reference import Float8Problem, assert_float8_close, make_float8_problem
from groupwise_reference import assert_close, make
from reference import Problem, assert_within_one_ulp, make_problem, poisoned
from tile_products import PRODUCTS, only_its_own

HALVES = [torch.float16, torch.bfloat16]
# M, N, K that reach every tile with per-row scales, and CUTLASS's for int8 at large M; some last tiles have one token.
SIZES = [
    *[(200, 40, 528), (129, 2112, 528), (200, 2112, 528), (384, 4616, 528), (64, 7168, 528), (300, 7168, 528)],
    *[(129, 3000, 2064), (129, 9000, 2064), (513, 2112, 2064), (513, 4104, 2064), (513, 5000, 2064)],
    *[(100, 14336, 2064), (100, 16384, 2064), (512, 8192, 8208)],
]
TILES = {torch.int8: tile_rows.INT8 + 1, torch.float8_e4m3fn: tile_rows.FLOAT8}


@pytest.mark.parametrize("dtype", TILES)
def test_sizes_reach_every_tile(dtype: torch.dtype) -> None:
    kernels = {epiloq.explain("scaled_mm", m=m, n=n, k=k, arch="sm90", sm_count=132, dtype=dtype) for m, n, k in SIZES}
    assert len(kernels) == TILES[dtype], kernels


def int8_call(p: Problem, out: Tensor) -> None:
    if p.azp_adj is None:
        epiloq.scaled_mm(p.a, p.b, p.scale_a, p.scale_b, p.bias, out=out, out_dtype=out.dtype)
    else:
        epiloq.scaled_mm_azp(p.a, p.b, p.scale_a, p.scale_b, p.azp_adj, p.azp, p.bias, out=out, out_dtype=out.dtype)


def float8_call(p: Float8Problem, out: Tensor) -> None:
    epiloq.scaled_mm(p.a, p.b, p.scale_a, p.scale_b, p.bias, out=out, out_dtype=out.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("zero_point", ["none", "static", "token", "tensor"])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_epilogues(seed: int, dtype: torch.dtype, zero_point: str, bias: bool) -> None:
    for (m, n, k), vectors in itertools.product(SIZES, (False, True)):
        kind = "token" if zero_point == "tensor" else zero_point
        p = make_problem(
            m, n, k, device="cuda", dtype=dtype, bias=bias, zero_point=kind, per_token=vectors, per_channel=vectors
        )
        if zero_point == "tensor" and p.azp is not None:
            p.azp = p.azp[:1].clone()
        out = poisoned((m, n), dtype, "cuda")
        int8_call(p, out)
        assert_within_one_ulp(out, p)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_float8_epilogues(seed: int, dtype: torch.dtype, bias: bool) -> None:
    for (m, n, k), vectors in itertools.product(SIZES, (False, True)):
        p = make_float8_problem(m, n, k, device="cuda", dtype=dtype, bias=bias, per_token=vectors, per_channel=vectors)
        out = poisoned((m, n), dtype, "cuda")
        float8_call(p, out)
        assert_float8_close(out, p)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("before", "after"), [(8, 8), (0, 1), (8, 3), (0, 8)])
def test_outputs_among_others(seed: int, kind: str, before: int, after: int) -> None:
    """Rows that begin at multiples of 16 bytes, and rows that do not: nothing between them is written."""
    for m, n in [(300, 256), (256, 4096), (130, 576)]:
        only_its_own(PRODUCTS[kind], (m, n, 640), before, after)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("experts", [0, 2])
def test_rows_that_end_within_16_bytes(seed: int, dtype: torch.dtype, experts: int) -> None:
    """TMA, which stores the boxes of these tiles, would write the last 16 bytes of a row in full."""
    for m, n in [(300, 2054), (512, 6149)]:
        p = make(m, n, 640, device="cuda", experts=experts)
        ends = [m // 2, m] if experts else [m]
        offs = {"offs": torch.tensor(ends, dtype=torch.int32, device="cuda")} if experts else {}
        name, operands = "grouped_mm" if experts else "groupwise_mm", (p.a, p.b, p.scale_a, p.scale_b)
        assert "along K" not in epiloq.explain(name, *operands, **offs)  # those of few tokens store no boxes
        wide = poisoned((m, (n + 23) // 8 * 8), dtype, "cuda")
        out = wide[:, 8 : 8 + n]
        getattr(epiloq, name)(*operands, **offs, out=out)
        assert wide[:, :8].isnan().all() and wide[:, 8 + n :].isnan().all()
        left, right = p.operands()
        for first, end, weight in zip([0, *ends], ends, right if experts else [right], strict=False):
            assert_close(out[first:end], left[first:end], weight)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float8", "groups"])
@pytest.mark.alone
def test_shared_memory_is_not_reused_stale(seed: int, kind: str) -> None:
    """TMA boxes of partial tiles leave the other rows as the preceding product did: NaN, on every SM."""
    k = 640
    nothing, one = torch.full((4096, k), float("nan"), device="cuda").to(torch.float8_e4m3fn), torch.ones(1).cuda()
    of_nothing = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    for m, n in [(1, 40), (65, 72), (129, 200), (200, 2112), (300, 4616)]:
        out = poisoned((m, n), torch.bfloat16, "cuda")
        of_groups, of_rows = make(m, n, k, device="cuda").in_columns(4), make_float8_problem(m, n, k, device="cuda")
        epiloq.scaled_mm(nothing, nothing.t(), one, one, out=of_nothing)
        if kind == "groups":
            epiloq.groupwise_mm(of_groups.a, of_groups.b, of_groups.scale_a, of_groups.scale_b, out=out)
            assert_close(out, *of_groups.operands())
        else:
            float8_call(of_rows, out)
            assert_float8_close(out, of_rows)
        assert of_nothing.isnan().all()


@pytest.mark.gpu
def test_persistent_cta_runs_several_tiles(seed: int) -> None:
    """Many tiles per CTA, for groups with one K step each or with as many as a tile has output slots: slots that TMA
    still reads are not overwritten."""
    p = make_problem(8192, 4096, 8192, device="cuda", bias=True)
    assert "x 256 weights" in epiloq.explain("scaled_mm", p.a, p.b, p.scale_a, p.scale_b)
    first, again = (poisoned((8192, 4096), torch.bfloat16, "cuda") for _ in range(2))
    int8_call(p, first)
    assert_within_one_ulp(first, p)
    groups = []
    for k, dtype, tile in [(128, torch.float32, "192 tokens x 96 weights"), (512, torch.bfloat16, "256 tokens x 128")]:
        q = make(8192, 4096, k, device="cuda").in_columns(4)
        operands = (q.a, q.b, q.scale_a, q.scale_b)
        assert tile in epiloq.explain("groupwise_mm", *operands)
        out = epiloq.groupwise_mm(*operands, out_dtype=dtype)
        assert_close(out, *q.operands())
        groups.append((operands, out))
    for _ in range(20):
        again.fill_(float("nan"))
        int8_call(p, again)
        assert torch.equal(first, again)
        for operands, out in groups:
            assert torch.equal(out, epiloq.groupwise_mm(*operands, out_dtype=out.dtype))
