"""`packed_fp4_mm` against float64, of one matrix and of experts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import epiloq
import fp4_reference
from epiloq import _core
from epiloq.ops.experts import few_rows
from epiloq.weights.packed_fp4_weight import PackedFp4Weight
from fp4_reference import KINDS, packed
from reference import assert_rounded_product, poisoned

packed_fp4_mm = importlib.import_module("epiloq.ops.packed_fp4_mm")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = [(1, 1, 16), (1, 300, 1024), (7, 33, 576), (64, 40, 128), (65, 130, 96), (4, 7, 33), (2, 3, 1), (0, 8, 64)]
SIZES += [(2, 0, 64), (2, 4, 0), (200, 48, 160)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_products(m: int, n: int, k: int, form: str, dtype: torch.dtype, device: str, seed: int) -> None:
    weight, exact = packed(n, k, form, device)
    x, bias = torch.randn(m, k + 3, device=device).to(dtype)[:, :k], torch.randn(n, device=device).to(dtype)
    for of_bias in (None, bias):
        found = epiloq.packed_fp4_mm(x, weight, of_bias)
        assert_rounded_product(found, x, exact, of_bias)
        wide = torch.full((m, n + 3), 7.0, device=device, dtype=dtype)
        out = wide[:, :n]
        assert epiloq.packed_fp4_mm(x, weight, of_bias, out=out) is out
        assert_rounded_product(out, x, exact, of_bias)
        # cuBLAS, which computes what no kernel supports, sums in another order if output rows are strided.
        assert device == "cuda" or torch.equal(out, found)
        assert (wide[:, n:] == 7).all()
    assert_rounded_product(epiloq.packed_fp4_mm(x.contiguous()[None], weight, bias)[0], x, exact, bias)
    assert epiloq.explain("packed_fp4_mm", x, weight, bias)


# From part of a CTA to several waves, with split-K and K steps that the warps do not divide evenly.
@pytest.mark.parametrize(("n", "k"), [(1, 128), (17, 4096), (300, 712), (2500, 264), (4100, 1288), (9001, 128)])
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_m(n: int, k: int, form: str, dtype: torch.dtype, device: str, seed: int) -> None:
    """Up to 16 rows use the GEMV on a GPU, as one or two groups of 8 tokens."""
    weight, exact = packed(n, k, form, device)
    bias = torch.randn(n, device=device).to(dtype)
    for m in (1, 2, 5, 8, 9, 13, 16, 17):
        x, out = torch.randn(m, k, device=device).to(dtype), torch.full((m, n), 7.0, device=device, dtype=dtype)
        assert_rounded_product(epiloq.packed_fp4_mm(x, weight, out=out), x, exact, None)
        assert_rounded_product(epiloq.packed_fp4_mm(x, weight, bias), x, exact, bias)
        if device == "cuda":
            assert ("GEMV" in epiloq.explain("packed_fp4_mm", x, weight)) == (m <= 16)


# Whole and partial tiles in M and N, a partial K step, and split-K.
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (17, 33, 4096),
        (40, 300, 712),
        (64, 1, 136),
        (65, 1, 8),
        (128, 129, 264),
        (129, 300, 1000),
        (256, 1029, 136),
        (300, 64, 4096),
        (513, 40, 72),
        (1300, 300, 136),
    ],
)
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(m: int, n: int, k: int, form: str, dtype: torch.dtype, device: str, seed: int) -> None:
    """More than 16 rows: on SM90 a kernel converts the codes in registers, without rounding W."""
    weight, exact = packed(n, k, form, device)
    x, bias = torch.randn(m, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    for of_bias in (None, bias):
        wide = poisoned((m, n + 8), dtype, device)
        before, out = wide.clone(), wide[:, :n]
        assert epiloq.packed_fp4_mm(x, weight, of_bias, out=out) is out
        assert_rounded_product(out, x, exact, of_bias)
        assert torch.equal(wide[:, n:].isnan(), before[:, n:].isnan())
        assert_rounded_product(epiloq.packed_fp4_mm(x[:, None], weight, of_bias)[:, 0], x, exact, of_bias)
    if device == "cuda":
        converts = torch.cuda.get_device_capability() == (9, 0) and reads_many(form, dtype)
        assert ("wgmma" in epiloq.explain("packed_fp4_mm", x, weight)) == converts


def reads_many(form: str, dtype: torch.dtype) -> bool:
    """Whether products of code and scale are exact, so that a kernel multiplies them beside the tensor cores."""
    return dtype == torch.bfloat16 or (form == "nvfp4" and dtype == torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", KINDS)
def test_every_code_by_every_scale_on_a_cpu(form: str, dtype: torch.dtype) -> None:
    """Rows of the unit matrix pick the weight's numbers, one at a time or all at once."""
    kind = KINDS[form]
    block = fp4_reference.BLOCK[kind]
    codes, scale = fp4_reference.every_code(kind)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=block)
    x = torch.eye(block, dtype=dtype)
    picked = epiloq.fp4_dequantize(codes, scale, in_features=block, dtype=dtype).t()
    one_by_one = torch.cat([epiloq.packed_fp4_mm(row[None], weight) for row in x])
    for found in (one_by_one, epiloq.packed_fp4_mm(x, weight)):
        # An infinite number times another token's zero is NaN.
        finite = picked.isfinite().all(0)
        assert finite.sum() > 100 and torch.equal(found[:, finite], picked[:, finite])
        assert found[:, -1].isnan().all()  # a NaN scale


