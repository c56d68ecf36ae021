"""epiloq.compat.deep_gemm: functions by name, against the formulas of DeepGEMM written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compat_reference import E4M3, FLOATS, assert_product, codes, fp8, power_of_two, scales, spread
from epiloq.compat import deep_gemm
from reference import poisoned


@pytest.mark.parametrize("ue8m0", [True, False])
@pytest.mark.parametrize(("m", "k", "group"), [(5, 256, 128), (3, 300, 128), (4, 96, 32)])
def test_deep_gemm_casts(m: int, k: int, group: int, ue8m0: bool, seed: int) -> None:
    x = torch.randn(m, k)
    x[1] = 1e-7
    padded = torch.nn.functional.pad(x, (0, -k % group)).view(m, -1, group)
    expected = padded.abs().amax(-1).clamp_min(1e-4) / 448
    q, scale = deep_gemm.per_token_cast_to_fp8(x, ue8m0, group)
    assert torch.equal(scale, power_of_two(expected) if ue8m0 else expected)
    wide = scale.repeat_interleave(group, 1)[:, :k]
    assert torch.equal(codes(q), codes((x / wide).to(E4M3)))

    rows = torch.nn.functional.pad(x, (0, -k % group, 0, -m % group))
    expected = rows.view(rows.shape[0] // group, group, -1, group).abs().amax((1, 3)).clamp_min(1e-4) / 448
    q, scale = deep_gemm.per_block_cast_to_fp8(x, ue8m0, group)
    assert torch.equal(scale, power_of_two(expected) if ue8m0 else expected)
    wide = spread(scale, group, group, (m, k)).float()
    assert torch.equal(codes(q), codes((x / wide).to(E4M3)))


@pytest.mark.parametrize("order", ["transposed", "every other column", "one row expanded"])
def test_deep_gemm_casts_take_any_strides(order: str, device: str, seed: int) -> None:
    """As DeepGEMM's, which copy into rows that are padded."""
    x = torch.randn(256, 256, device=device)
    x = {"transposed": x.t(), "every other column": x[:, ::2], "one row expanded": x[:1].expand(64, -1)}[order]
    for cast in (deep_gemm.per_token_cast_to_fp8, deep_gemm.per_block_cast_to_fp8):
        for result, expected in zip(cast(x, True), cast(x.contiguous(), True), strict=True):
            assert torch.equal(result.float(), expected.float())


def test_deep_gemm_refuses() -> None:
    x, d = torch.ones(4, 128), torch.empty(4, 8)
    with pytest.raises(NotImplementedError, match="use_packed_ue8m0"):
        deep_gemm.per_token_cast_to_fp8(x, True, use_packed_ue8m0=True)
    with pytest.raises(ValueError, match="x: expected 2 dimensions"):
        deep_gemm.per_block_cast_to_fp8(x[0], False)
    with pytest.raises(ValueError, match="x: expected float32 of 2 or 3"):
        deep_gemm.get_mn_major_tma_aligned_tensor(x.half())
    a, b = deep_gemm.per_token_cast_to_fp8(x, False), deep_gemm.per_block_cast_to_fp8(torch.ones(8, 128), False)
    with pytest.raises(ValueError, match=r"c: expected torch.float32"):
        deep_gemm.fp8_gemm_nt(a, b, d, c=d.half())
    with pytest.raises(ValueError, match="scale_b"):
        deep_gemm.fp8_gemm_nt(a, (b[0], torch.ones(3, 3)), d)
    with pytest.raises(ValueError, match="sorted by expert"):
        weights = (b[0].unsqueeze(0).repeat(2, 1, 1), b[1].unsqueeze(0).repeat(2, 1, 1))
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, weights, d, torch.tensor([1, 0, 0, 1], dtype=torch.int32))


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (8, 2), (2, 5, 3)])
def test_deep_gemm_aligned_layout(shape: tuple[int, ...], seed: int) -> None:
    x = torch.rand(shape)
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(x)
    pitch = -(-shape[-2] // 4) * 4
    assert aligned.stride()[-2:] == (1, pitch)
    assert torch.equal(aligned, x)
    assert deep_gemm.get_mn_major_tma_aligned_tensor(aligned) is aligned


def operands(m: int, n: int, k: int, per_column: bool = False) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    blocks, rows = -(-k // 128), n if per_column else -(-n // 128)
    return (fp8(m, k), scales(m, blocks)), (fp8(n, k), scales(rows, blocks))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (17, 300, 384), (5, 9, 100)])
