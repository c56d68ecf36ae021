"""grouped_mm with per-row scales, int8 and float8, against float64 and against scaled_mm."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
import tile_rows
from float8_reference import ACCURATE
from reference import poisoned, ulp

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
KINDS = [INT8, E4M3]
TILES = {INT8: tile_rows.INT8 + tile_rows.FOR_EXPERTS, E4M3: tile_rows.FLOAT8 + tile_rows.FOR_EXPERTS}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RECIPE = (1, 1, -1)


@dataclass
class Problem:
    a: Tensor  # [M, K]
    weight: Tensor  # [E, N, K]
    scale_a: Tensor  # [M, 1]
    scale_b: Tensor  # [E, 1, N]

    @property
    def b(self) -> Tensor:
        return self.weight.transpose(1, 2)


def values(*shape: int, kind: torch.dtype) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=INT8) if kind == INT8 else (torch.randn(*shape) * 64).to(kind)


def make(m: int, n: int, k: int, experts: int, kind: torch.dtype, device: str = "cpu") -> Problem:
    scales = (torch.rand(shape) * 0.02 + 1e-3 for shape in ((m, 1), (experts, 1, n)))
    parts = (values(m, k, kind=kind), values(experts, n, k, kind=kind), *scales)
    return Problem(*(part.to(device) for part in parts))


def assert_rows(out: Tensor, p: Problem, rows: slice, expert: int) -> None:
    a, b = p.a[rows].double(), p.b[expert].double()
    scale = p.scale_a[rows].double() * p.scale_b[expert].double()
    reference, span = scale * (a @ b), scale * (a.square() @ b.square()).sqrt()
    inner = 2.0**-22 * reference.abs() if p.a.dtype == INT8 else ACCURATE * span
    error = (out.double() - reference).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    assert (error <= ulp(reference, out.dtype) + inner).all()


def ends_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(device)


def by_offsets(p: Problem, counts: list[int], **kwargs: object) -> Tensor:
    ends = ends_of(counts, str(p.a.device))
    return epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, recipe=RECIPE, **kwargs)  # type: ignore[arg-type]


def rows_of(counts: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(136, 400), (17, 100), (1, 1), (24, 4095)])
@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [0, 0, 64, 0], [0, 0, 0, 0], [8, 9, 16, 17, 32, 33]], ids=str)
def test_experts_by_offsets(seed: int, device: str, kind: torch.dtype, counts: list[int], n: int, k: int) -> None:
    p = make(sum(counts) + 7, n, k, len(counts), kind, device)
    for dtype in DTYPES:
        out = poisoned((p.a.shape[0], n), dtype, device)
        assert by_offsets(p, counts, out=out) is out
        for expert, rows in enumerate(rows_of(counts)):
            assert_rows(out[rows], p, rows, expert)
        assert out[sum(counts) :].isnan().all(), "rows of no expert were written"


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("k", [272, 100])
def test_experts_by_mask(seed: int, device: str, kind: torch.dtype, k: int) -> None:
    counts, experts, most = [3, 0, 70, 130], 4, 130
    p = make(most * experts, 200, k, experts, kind, device)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    out = poisoned((experts, most, 200), torch.float16, device)
    a, scale_a = p.a.view(experts, most, k), p.scale_a.view(experts, most, 1)
    epiloq.grouped_mm(a, p.b, scale_a, p.scale_b, masked_m=masked_m, recipe=RECIPE, out=out)
    for expert, count in enumerate(counts):
        rows = slice(expert * most, expert * most + count)
        assert_rows(out[expert, :count], p, rows, expert)
        assert out[expert, count:].isnan().all()


def test_int8_has_the_bits_of_scaled_mm(seed: int, device: str) -> None:
    counts = [40, 0, 9]
    p = make(49, 72, 320, 3, INT8, device)
    out = by_offsets(p, counts)
    for expert, rows in enumerate(rows_of(counts)):
        assert torch.equal(out[rows], epiloq.scaled_mm(p.a[rows], p.b[expert], p.scale_a[rows], p.scale_b[expert]))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_strides(seed: int, device: str, kind: torch.dtype) -> None:
    """Scales apart in memory or shared, rows of a and out among others."""
    counts = [7, 20]
    p = make(27, 48, 64, 2, kind, device)
    wide = torch.zeros(27, 96, device=device).to(kind)
    wide[:, 16:80] = p.a
    p.a = wide[:, 16:80]
    p.scale_a = torch.rand(54, 1, device=device)[::2]
    p.scale_b = torch.rand(2, 1, 1, device=device).expand(2, 1, 48)
    out = poisoned((27, 64), torch.bfloat16, device)
    by_offsets(p, counts, out=out[:, 8:56])
    for expert, rows in enumerate(rows_of(counts)):
        assert_rows(out[rows, 8:56], p, rows, expert)
    assert out[:, :8].isnan().all() and out[:, 56:].isnan().all()


def test_scales_of_quantisers_are_accepted(seed: int, device: str) -> None:
    x, weight = torch.randn(19, 300, device=device), torch.randn(2, 40, 300, device=device)
    ends = torch.tensor([7, 19], dtype=torch.int32, device=device)
    q, scale, _ = epiloq.quantize_int8(x)
    w, weight_scale, _ = epiloq.quantize_int8(weight)
    a8, scale8 = epiloq.quantize_fp8(x, granularity="token")
    w8, weight_scale8 = epiloq.quantize_fp8(weight, granularity="token")
    for operands in ((q, w.mT, scale, weight_scale.mT), (a8, w8.mT, scale8, weight_scale8.mT)):
        out = epiloq.grouped_mm(*operands, offs=ends, recipe=RECIPE, out_dtype=torch.float16)
        exact = torch.cat([x[:7].double() @ weight[0].double().t(), x[7:].double() @ weight[1].double().t()])
        assert (out.double() - exact).norm() < 0.05 * exact.norm()


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    n=st.integers(0, 9),
    k=st.integers(0, 40),
    kind=st.sampled_from(KINDS),
)
def test_any_experts(counts: list[int], n: int, k: int, kind: torch.dtype) -> None:
    p = make(sum(counts), n, k, len(counts), kind)
    out = by_offsets(p, counts, out_dtype=torch.float32)
    for expert, rows in enumerate(rows_of(counts)):
        assert_rows(out[rows], p, rows, expert)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_compiles(seed: int, device: str, kind: torch.dtype) -> None:
    compiled = torch.compile(
        lambda p, ends: epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, recipe=RECIPE),
        fullgraph=True,
        backend="aot_eager",
    )
    for m in (12, 33):
        p = make(m, 24, 48, 2, kind, device)
        assert torch.equal(compiled(p, ends_of([5, m - 5], device)), by_offsets(p, [5, m - 5]))


def test_bad_arguments_are_named(seed: int) -> None:
    p = make(12, 16, 32, 2, INT8)
    operands = {"a": p.a, "b": p.b, "scale_a": p.scale_a, "scale_b": p.scale_b}
    good = {**operands, "recipe": RECIPE, "offs": ends_of([4, 8], "cpu")}
    bad = {
        r"recipe: expected one of \(1, 128, 128\), \(1, 1, 128\), \(1, 1, -1\)": {"recipe": (1, -1, -1)},
        "a: expected float8_e4m3fn, got int8": {"recipe": (1, 1, 128)},
        "b: expected int8": {"b": p.b.to(E4M3)},
        r"scale_a: expected 12 x 1 scales \(one for 1 of the rows and all of K\)": {"scale_a": torch.ones(1, 1)},
        "scale_a: expected two dimensions": {"scale_a": torch.ones(12)},
        "scale_b: expected 1 x 16 scales|scale_b: expected 16 x 1 scales": {"scale_b": torch.ones(2, 16, 1)},
        "scale_b: expected 3 dimensions": {"scale_b": torch.ones(2, 16)},
    }
    for message, change in bad.items():
        with pytest.raises(ValueError, match=message):
            epiloq.grouped_mm(**{**good, **change})
    with pytest.raises(ValueError, match="recipe: expected one of"):
        epiloq.groupwise_mm(p.a, p.b[0], p.scale_a, p.scale_b[0], recipe=RECIPE)
    long = make(1, 1, 131072, 1, INT8)
    with pytest.raises(ValueError, match="a: expected K of at most 131071"):
        by_offsets(long, [1])


def test_explain() -> None:
    explain = epiloq.explain
    sizes = list(itertools.product((1, 64, 128, 256, 1024, 4096), (64, 512, 2112, 4096, 7168, 8456, 28672), (1, 4, 8)))
    for dtype, tiles in TILES.items():
        whole_rows = {"k": 4096, "per_row_scales": True, "dtype": dtype}
        kernels = {explain("grouped_mm", m=m, n=n, experts=e, **whole_rows) for m, n, e in sizes}
        assert len(kernels) == tiles and all("per-row wgmma" in kernel for kernel in kernels), kernels
    p = make(12, 16, 32, 2, INT8)
    operands = (p.a, p.b, p.scale_a, p.scale_b)
    assert "cpu, int8 products" in explain("grouped_mm", *operands, offs=ends_of([4, 8], "cpu"), recipe=RECIPE)
    with epiloq.config(arch="sm80"):
        assert "mma.sync" in explain("grouped_mm", *operands, offs=ends_of([4, 8], "cpu"), recipe=RECIPE)
    for arch, dtype in (("sm80", INT8), ("sm89", E4M3)):
        rows = {"k": 4096, "experts": 8, "per_row_scales": True, "arch": arch, "dtype": dtype}
        kernels = {explain("grouped_mm", m=m, n=n, **rows) for m in (1, 512, 513) for n in (64, 65)}
        assert len(kernels) == 2 and all("mma.sync" in kernel for kernel in kernels)
    assert "slow" in explain("grouped_mm", m=8, n=64, k=128, arch="sm80")
    with pytest.raises(ValueError, match="dtype: expected float8_e4m3fn, or int8 with per_row_scales"):
        explain("grouped_mm", m=8, n=64, k=128, dtype=INT8)


Case = tuple[list[int], tuple[int, int]]  # rows of the experts; N, K
FEW_STEPS: list[Case] = list(
    itertools.product(
        ([1, 0, 3, 2] * 4, [64, 65, 0, 63], [0, 1, 129, 700, 0, 1300], [130] * 8),
        ((264, 640), (4096, 144), (4104, 272), (1000, 16)),
    )
)


# Blocks that go on from one expert to another, tiles that experts do not fill, odd depths; all tiles of SM90.
CASES: list[Case] = [
    *FEW_STEPS,
    *itertools.product(
        ([0, 1, 129, 700, 0, 1300], [130] * 8, [300, 513, 0, 200]),
        ((2112, 2064), (7168, 1040), (9000, 1040), (5000, 1040), (6144, 2064)),
    ),
    *[([64, 65, 0, 63], (7168, 1040)), ([75] * 4, (3000, 2064)), ([2] * 8, (1024, 640))],
]


@pytest.mark.parametrize(
    ("kind", "arch", "cases", "tiles"),
    [
        *[(kind, "sm90", CASES, TILES[kind]) for kind in KINDS],
        *[(INT8, "sm80", FEW_STEPS, 2), (E4M3, "sm89", FEW_STEPS, 2)],
    ],
)
def test_cases_reach_every_tile(kind: torch.dtype, arch: str, cases: list[Case], tiles: int) -> None:
    how = {"dtype": kind, "per_row_scales": True, "arch": arch, "sm_count": 132}
    answers = {
        epiloq.explain("grouped_mm", m=sum(counts), n=n, k=k, experts=len(counts), **how) for counts, (n, k) in cases
    }
    assert len(answers) == tiles, answers


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_on_a_gpu(seed: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    assert len(check_tiles(kind, dtype, CASES)) == TILES[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_end_within_16_bytes_on_a_gpu(seed: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    """TMA, which stores the boxes of these tiles, would write the last 16 bytes of a row in full."""
    counts = [300, 513]
    for n in (5126, 6149):
        p = make(sum(counts), n, 640, len(counts), kind, "cuda")
        wide = poisoned((sum(counts), (n + 23) // 8 * 8), dtype, "cuda")
        out = wide[:, 8 : 8 + n]
        operands = (p.a, p.b, p.scale_a, p.scale_b)
        tile = epiloq.explain("grouped_mm", *operands, offs=ends_of(counts, "cuda"), recipe=RECIPE)
        assert "128 tokens" in tile
        by_offsets(p, counts, out=out)
        for expert, rows in enumerate(rows_of(counts)):
            assert_rows(out[rows], p, rows, expert)
        assert wide[:, :8].isnan().all() and wide[:, 8 + n :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "arch"), [(INT8, "sm80"), (E4M3, "sm89")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_older_kernels_on_a_gpu(seed: int, kind: torch.dtype, arch: str, dtype: torch.dtype) -> None:
    with epiloq.config(arch=arch):
        assert len(check_tiles(kind, dtype, FEW_STEPS)) == 2


def check_tiles(kind: torch.dtype, dtype: torch.dtype, cases: Iterable[Case]) -> set[str]:
    """The kernels that were checked."""
    kernels = set()
    for counts, (n, k) in cases:
        p = make(sum(counts), n, k, len(counts), kind, "cuda")
        out = poisoned((sum(counts), n), dtype, "cuda")
        by_offsets(p, counts, out=out)
        for expert, rows in enumerate(rows_of(counts)):
            assert_rows(out[rows], p, rows, expert)
        operands = (p.a, p.b, p.scale_a, p.scale_b)
        kernels.add(epiloq.explain("grouped_mm", *operands, offs=ends_of(counts, "cuda"), recipe=RECIPE))
    return kernels


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_graphs_follow_offsets_on_the_device(seed: int, kind: torch.dtype) -> None:
    """Nothing is read back: a captured call takes the counts that are there when it is replayed."""
    p = make(300, 1024, 512, 4, kind, "cuda")
    ends = ends_of([10, 0, 200, 50], "cuda")
    out = poisoned((300, 1024), torch.bfloat16, "cuda")

    def call() -> None:
        epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, recipe=RECIPE, out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for counts in ([10, 0, 200, 50], [0, 300, 0, 0], [75, 75, 75, 75], [1, 2, 3, 4]):
        ends.copy_(ends_of(counts, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        for expert, rows in enumerate(rows_of(counts)):
            assert_rows(out[rows], p, rows, expert)
        assert out[sum(counts) :].isnan().all()