@pytest.mark.parametrize("form", KINDS)
def test_explanations_on_a_cpu(form: str) -> None:
    weight, _ = packed(48, 64, form, "cpu")
    few, many = torch.randn(1, 64), torch.randn(40, 64)
    counts = torch.tensor([40], dtype=torch.int32)
    assert epiloq.explain("packed_fp4_mm", few, weight) == "cpu, packed E2M1 numbers in registers"
    assert epiloq.explain("packed_fp4_mm", many, weight) == "cpu, 16 rows of the weight dequantised at a time"
    assert epiloq.explain("packed_fp4_mm", many, weight, offs=counts).startswith("one expert after the other: cpu, 16")
    with pytest.raises(ValueError, match="weight: expected FP4 on the CPU"):
        q, scale = torch.zeros(1, 2, 32, 16, dtype=torch.uint8), torch.ones(1, 1, 16)
        _core.grouped_packed_mm(torch.empty(1, 16), few, q, scale, *(None,) * 5, False, "int", 4, 16, 64, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("form", KINDS)
def test_every_code_by_every_scale_among_many_rows(form: str, seed: int) -> None:
    """Rows of the unit matrix pick the weight's numbers, which bfloat16 represents."""
    kind = KINDS[form]
    block = fp4_reference.BLOCK[kind]
    codes, scale = fp4_reference.every_code(kind)
    weight = epiloq.pack_fp4_weight(codes.cuda(), scale.cuda(), in_features=block)
    x = torch.eye(block, device="cuda", dtype=torch.bfloat16).repeat(5, 1)
    found = epiloq.packed_fp4_mm(x, weight).float().view(5, block, -1)
    picked = epiloq.fp4_dequantize(codes, scale, in_features=block).bfloat16().float().cuda().t()
    # Of others products with zeros are NaN, or they are smaller than what some products take for 0.
    fits = (picked == 0) | (picked.abs() > 2.0**-100) & (picked.abs() < 2.0**120)
    rows = fits.all(0) & picked.isfinite().all(0)
    assert rows.sum() > 100
    for each in found:
        assert torch.equal(each[:, rows], picked[:, rows])
    assert found[..., -1].isnan().all()  # a NaN scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("rows", [[3, 0, 5], [0, 0, 1], [100, 0, 70]])
@pytest.mark.parametrize("masked", [False, True])
def test_experts(rows: list[int], form: str, masked: bool, dtype: torch.dtype, device: str, seed: int) -> None:
    experts, n, k, spare = len(rows), 48, 160, 2
    weight, exact = packed(experts * n, k, form, device, experts)
    bias = torch.randn(experts, n, device=device).to(dtype)
    counts = torch.tensor(rows, dtype=torch.int32, device=device)
    if masked:
        x, where = torch.randn(experts, max(rows) + spare, k, device=device).to(dtype), {"masked_m": counts}
        places: list[Any] = [(expert, slice(count)) for expert, count in enumerate(rows)]
    else:
        ends = counts.cumsum(0, dtype=torch.int32)
        x, where = torch.randn(sum(rows) + spare, k, device=device).to(dtype), {"offs": ends}
        places = [slice(end - count, end) for end, count in zip(ends.tolist(), rows, strict=True)]
    for of_bias in (None, bias):
        out = torch.full((*x.shape[:-1], n), 7.0, device=device, dtype=dtype)
        assert epiloq.packed_fp4_mm(x, weight, of_bias, **where, out=out) is out
        found = epiloq.packed_fp4_mm(x, weight, of_bias, **where)
        rest = torch.ones_like(out, dtype=torch.bool)
        for expert, place in enumerate(places):
            matrix = exact[expert * n : (expert + 1) * n]
            assert_rounded_product(out[place], x[place], matrix, None if of_bias is None else of_bias[expert])
            assert torch.equal(found[place], out[place])
            rest[place] = False
        assert (out[rest] == 7).all()
    assert epiloq.explain("packed_fp4_mm", x, weight, bias, **where)


def test_every_code_by_every_scale(device: str) -> None:
    for kind in KINDS.values():
        block = fp4_reference.BLOCK[kind]
        codes, scale = (part.to(device) for part in fp4_reference.every_code(kind))
        weight = epiloq.pack_fp4_weight(codes, scale, in_features=block)
        expected = epiloq.fp4_dequantize(codes, scale, in_features=block)
        assert torch.equal(weight.dequantize().nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))
        # By the kernel on a GPU: every number of the weight, as a row of the unit matrix picks it.
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.eye(block, device=device, dtype=dtype)
            few = torch.cat([epiloq.packed_fp4_mm(some, weight) for some in x.split(8)])
            found = epiloq.packed_fp4_mm(x, weight).t().float()
            picked = expected.to(dtype).float()
            # The kernel of more than 16 rows has weights in bfloat16, where the largest MXFP4 numbers are infinite.
            alike = (
                torch.ones(len(picked), dtype=torch.bool) if dtype == torch.float16 else ~picked.isinf().any(1).cpu()
            )
            assert torch.equal(few.t().float().nan_to_num()[alike], found.nan_to_num()[alike])
            # Others are rounded, or smaller than what some products take for 0.
            low, high = (2.0**-14, 2.0**14) if dtype == torch.float16 else (2.0**-100, 2.0**120)
            fits = (picked == 0) | (picked.abs() > low) & (picked.abs() < high)
            rows = fits.all(1) & expected.isfinite().all(1)
            assert torch.equal(found[rows], picked[rows])


