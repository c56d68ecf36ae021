"""epiloq.compat.vllm: FP8 functions by name, against the formulas of vLLM written out."""

from __future__ import annotations

import math

import pytest
import torch

from compat_reference import (
    E4M3,
    FLOATS,
    HALF,
    assert_product,
    assert_quantised,
    codes,
    fp8,
    power_of_two,
    scales,
    spread,
)
from epiloq.compat import sglang, vllm


@pytest.mark.parametrize("out_dtype", HALF)
@pytest.mark.parametrize("leading", [(1,), (17,), (2, 3), (0,)])
@pytest.mark.parametrize(("per_token", "per_channel", "bias_shape"), [(1, 1, (1, 100)), (1, 0, None), (0, 1, (100,))])
def test_vllm_scaled_mm_of_whole_rows(
    out_dtype: torch.dtype,
    leading: tuple[int, ...],
    per_token: int,
    per_channel: int,
    bias_shape: tuple[int, ...] | None,
    seed: int,
    device: str,
) -> None:
    k, n = 37, 100
    a, weight = fp8(*leading, k), fp8(n, k)
    scale_a = scales(a.numel() // k, 1) if per_token else scales(1)
    scale_b = scales(n, 1) if per_channel else scales(1, 1)
    bias = None if bias_shape is None else torch.randn(bias_shape).to(out_dtype)
    call = (a, weight, scale_a, scale_b, bias)
    left, right, of_left, of_right, added = (None if t is None else t.to(device) for t in call)
    d = vllm.cutlass_scaled_mm(left, right.t(), of_left, of_right, out_dtype, added)
    assert (d.shape, d.dtype) == ((*leading, n), out_dtype)
    rows = a.reshape(-1, k).double() * scale_a.double()
    assert_product(d.reshape(-1, n), rows, weight.double() * scale_b.double(), bias)


@pytest.mark.parametrize("out_dtype", HALF)
@pytest.mark.parametrize(("leading", "k", "n"), [((17,), 256, 300), ((2, 3), 300, 128), ((1,), 384, 8), ((5,), 128, 9)])
@pytest.mark.parametrize("column_major", [True, False])
def test_vllm_scaled_mm_of_blocks(
    out_dtype: torch.dtype, leading: tuple[int, ...], k: int, n: int, column_major: bool, seed: int, device: str
) -> None:
    a, weight = fp8(*leading, k), fp8(n, k)
    m, blocks = math.prod(leading), -(-k // 128)
    scale_a = scales(blocks, m).t() if column_major else scales(*leading, blocks)
    scale_inv = scales(-(-n // 128), blocks)
    bias = torch.randn(n).to(out_dtype)
    left, right, of_left, of_right, added = (t.to(device) for t in (a, weight, scale_a, scale_inv, bias))
    d = vllm.cutlass_scaled_mm(left, right.t(), of_left, of_right.t(), out_dtype, added)
    assert (d.shape, d.dtype) == ((*leading, n), out_dtype)
    x = a.reshape(m, k).double() * spread(scale_a.reshape(m, blocks), 1, 128, (m, k))
    w = weight.double() * spread(scale_inv, 128, 128, (n, k))
    assert_product(d.reshape(m, n), x, w, bias)
    if len(leading) == 1:
        same = sglang.fp8_blockwise_scaled_mm(left, right.t(), of_left, of_right.t(), out_dtype)
        assert_product(same, x, w)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (3, 300), (0, 16)])
@pytest.mark.parametrize("bound", [None, 1.5])
def test_vllm_fp8_quant_per_token(dtype: torch.dtype, shape: tuple[int, int], bound: float | None, seed: int) -> None:
    x = torch.randn(shape).to(dtype)
    x[:1] = 1e-5
    scale_ub = None if bound is None else torch.tensor([bound])
    q, scale = vllm.scaled_fp8_quant(x, scale_ub=scale_ub, use_per_token_if_dynamic=True)
    amax = x.float().abs().amax(1, keepdim=True).clamp_max(bound or math.inf)
    assert_quantised(x, q, scale, torch.maximum(amax / 448, torch.tensor(1 / (448 * 512))))


@pytest.mark.parametrize("dtype", FLOATS)
def test_vllm_fp8_quant_per_tensor_with_padding_and_output(dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(5, 17).to(dtype)
    expected = (x.float().abs().amax() / 448).view(1, 1)
    q, scale = vllm.scaled_fp8_quant(x)
    assert_quantised(x, q, scale.view(1, 1), expected)
    padded, same = vllm.scaled_fp8_quant(x, num_token_padding=9)
    assert padded.shape == (9, 17)
    assert_quantised(x, padded[:5], same.view(1, 1), expected)
    tokens, of_tokens = vllm.scaled_fp8_quant(x, num_token_padding=3, use_per_token_if_dynamic=True)
    assert (tokens.shape, of_tokens.shape) == ((5, 17), (5, 1))
    output = torch.empty(5, 17, dtype=E4M3)
    assert vllm.scaled_fp8_quant(x, output=output)[0] is output
    assert torch.equal(codes(output), codes(q))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("scale_shape", "group_shape", "part"),
    [
        ((1,), None, (5, 256)),
        ((), None, (5, 256)),
        ((1,), (-1, -1), (5, 256)),
        ((5,), (1, -1), (1, 256)),
        ((5, 1), None, (1, 256)),
        ((5, 2), None, (1, 128)),
        ((5, 4), (1, 64), (1, 64)),
        ((1, 2), (128, 128), (128, 128)),
    ],
)
def test_vllm_fp8_quant_static(
    dtype: torch.dtype,
    scale_shape: tuple[int, ...],
    group_shape: tuple[int, int] | None,
    part: tuple[int, int],
    seed: int,
) -> None:
    x, scale = torch.randn(5, 256).to(dtype), scales(*scale_shape) / 4
    q, same = vllm.scaled_fp8_quant(x, scale, group_shape=group_shape)
    assert same is scale
    grid = scale.view(-(-5 // part[0]), -(-256 // part[1]))
    wide = spread(grid, *part, (5, 256)).float()
    assert torch.equal(codes(q), codes((x.float() / wide).clamp(-448, 448).to(E4M3)))


def test_vllm_fp8_quant_refuses(seed: int) -> None:
    x = torch.randn(4, 32)
    with pytest.raises(NotImplementedError, match=r"group_shape: .*\(-1, 1\)"):
        vllm.scaled_fp8_quant(x, torch.ones(32), group_shape=(-1, 1))
    with pytest.raises(ValueError, match="group_shape: expected one"):
        vllm.scaled_fp8_quant(x, torch.ones(4))
    for shape in ((4, 3), (3, 32)):  # of groups of which some are short there may be several sizes
        with pytest.raises(ValueError, match="group_shape: expected one"):
            vllm.scaled_fp8_quant(x, torch.ones(shape))
    with pytest.raises(ValueError, match="num_token_padding"):
        vllm.scaled_fp8_quant(x, num_token_padding=8, output=torch.empty(4, 32, dtype=E4M3))
    with pytest.raises(ValueError, match=r"output: expected torch.float8_e4m3fn"):
        vllm.scaled_fp8_quant(x, output=torch.empty(4, 32))
    with pytest.raises(ValueError, match=r"input: expected shape \[…, K\], got a scalar"):
        vllm.scaled_fp8_quant(x[0, 0])
    with pytest.raises(ValueError, match="num_token_padding: expected None with 3 dimensions"):
        vllm.scaled_fp8_quant(x[None], num_token_padding=9)
    with pytest.raises(ValueError, match=r"dtype: .*int8"):
        vllm.per_token_group_quant_fp8(x, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"dtype: .*float8"):
        vllm.per_token_group_quant_int8(x, 16, dtype=E4M3)
    with pytest.raises(ValueError, match="x: expected rows of whole groups of 24"):
        vllm.per_token_group_quant_int8(x, 24)
    with pytest.raises(ValueError, match="x: expected a contiguous"):
        vllm.per_token_group_quant_int8(x[:, :16], 16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ue8m0", [None, True])
@pytest.mark.parametrize("column_major", [True, False])
def test_vllm_group_quant_fp8(dtype: torch.dtype, ue8m0: bool | None, column_major: bool, seed: int) -> None:
    x = torch.randn(5, 384).to(dtype)
    x[2] = 0
    expected = x.float().view(5, 3, 128).abs().amax(-1).clamp_min(1e-10) / 448
    expected = power_of_two(expected) if ue8m0 else expected
    q, scale = vllm.per_token_group_quant_fp8(x, 128, column_major_scales=column_major, use_ue8m0=ue8m0)
    assert scale.stride() == ((1, 8) if column_major else (3, 1))
    assert_quantised(x, q, scale, expected)
    out = torch.empty(5, 384, dtype=E4M3)
    same, again = vllm.per_token_group_quant_fp8(
        x, 128, 1e-10, E4M3, column_major, tma_aligned_scales=True, out_q=out, use_ue8m0=ue8m0
    )
    assert same is out
    assert torch.equal(again, scale)
    assert again.stride() == scale.stride()
    assert torch.equal(codes(out), codes(q))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 96), (0, 32)])
def test_vllm_group_quant_int8(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    x = torch.randn(shape).to(dtype)
    q, scale = vllm.per_token_group_quant_int8(x, 32)
    groups = x.float().view(*shape[:-1], shape[-1] // 32, 32)
    expected = groups.abs().amax(-1) / 127
    assert torch.equal(scale, expected)
    assert torch.equal(q.view(groups.shape), torch.round(groups / expected.unsqueeze(-1)).to(torch.int8))
