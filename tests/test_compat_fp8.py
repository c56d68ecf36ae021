"""epiloq.compat: other libraries' FP8 functions by name, against the formulas of those libraries written out."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from epiloq.compat import deep_gemm, sglang, vllm
from float8_reference import ACCURATE
from reference import poisoned, ulp

HALF = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALF]
E4M3 = torch.float8_e4m3fn
SMALLEST = 2.0**-126


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (vllm.cutlass_scaled_mm, "a, b, scale_a, scale_b, out_dtype, bias=None"),
        (vllm.cutlass_scaled_mm_azp, "a, b, scale_a, scale_b, out_dtype, azp_adj, azp=None, bias=None"),
        (vllm.scaled_int8_quant, "input, scale=None, azp=None, symmetric=True"),
        (
            vllm.scaled_fp8_quant,
            "input, scale=None, num_token_padding=None, scale_ub=None, use_per_token_if_dynamic=False, output=None, "
            "group_shape=None",
        ),
        (
            vllm.per_token_group_quant_fp8,
            "x, group_size, eps=1e-10, dtype=None, column_major_scales=False, tma_aligned_scales=False, out_q=None, "
            "use_ue8m0=None",
        ),
        (vllm.per_token_group_quant_int8, "x, group_size, eps=1e-10, dtype=torch.int8"),
        (sglang.int8_scaled_mm, "mat_a, mat_b, scales_a, scales_b, out_dtype, bias=None"),
        (sglang.fp8_scaled_mm, "mat_a, mat_b, scales_a, scales_b, out_dtype, bias=None"),
        (sglang.fp8_blockwise_scaled_mm, "mat_a, mat_b, scales_a, scales_b, out_dtype"),
        (
            sglang.sgl_per_token_group_quant_8bit,
            "input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0=False, "
            "fuse_silu_and_mul=False, masked_m=None, enable_v2=None",
        ),
        (sglang.sgl_per_token_quant_fp8, "input, output_q, output_s"),
        (deep_gemm.fp8_gemm_nt, "a, b, d, c=None, recipe=None, compiled_dims=nk, disable_ue8m0_cast=False"),
        (
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous,
            "a, b, d, grouped_layout, recipe=None, compiled_dims=nk, disable_ue8m0_cast=False, use_psum_layout=False",
        ),
        (
            deep_gemm.m_grouped_fp8_gemm_nt_masked,
            "a, b, d, masked_m, expected_m, recipe=None, compiled_dims=nk, disable_ue8m0_cast=False",
        ),
        (deep_gemm.per_token_cast_to_fp8, "x, use_ue8m0, gran_k=128, use_packed_ue8m0=False"),
        (deep_gemm.per_block_cast_to_fp8, "x, use_ue8m0, gran_k=128"),
        (deep_gemm.get_mn_major_tma_aligned_tensor, "x"),
    ],
)
def test_signatures(function: object, parameters: str) -> None:
    signature = inspect.signature(function)
    plain = [
        p.name if p.default is inspect.Parameter.empty else f"{p.name}={p.default}"
        for p in signature.parameters.values()
    ]
    assert ", ".join(plain) == parameters
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())


def fp8(*shape: int) -> Tensor:
    return (torch.randn(shape) * 64).to(E4M3)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.02 + 1e-3


def spread(scale: Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    """Scales of blocks as one of each element, float64."""
    wide = scale.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : shape[-2], : shape[-1]]


def assert_product(d: Tensor, a: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """`d` is ``a @ w.mT + bias`` of de-quantised float64 operands, up to its own rounding and sums in fp32."""
    span_bound, d = 2.0**-18 if d.device.type == "cpu" else ACCURATE, d.cpu()
    bias = torch.zeros(()) if bias is None else bias
    reference = a @ w.mT + bias.double().flatten()
    span = (a.square() @ w.mT.square()).sqrt()
    error = (d.double() - reference).abs()
    assert not error.isnan().any()
    assert (error <= ulp(reference, d.dtype) + span_bound * span + 2.0**-22 * bias.double().abs().max()).all()


def codes(q: Tensor) -> Tensor:
    return q.contiguous().view(torch.uint8)


def assert_quantised(x: Tensor, q: Tensor, scale: Tensor, expected: Tensor) -> None:
    """`scale` is as expected, and q the nearest code of each element over its own; `expected` spreads over x."""
    assert torch.equal(scale, expected)
    groups = -(-x.shape[-1] // expected.shape[-1])
    wide = expected.repeat_interleave(groups, -1)[..., : x.shape[-1]]
    assert torch.equal(codes(q), codes((x.float() / wide).clamp(-448, 448).to(E4M3)))


def power_of_two(scale: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale.double()))).float()


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
    with pytest.raises(ValueError, match="num_token_padding"):
        vllm.scaled_fp8_quant(x, num_token_padding=8, output=torch.empty(4, 32, dtype=E4M3))
    with pytest.raises(ValueError, match=r"output: expected torch.float8_e4m3fn"):
        vllm.scaled_fp8_quant(x, output=torch.empty(4, 32))
    with pytest.raises(ValueError, match="input: expected 2 dimensions"):
        vllm.scaled_fp8_quant(x[0])
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


@pytest.mark.parametrize("out_dtype", HALF)
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("with_bias", [True, False])
def test_sglang_scaled_mm(out_dtype: torch.dtype, tokens: int, with_bias: bool, seed: int) -> None:
    a, weight, scales_a, scales_b = fp8(tokens, 37), fp8(41, 37), scales(tokens, 1), scales(41)
    bias = torch.randn(41).to(out_dtype) if with_bias else None
    d = sglang.fp8_scaled_mm(a, weight.t(), scales_a, scales_b, out_dtype, bias)
    assert d.dtype == out_dtype
    assert_product(d, a.double() * scales_a.double(), weight.double() * scales_b.double().view(-1, 1), bias)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sglang_token_quant(dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(7, 100).to(dtype)
    q, scale = torch.empty(7, 100, dtype=E4M3), poisoned((7, 1), torch.float32, "cpu")
    assert sglang.sgl_per_token_quant_fp8(x, q, scale) is None
    assert_quantised(x, q, scale, x.float().abs().amax(1, keepdim=True) / 448)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ue8m0", [True, False])
@pytest.mark.parametrize("column_major", [True, False])
def test_sglang_group_quant_fp8(dtype: torch.dtype, ue8m0: bool, column_major: bool, seed: int) -> None:
    x = torch.randn(5, 256).to(dtype)
    x[3] = 1e-6
    q, scale = torch.empty(5, 256, dtype=E4M3), poisoned((5, 4), torch.float32, "cpu")
    scale = poisoned((4, 5), torch.float32, "cpu").t() if column_major else scale
    sglang.sgl_per_token_group_quant_8bit(x, q, scale, 64, 1e-4, -448.0, 448.0, ue8m0)
    expected = x.float().view(5, 4, 64).abs().amax(-1).clamp_min(1e-4) / 448
    assert_quantised(x, q, scale, power_of_two(expected) if ue8m0 else expected)


def test_sglang_group_quant_of_a_gated_input(seed: int) -> None:
    x = torch.randn(5, 512)
    q, scale = torch.empty(5, 256, dtype=E4M3), poisoned((5, 2), torch.float32, "cpu")
    sglang.sgl_per_token_group_quant_8bit(x, q, scale, 128, 1e-10, -448.0, 448.0, fuse_silu_and_mul=True)
    gated = torch.nn.functional.silu(x[:, :256].double()) * x[:, 256:].double()
    restored = q.double() * spread(scale, 1, 128, (5, 256))
    torch.testing.assert_close(scale.double(), gated.view(5, 2, 128).abs().amax(-1) / 448, rtol=1e-5, atol=0)
    assert ((restored - gated).abs() <= gated.abs() / 16 + 2.0**-9 * spread(scale, 1, 128, (5, 256))).all()


@pytest.mark.parametrize("column_major", [True, False])
def test_sglang_group_quant_int8(column_major: bool, seed: int) -> None:
    x = torch.randn(2, 3, 96)
    q, scale = torch.empty(2, 3, 96, dtype=torch.int8), poisoned((2, 3, 3), torch.float32, "cpu")
    scale = scale.mT if column_major else scale
    sglang.sgl_per_token_group_quant_8bit(x, q, scale, 32, 1e-10, -128, 127)
    groups = x.view(2, 3, 3, 32)
    expected = groups.abs().amax(-1) / 127
    assert torch.equal(scale, expected)
    assert torch.equal(q.view(groups.shape), torch.round(groups / expected.unsqueeze(-1)).to(torch.int8))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"masked_m": torch.ones(1)}, NotImplementedError, "masked_m"),
        ({"output_s": torch.ones(4, 1, dtype=torch.int32)}, NotImplementedError, "packed output_s"),
        ({"fp8_max": 224.0}, ValueError, "fp8_min, fp8_max: .*224"),
        ({"output_q": torch.empty(4, 32)}, ValueError, "output_q: .*float32"),
        (
            {"output_q": torch.empty(4, 32, dtype=torch.int8), "fp8_min": -128, "fp8_max": 127, "scale_ue8m0": True},
            NotImplementedError,
            "scale_ue8m0 of int8",
        ),
        ({"output_s": torch.empty(4, 3)}, ValueError, "scale"),
    ],
)
def test_sglang_group_quant_refuses(wrong: dict[str, object], error: type[Exception], message: str) -> None:
    call = {
        "input": torch.ones(4, 32),
        "output_q": torch.empty(4, 32, dtype=E4M3),
        "output_s": torch.empty(4, 2),
        "group_size": 16,
        "eps": 1e-10,
        "fp8_min": -448.0,
        "fp8_max": 448.0,
    }
    with pytest.raises(error, match=message):
        sglang.sgl_per_token_group_quant_8bit(**call | wrong)


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