@pytest.mark.parametrize("form", KINDS)
def test_gradients(form: str, seed: int, device: str) -> None:
    weight, _ = packed(96, 80, form, device, 2)
    dense = weight.dequantize().view(2, 48, 80)
    ends = torch.tensor([3, 4], dtype=torch.int32, device=device)
    x = torch.randn(6, 80, device=device, requires_grad=True)
    bias = torch.randn(2, 48, device=device, requires_grad=True)
    dy = torch.randn(6, 48, device=device)
    y = epiloq.packed_fp4_mm(x, weight, bias, offs=ends)
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    torch.testing.assert_close(dx[:3], dy[:3] @ dense[0])
    torch.testing.assert_close(dx[3:4], dy[3:4] @ dense[1])
    assert (dx[4:] == 0).all()
    torch.testing.assert_close(dbias, torch.stack([dy[:3].sum(0), dy[3]]))
    one = weight.row_slice(0, 48)
    (dx,) = torch.autograd.grad(epiloq.packed_fp4_mm(x, one).square().sum(), x)
    expected, size = ((2 * (a @ b.t()) @ b) for a, b in ((x, dense[0]), (x.abs(), dense[0].abs())))
    assert ((dx - expected).abs() <= 1e-6 * size).all()
    gradient = torch.func.grad(lambda part: (epiloq.packed_fp4_mm(part, one) * dy).sum())(x.detach())
    torch.testing.assert_close(gradient, dy @ dense[0])
    compiled = torch.compile(epiloq.packed_fp4_mm, fullgraph=True, backend="aot_eager")
    (again,) = torch.autograd.grad(compiled(x, one).square().sum(), x)
    torch.testing.assert_close(again, dx)


