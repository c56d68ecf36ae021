"""The kernel that multiplies all experts at once: against float64, of every tile, format and way to count rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import epiloq
from epiloq import _core
from epiloq.ops.experts import few_rows
from epiloq.weights.packed_layout import packed_codes, packed_parameters
from reference import poisoned
from weight_reference import Weight, assert_close, make_weight

pytestmark = pytest.mark.gpu

# Rows of each expert: few, skewed, none at the ends, more experts than a warp has lanes.
COUNTS: dict[str, tuple[int, ...]] = {
    "one": (5,),
    "few": (1, 0, 2, 3),
    "a tile": (16, 8, 0, 17),
    "skewed": (0, 0, 130, 1, 0),
    "wide": (64, 63, 65),
    "wider than tiles": (300, 0, 129, 257, 1),
    "many": tuple((i * 7) % 5 for i in range(70)),
    "none": (0, 0, 0),
}


def ends_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


def of_expert(weight: Weight, expert: int, n: int) -> Weight:
    rows = slice(expert * n, (expert + 1) * n)
    part = weight.packed.row_slice(rows.start, rows.stop)
    return Weight(weight.q, weight.scale, None, None, None, part, weight.dense[rows], weight.size[rows])


def assert_experts_close(
    y: Tensor, x: Tensor, weight: Weight, counts: tuple[int, ...], n: int, *, rounded_weights: bool = False
) -> None:
    bounds = [0, *ends_of(counts).tolist()]
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            of = of_expert(weight, expert, n)
            assert_close(y[begin:end], x[begin:end], of, rounded_weights=rounded_weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["symmetric", "zero"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (4, -1), (8, 256), (8, -1)])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("one_kernel", [True, False])
def test_against_float64(
    seed: int,
    counts: str,
    bits: int,
    group: int,
    kind: str,
    dtype: torch.dtype,
    one_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = COUNTS[counts]
    if not one_kernel:
        if sum(rows) <= 64 * len(rows):
            pytest.skip("few rows: always by one kernel")
        monkeypatch.setattr(few_rows, "multiplications", lambda *_, **__: 0)
    for n, k in ((48, 200), (144, 1032)):
        weight = make_weight(len(rows) * n, k, bits, group, kind, scale_dtype=dtype, device="cuda")
        x = torch.randn(sum(rows) + 3, k, device="cuda").to(dtype)
        out = poisoned((len(x), n), dtype, "cuda")
        before = out.clone()
        assert epiloq.grouped_packed_mm(x, weight.packed, offs=ends_of(rows), out=out) is out
        message = epiloq.explain("grouped_packed_mm", x, weight.packed, offs=ends_of(rows))
        assert message.startswith("grouped " if one_kernel else "one expert after the other")
        rounded = "rounded" in message or "dequantise" in message
        assert_experts_close(out, x, weight, rows, n, rounded_weights=rounded)
        assert torch.equal(out[sum(rows) :].view(torch.int16), before[sum(rows) :].view(torch.int16))


# Of GroupedPackedMmKernel: tiles, persistent WGMMA (in the second row with rounded weights), persistent mma.sync, GEMV.
MMA_SYNC_ROWS, WGMMA_ROWS, DECODE_ROWS, GEMV_ROWS = (0, 1, 2, 3), (4, 5), (6, 7, 8), (9, 10)
SM90_ROWS = WGMMA_ROWS + DECODE_ROWS + GEMV_ROWS


def skip_unless_compiled(row: int) -> None:
    if row in SM90_ROWS and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for SM90 alone")


def kernel_of(row: int, k: int) -> tuple[int, int]:
    """Row and slices of K, of which GEMV's second row has three."""
    return row, min(3, -(-k // 128)) if row == GEMV_ROWS[1] else 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 256), (8, -1)])
@pytest.mark.parametrize("row", MMA_SYNC_ROWS + SM90_ROWS)
def test_each_kernel(seed: int, row: int, bits: int, group: int, dtype: torch.dtype) -> None:
    """Whatever dispatch chooses; also of experts whose matrices are apart from tiles, and with a bias."""
    skip_unless_compiled(row)
    for name, n, k in (("wide", 48, 136), ("wider than tiles", 144, 1032), ("many", 16, 264), ("none", 16, 64)):
        counts, same_type = COUNTS[name], row in (WGMMA_ROWS[-1], *DECODE_ROWS) or n == 48
        scale_dtype = dtype if same_type else torch.float32
        weight = make_weight(len(counts) * n, k, bits, group, "zero", scale_dtype=scale_dtype, device="cuda")
        x, bias = (torch.randn(size, device="cuda").to(dtype) for size in ((sum(counts) + 3, k), (len(counts), n)))
        out, w = poisoned((len(x), n), dtype, "cuda"), weight.packed
        before, ends = out.clone(), ends_of(counts)
        arguments = (out, x, w.q, w.scale, w.zero, None, bias, None, ends, False, "int", bits, w.n, k, w.group_size)
        assert _core.grouped_packed_mm(*arguments, kernel_of(row, k))
        for expert, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
            if end > begin:
                of, rounded = of_expert(weight, expert, n), row == WGMMA_ROWS[-1]
                assert_close(out[begin:end], x[begin:end], of, bias[expert], rounded_weights=rounded)
        assert torch.equal(out[sum(counts) :].view(torch.int16), before[sum(counts) :].view(torch.int16))


@pytest.mark.parametrize("kind", ["symmetric", "zero"])
@pytest.mark.parametrize(("k", "group"), [(128, 32), (384, 128), (1032, 128)])
@pytest.mark.parametrize("row", SM90_ROWS)
def test_ctas_with_many_tiles(seed: int, row: int, k: int, group: int, kind: str) -> None:
    """Of several experts each, with few and many K steps: barriers, buffers and sums of one tile after the other."""
    skip_unless_compiled(row)
    n, dtype = 1024, torch.bfloat16
    counts = tuple((i * 7) % 31 for i in range(44))
    weight = make_weight(len(counts) * n, k, 4, group, kind, scale_dtype=dtype, device="cuda")
    x, w, ends = torch.randn(sum(counts), k, device="cuda").to(dtype), weight.packed, ends_of(counts)
    for _ in range(3):
        out = poisoned((len(x), n), dtype, "cuda")
        arguments = (out, x, w.q, w.scale, w.zero, None, None, None, ends, False, "int", 4, w.n, w.k, w.group_size)
        assert _core.grouped_packed_mm(*arguments, kernel_of(row, k))
        assert_experts_close(out, x, weight, counts, n, rounded_weights=row == WGMMA_ROWS[-1])


@pytest.mark.parametrize("row", (0, WGMMA_ROWS[0], *DECODE_ROWS, *GEMV_ROWS))
def test_masked_experts_of_each_kernel(seed: int, row: int) -> None:
    skip_unless_compiled(row)
    rows, n, k, most = (3, 0, 20, 33, 1), 144, 136, 33
    weight = make_weight(len(rows) * n, k, 4, 64, "zero", scale_dtype=torch.bfloat16, device="cuda")
    x, w = torch.randn(len(rows), most, k, device="cuda").bfloat16(), weight.packed
    counts = torch.tensor(rows, dtype=torch.int32, device="cuda")
    out = poisoned((len(rows), most, n), torch.bfloat16, "cuda")
    before = out.clone()
    arguments = (out, x, w.q, w.scale, w.zero, None, None, None, counts, True, "int", 4, w.n, w.k, w.group_size)
    assert _core.grouped_packed_mm(*arguments, kernel_of(row, k))
    for expert, count in enumerate(rows):
        if count:
            assert_close(out[expert, :count], x[expert, :count], of_expert(weight, expert, n))
        assert torch.equal(out[expert, count:].view(torch.int16), before[expert, count:].view(torch.int16))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_masked_and_strided(seed: int, scale_dtype: torch.dtype) -> None:
    rows, n, k, most = (3, 0, 20, 33), 64, 136, 33
    weight = make_weight(len(rows) * n, k, 4, 64, "zero", scale_dtype=scale_dtype, device="cuda")
    wide = torch.randn(len(rows), most, k + 24, device="cuda").bfloat16()
    for x in (wide[..., :k], wide[..., 1 : k + 1]):  # rows on 16 bytes, and not
        counts = torch.tensor(rows, dtype=torch.int32, device="cuda")
        out = poisoned((len(rows), most, n), torch.bfloat16, "cuda")
        before = out.clone()
        epiloq.grouped_packed_mm(x, weight.packed, masked_m=counts, out=out)
        for expert, count in enumerate(rows):
            if count:
                assert_close(out[expert, :count], x[expert, :count], of_expert(weight, expert, n))
            assert torch.equal(out[expert, count:].view(torch.int16), before[expert, count:].view(torch.int16))


@pytest.mark.parametrize("row", [0, *SM90_ROWS])
def test_invalid_expert_ends_do_not_write_elsewhere(seed: int, row: int) -> None:
    """Beside the rows of the output; compute-sanitizer sees reads, too."""
    skip_unless_compiled(row)
    weight = make_weight(4 * 32, 128, device="cuda")
    x, beside, w = torch.randn(9, 128, device="cuda").half(), 64, weight.packed

    def multiply(x: Tensor, counts: Tensor, out: Tensor) -> None:
        given = (out, x, w.q, w.scale, w.zero, None, None, None, counts, x.ndim == 3, "int", 4, w.n, w.k, w.group_size)
        assert _core.grouped_packed_mm(*given, (row, 1))

    for ends in ([-5, 3, 900, 7], [9, 9, 9, 2**31 - 1], [-1, -1, -1, -1], [4, 2, 9, 9]):
        counts = torch.tensor(ends, dtype=torch.int32, device="cuda")
        for rows in (9, 4 * 9):
            memory = poisoned((rows + 2 * beside, 32), torch.float16, "cuda")
            before, out = memory.clone(), memory[beside : beside + rows]
            if rows == 9:
                multiply(x, counts, out)
            else:
                multiply(x.expand(4, 9, 128).contiguous(), counts, out.view(4, 9, 32))
            for untouched in (slice(beside), slice(beside + rows, None)):
                assert torch.equal(memory[untouched].view(torch.int16), before[untouched].view(torch.int16))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_in_a_graph(seed: int, scale_dtype: torch.dtype) -> None:
    """Another number of rows of each expert in every replay, also of more than the host would count."""
    n, k, experts = 64, 256, 6
    weight = make_weight(experts * n, k, scale_dtype=scale_dtype, device="cuda")
    x, ends = torch.randn(900, k, device="cuda").bfloat16(), ends_of((1,) * experts)
    epiloq.grouped_packed_mm(x[:16], weight.packed, offs=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = epiloq.grouped_packed_mm(x, weight.packed, offs=ends)
    for rows in ((3, 0, 40, 1, 1, 2), (0, 0, 0, 0, 0, 900), (150,) * experts):
        ends.copy_(ends_of(rows))
        graph.replay()
        assert_experts_close(y, x, weight, rows, n, rounded_weights=scale_dtype == x.dtype)


def test_a_graph_needs_a_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 rows the host reads how many each expert has, which a graph cannot record."""
    weight, ends = make_weight(2 * 32, 128, device="cuda"), ends_of((2, 1))
    x = torch.randn(3, 128, device="cuda")
    epiloq.grouped_packed_mm(x, weight.packed, offs=ends)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="grouped_packed_mm: offs: expected to be called outside a CUDA graph"):
        epiloq.grouped_packed_mm(x, weight.packed, offs=ends)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_weight(n: int, k: int, kind: str, largest: int = 140) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes and scale bytes, MXFP4's below `largest`, and their meaning in float64."""
    block = 32 if kind == "mxfp4" else 16
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    groups = -(-k // 128) * 128 // block
    if kind == "mxfp4":
        scale_bytes = torch.randint(110, largest, (n, groups), dtype=torch.uint8, device="cuda")
        scales = (scale_bytes.double() - 127).exp2()
    else:
        exact = torch.randint(1, 127, (n, groups), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        scales = exact.double()
        scale_bytes = (exact.half() * 128).view(torch.int16).bitwise_right_shift(7).to(torch.uint8)
    values = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float64, device="cuda")[codes.long()]
    dense = values * scales[:, torch.arange(k, device="cuda") // block]
    return packed_codes(codes, 4), packed_parameters(scale_bytes, groups), dense


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("m", [1, 9, 20, 64, 100, 300])
def test_fp4(seed: int, m: int, kind: str, dtype: torch.dtype) -> None:
    for n, k, experts in ((48, 200, 3), (70, 2880, 1), (1024, 4096, 1)):
        q, scale, dense = fp4_weight(experts * n, k, kind)
        x = torch.randn(m, k, device="cuda").to(dtype)
        bias = torch.randn(experts, n, device="cuda").to(dtype)
        factor = torch.rand(experts, device="cuda") if kind == "nvfp4" else None
        # Sums in the range of float16.
        factor = factor / 4096 if factor is not None else torch.full((experts,), 2.0**-12, device="cuda")
        rows = torch.arange(m, device="cuda") * experts // m
        counts = torch.bincount(rows, minlength=experts).cumsum(0).to(torch.int32) if experts > 1 else None
        exact, size = (
            torch.stack([of[i].double() @ by.view(experts, n, k)[rows[i]].t() for i in range(m)])
            for of, by in ((x, dense), (x.abs(), dense.abs()))
        )
        exact = exact * factor.double()[rows, None] + bias.double()[rows]
        size = size * factor.double()[rows, None] + bias.double()[rows].abs()
        out = poisoned((m, n), dtype, "cuda")
        numbers = (4, experts * n, k, 32 if kind == "mxfp4" else 16)
        arguments = (out, x, q, scale, None, None, bias, factor, counts, False, kind, *numbers)
        has_wgmma = torch.cuda.get_device_capability() == (9, 0) and (kind, dtype) != ("mxfp4", torch.float16)
        reads_codes = m <= 64 or experts > 1 or has_wgmma
        before = out.clone()
        assert _core.grouped_packed_mm(*arguments) == reads_codes
        if not reads_codes:
            assert torch.equal(out.view(torch.int16), before.view(torch.int16))
            continue
        bound = (2.0**-10 if dtype == torch.float16 else 2.0**-7) * exact.abs() + 2.0**-23 * k**0.5 * size + 2.0**-24
        assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("row", (0, *SM90_ROWS))
def test_each_kernel_of_fp4(seed: int, row: int, kind: str, dtype: torch.dtype) -> None:
    skip_unless_compiled(row)
    if row in WGMMA_ROWS and (kind, dtype) == ("mxfp4", torch.float16):
        pytest.skip("a half has no exponents for MXFP4's scales")
    # Scales of up to 1 are multiplied by codes, larger ones by sums.
    for name, n, k, largest in (("wide", 48, 136, 128), ("wider than tiles", 144, 1032, 140), ("many", 32, 264, 128)):
        counts = COUNTS[name]
        q, scale, dense = fp4_weight(len(counts) * n, k, kind, largest)
        x = torch.randn(sum(counts) + 3, k, device="cuda").to(dtype)
        bias = torch.randn(len(counts), n, device="cuda").to(dtype)
        factor = torch.rand(len(counts), device="cuda") / 4096  # sums in the range of float16
        out, ends = poisoned((len(x), n), dtype, "cuda"), ends_of(counts)
        before, numbers = out.clone(), (4, len(dense), k, 32 if kind == "mxfp4" else 16)
        assert _core.grouped_packed_mm(
            out, x, q, scale, None, None, bias, factor, ends, False, kind, *numbers, kernel_of(row, k)
        )
        for expert, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
            w, of = dense[expert * n : (expert + 1) * n] * factor[expert].double(), x[begin:end].double()
            exact, size = of @ w.t() + bias[expert].double(), of.abs() @ w.abs().t() + bias[expert].double().abs()
            bound = torch.finfo(dtype).eps * exact.abs() + 2.0**-23 * k**0.5 * size + 2.0**-24
            assert ((out[begin:end].double() - exact).abs() <= bound).all()
        assert torch.equal(out[sum(counts) :].view(torch.int16), before[sum(counts) :].view(torch.int16))


@pytest.mark.parametrize("byte", [0, 1, 127, 128, 252, 254, 255])
@pytest.mark.parametrize("row", (0, *SM90_ROWS))
def test_smallest_and_largest_scales_of_mxfp4(seed: int, row: int, byte: int) -> None:
    """The byte is of one row and block, beside others of up to 1: products that float32 represents, or NaN for 255."""
    skip_unless_compiled(row)
    if byte == 254 and row in WGMMA_ROWS:
        pytest.skip("weights of 2^128 and more are infinite there")
    n, k, counts = 48, 264, (5, 0, 17)
    q, scale, dense = fp4_weight(len(counts) * n, k, "mxfp4", 128)
    special = (2 * n + 5, 3)  # row 5 of the last expert, columns 96 to 127
    bytes_of = packed_parameters(torch.full((len(counts) * n, 12), 127, dtype=torch.uint8, device="cuda"), 12)
    marked = torch.zeros(len(counts) * n, 12, dtype=torch.uint8, device="cuda")
    marked[special] = 1
    where = packed_parameters(marked, 12) == 1
    assert int(where.sum()) == 1 and scale.shape == bytes_of.shape
    old = int(scale[where])
    scale[where] = byte
    dense[special[0], 96:128] *= 2.0 ** (byte - old)
    x = torch.randn(sum(counts), k, device="cuda").bfloat16()
    if byte > 200:
        x[:, 96:128] *= 2.0**-60  # sums in the range of bfloat16
    out, ends = poisoned((len(x), n), torch.bfloat16, "cuda"), ends_of(counts)
    numbers = (4, len(dense), k, 32)
    arguments = (out, x, q, scale, None, None, None, None, ends, False, "mxfp4", *numbers)
    assert _core.grouped_packed_mm(*arguments, kernel_of(row, k))
    for expert, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        w, of = dense[expert * n : (expert + 1) * n], x[begin:end].double()
        exact, size = of @ w.t(), of.abs() @ w.abs().t()
        is_nan = torch.zeros_like(exact, dtype=torch.bool)
        if byte == 255 and expert == 2:
            is_nan[:, 5] = True
        found = out[begin:end].double()
        assert torch.equal(found.isnan(), is_nan)
        bound = torch.finfo(torch.bfloat16).eps * exact.abs() + 2.0**-23 * k**0.5 * size + 2.0**-126
        assert ((found - exact).abs() <= bound)[~is_nan].all()