@pytest.mark.parametrize("per_column", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_deep_gemm_product(
    dtype: torch.dtype, m: int, n: int, k: int, per_column: bool, aligned: bool, seed: int, device: str
) -> None:
    a, b = operands(m, n, k, per_column)
    recipe = (1, 1, 128) if per_column else None
    x = a[0].double() * spread(a[1], 1, 128, (m, k))
    w = b[0].double() * spread(b[1], 1 if per_column else 128, 128, (n, k))
    a, b = tuple(t.to(device) for t in a), tuple(t.to(device) for t in b)
    a = (a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1])) if aligned else a
    d = poisoned((m, n), dtype, device)
    assert deep_gemm.fp8_gemm_nt(a, b, d, recipe=recipe) is None
    assert_product(d, x, w)
    c = torch.randn(m, n).to(device, dtype)
    plain = poisoned((m, n), torch.float32, device)
    deep_gemm.fp8_gemm_nt(a, b, plain, recipe=recipe)
    deep_gemm.fp8_gemm_nt(a, b, d, c, recipe)
    assert torch.equal(d, (plain + c).to(dtype))
    deep_gemm.fp8_gemm_nt(a, b, c, c, recipe)
    assert torch.equal(c, d)


@pytest.mark.parametrize("use_psum_layout", [True, False])
@pytest.mark.parametrize("counts", [(3, 5, 1), (0, 7, 0), (4, 0, 2), (0, 0, 0), (0, 0, 6)])
def test_deep_gemm_grouped_contiguous(counts: tuple[int, ...], use_psum_layout: bool, seed: int, device: str) -> None:
    """Each expert's rows begin at a multiple of 8, padding between."""
    n, k, aligned = 144, 256, 8
    begins = [sum(-(-count // aligned) * aligned for count in counts[:e]) for e in range(len(counts))]
    m = max(begins[-1] + -(-counts[-1] // aligned) * aligned, 1)
    layout = torch.full((m,), -1, dtype=torch.int32)
    for expert, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        layout[begin : begin + count] = expert
    ends = torch.tensor([b + c for b, c in zip(begins, counts, strict=True)], dtype=torch.int32)
    a, scale_a, weight, scale_b = fp8(m, k), scales(m, 2), fp8(len(counts), n, k), scales(len(counts), 2, 2)
    d = poisoned((m, n), torch.bfloat16, device)
    left, right = (a.to(device), scale_a.to(device)), (weight.to(device), scale_b.to(device))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        left, right, d, (ends if use_psum_layout else layout).to(device), use_psum_layout=use_psum_layout
    )
    x, d = a.double() * spread(scale_a, 1, 128, (m, k)), d.cpu()
    for expert, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        rows = slice(begin, begin + count)
        exact = x[rows] @ (weight[expert].double() * spread(scale_b[expert], 128, 128, (n, k))).t()
        torch.testing.assert_close(d[rows].double(), exact, rtol=2.0**-7, atol=2.0**-8 * float(x.abs().max()))


def test_deep_gemm_grouped_masked(seed: int, device: str) -> None:
    experts, m, n, k = 3, 9, 144, 256
    a, scale_a, weight, scale_b = fp8(experts, m, k), scales(experts, m, 2), fp8(experts, n, k), scales(experts, 2, 2)
    masked_m = torch.tensor([9, 0, 4], dtype=torch.int32)
    d = poisoned((experts, m, n), torch.bfloat16, device)
    left, right = (a.to(device), scale_a.to(device)), (weight.to(device), scale_b.to(device))
    deep_gemm.m_grouped_fp8_gemm_nt_masked(left, right, d, masked_m.to(device), expected_m=4)
    d = d.cpu()
    for expert, count in enumerate(masked_m.tolist()):
        x = a[expert].double() * spread(scale_a[expert], 1, 128, (m, k))
        exact = x[:count] @ (weight[expert].double() * spread(scale_b[expert], 128, 128, (n, k))).t()
        torch.testing.assert_close(d[expert, :count].double(), exact, rtol=2.0**-7, atol=2.0**-8 * float(x.abs().max()))
        assert d[expert, count:].isnan().all()