def test_refused(seed: int) -> None:
    weight, _ = packed(64, 40, "mxfp4", "cpu")
    x, two = torch.ones(3, 40), torch.tensor([1, 3], dtype=torch.int32)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": torch.ones(3, 41)}, "x: expected float32, float16 or bfloat16 with 40 columns"),
        ({"x": torch.ones(3, 40).double()}, "x: expected float32"),
        ({"x": torch.ones(40, 3).t()}, "x: expected row-major"),
        ({"x": torch.tensor(1.0)}, "x: expected at least one dimension"),
        ({"bias": torch.ones(3)}, r"bias: expected x's torch\.float32 \[64\]"),
        ({"bias": torch.ones(64), "offs": two}, r"bias: expected x's torch\.float32 \[2, 32\]"),
        ({"offs": two, "masked_m": two}, "offs: expected at most one"),
        ({"offs": two.long()}, r"offs: expected int32 \[E\]"),
        ({"offs": torch.tensor([1, 2, 3], dtype=torch.int32)}, "weight: expected 3 matrices of a multiple of 16"),
        ({"offs": torch.tensor([2, 1], dtype=torch.int32)}, "offs: expected ascending ends up to 3"),
        ({"offs": torch.tensor([2, 4], dtype=torch.int32)}, "offs: expected ascending ends up to 3"),
        ({"masked_m": two}, r"x: expected \[2, M, K\]"),
        ({"x": torch.ones(2, 2, 40), "masked_m": two}, "masked_m: expected 0 to 2"),
        ({"out": torch.ones(3, 63)}, r"out: expected \[3, 64\]"),
        (
            {"weight": PackedFp4Weight(weight.q[:, :0], weight.scale, None, "mxfp4", 64, 40)},
            r"weight\.q: expected uint8",
        ),
        ({"weight": PackedFp4Weight(weight.q, weight.scale[:1], None, "mxfp4", 64, 40)}, r"weight\.scale: expected"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=rf"epiloq\.packed_fp4_mm: {message}"):
            epiloq.packed_fp4_mm(**{"x": x, "weight": weight, **arguments})
    with pytest.raises(TypeError, match="weight: expected a PackedFp4Weight, got Tensor"):
        epiloq.packed_fp4_mm(x, x)  # type: ignore[arg-type]
    codes, scale, _ = fp4_reference.weight(40, 40, KINDS["nvfp4"])
    for factor, message in (
        (torch.ones(2), "global_scale: expected one element"),
        (torch.ones(1).double(), "global_scale: expected"),
    ):
        with pytest.raises(ValueError, match=rf"epiloq\.pack_fp4_weight: {message}"):
            epiloq.pack_fp4_weight(codes, scale, in_features=40, global_scale=factor)


@pytest.mark.gpu
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_kernel_is_used_without_synchronisation(
    form: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows, dense and of experts, in a captured graph too; more rows are multiplied by a dense weight."""
    weight, exact = packed(8 * 256, 512, form, "cuda", 8)
    x, ends = torch.randn(40, 512, device="cuda").to(dtype), torch.arange(5, 41, 5, device="cuda", dtype=torch.int32)
    assert "dequantised" not in epiloq.explain("packed_fp4_mm", x, weight, offs=ends)
    assert "dequantised" not in epiloq.explain("packed_fp4_mm", x, weight.row_slice(0, 256))
    many = x.repeat(20, 1)
    assert "dequantised" not in epiloq.explain("packed_fp4_mm", many, weight, offs=20 * ends)
    with monkeypatch.context() as patched:
        patched.setattr(few_rows, "multiplications", lambda *_, **__: 100 * 256 * 512 - 1)
        assert "dequantised" in epiloq.explain("packed_fp4_mm", many, weight, offs=20 * ends)
    epiloq.packed_fp4_mm(x, weight, offs=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = epiloq.packed_fp4_mm(x, weight, offs=ends)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    for expert in range(8):
        rows = slice(5 * expert, 5 * expert + 5)
        assert_rounded_product(found[rows], x[rows], exact[expert * 256 : (expert + 1) * 256], None)
    monkeypatch.setattr(few_rows, "multiplications", lambda *_, **__: 0)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # nothing may be read on the host
        epiloq.packed_fp4_mm(many, weight, offs=20 * ends)


@pytest.mark.parametrize("captures", [False, True])
def test_a_graph_takes_the_kernel_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    """Because the host cannot read the numbers of rows while it is captured."""
    monkeypatch.setattr(few_rows._core, "has_expert_wgmma", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    cuda = torch.device("cuda")
    x: Any = SimpleNamespace(is_cuda=True, ndim=2, shape=(80000, 4096), dtype=torch.float16, device=cuda)
    assert packed_fp4_mm._takes_kernel(x, torch.zeros(8, dtype=torch.int32), 8 * 14336, "mxfp4") is captures
