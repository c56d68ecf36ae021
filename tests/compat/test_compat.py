"""epiloq.compat: other libraries' int8 functions by name, against the formulas of those libraries written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epiloq
from epiloq.compat import sglang, vllm
from int8_reference import assert_within_one_ulp

HALF = [torch.bfloat16, torch.float16]


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def column_major(k: int, n: int) -> Tensor:
    return int8(n, k).t()


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.02 + 1e-3


@pytest.mark.parametrize("out_dtype", HALF)
@pytest.mark.parametrize("leading", [(1,), (17,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize(("per_token", "per_channel", "bias_shape"), [(1, 1, (1, 100)), (1, 0, None), (0, 1, (100,))])
def test_vllm_scaled_mm(
    out_dtype: torch.dtype,
    leading: tuple[int, ...],
    per_token: int,
    per_channel: int,
    bias_shape: tuple[int, ...] | None,
    seed: int,
) -> None:
    k, n = 37, 100
    a, b = int8(*leading, k), column_major(k, n)
    tokens = a.numel() // k
    scale_a = scales(tokens, 1) if per_token else scales(1)
    scale_b = scales(n, 1) if per_channel else scales(1, 1)
    bias = None if bias_shape is None else torch.randn(bias_shape).to(out_dtype)
    d = vllm.cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)
    assert d.shape == (*leading, n)
    assert d.dtype == out_dtype
    product = scale_a.double() * scale_b.double().flatten() * (a.reshape(-1, k).double() @ b.double())
    assert_within_one_ulp(d.reshape(-1, n), product, bias)


@pytest.mark.parametrize("out_dtype", HALF)
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("leading", [(1,), (17,), (2, 3), (0,)])
def test_vllm_scaled_mm_azp(out_dtype: torch.dtype, static: bool, leading: tuple[int, ...], seed: int) -> None:
    k, n = 48, 33
    a, b = int8(*leading, k), column_major(k, n)
    tokens = a.numel() // k
    column_sums = b.sum(dim=0, keepdim=True, dtype=torch.int32)
    bias = torch.randn(n).to(out_dtype)
    scale_b = scales(n, 1)
    if static:
        scale_a, zero = scales(1), torch.randint(-128, 128, (1,), dtype=torch.int32)
        d = vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, out_dtype, zero * column_sums, None, bias)
    else:
        scale_a, zero = scales(tokens, 1), torch.randint(-128, 128, (tokens, 1), dtype=torch.int32)
        d = vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, out_dtype, column_sums, azp=zero, bias=bias)
    assert d.shape == (*leading, n)
    integers = (a.reshape(-1, k).double() - zero.double()) @ b.double()
    assert_within_one_ulp(d.reshape(-1, n), scale_a.double() * scale_b.double().flatten() * integers, bias)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (2, 3, 100), (0, 16)])
def test_vllm_dynamic_symmetric_quant(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    x = torch.randn(shape).to(dtype)
    q, scale, azp = vllm.scaled_int8_quant(x)
    rows = x.float().reshape(-1, shape[-1])
    expected = rows.abs().amax(1, keepdim=True) / 127
    assert azp is None
    assert q.shape == x.shape
    assert torch.equal(scale, expected)
    assert torch.equal(q.reshape(rows.shape), torch.round(rows / expected).to(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("offset", [0.0, 40.0, -40.0])
def test_vllm_dynamic_asymmetric_quant_need_not_contain_zero(dtype: torch.dtype, offset: float, seed: int) -> None:
    x = torch.randn(2, 3, 100).add(offset).to(dtype)
    q, scale, azp = vllm.scaled_int8_quant(x, symmetric=False)
    rows = x.float().reshape(-1, 100)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    expected = (high - low) / 255
    zero = torch.round(-128 - low / expected)
    assert azp.shape == scale.shape == (6, 1)
    assert torch.equal(scale, expected)
    assert torch.equal(azp, zero.to(torch.int32))
    assert torch.equal(q.reshape(6, 100).float(), torch.clamp(torch.round(rows / expected) + zero, -128, 127))
    assert (azp.abs().max() > 128) == (offset != 0)


def test_vllm_quant_of_constant_and_zero_rows() -> None:
    x = torch.stack((torch.zeros(8), torch.full((8,), 3.0), torch.full((8,), -3.0)))
    for symmetric in (True, False):
        q, scale, azp = vllm.scaled_int8_quant(x, symmetric=symmetric)
        assert scale.isfinite().all()
        zero = 0 if azp is None else azp
        torch.testing.assert_close((q - zero) * scale, x, atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("zero", [None, -128, 0, 37])
def test_vllm_static_quant(dtype: torch.dtype, zero: int | None, seed: int) -> None:
    x, scale = torch.randn(2, 3, 100).to(dtype), scales(1)
    azp = None if zero is None else torch.tensor([zero], dtype=torch.int32)
    q, same_scale, same_azp = vllm.scaled_int8_quant(x, scale, azp, azp is None)
    assert same_scale is scale
    assert same_azp is azp
    expected = torch.clamp(torch.round(x.float() / scale) + (zero or 0), -128, 127)
    assert torch.equal(q, expected.to(torch.int8))


@pytest.mark.parametrize("symmetric", [True, False])
def test_vllm_quantised_linear_layer(symmetric: bool, seed: int) -> None:
    """The two halves together, as vLLM's int8 linear calls them."""
    x, weight = torch.randn(6, 64) + 1, torch.randn(40, 64)
    weight_scale = weight.abs().amax(1, keepdim=True) / 127
    b = torch.round(weight / weight_scale).to(torch.int8).t()
    q, scale, azp = vllm.scaled_int8_quant(x, symmetric=symmetric)
    if symmetric:
        d = vllm.cutlass_scaled_mm(q, b, scale, weight_scale, torch.bfloat16)
    else:
        sums = b.sum(dim=0, keepdim=True, dtype=torch.int32)
        d = vllm.cutlass_scaled_mm_azp(q, b, scale, weight_scale, torch.bfloat16, sums, azp)
    exact = x @ weight.t()
    assert ((d.float() - exact).norm() / exact.norm()).item() < 0.02


@pytest.mark.parametrize("out_dtype", HALF)
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("with_bias", [True, False])
def test_sglang_scaled_mm(out_dtype: torch.dtype, tokens: int, with_bias: bool, seed: int) -> None:
    k, n = 37, 41
    a, b, scales_a, scales_b = int8(tokens, k), column_major(k, n), scales(tokens, 1), scales(n)
    bias = torch.randn(n).to(out_dtype) if with_bias else None
    d = sglang.int8_scaled_mm(a, b, scales_a, scales_b, out_dtype, bias)
    assert d.shape == (tokens, n)
    assert d.dtype == out_dtype
    assert_within_one_ulp(d, scales_a.double() * scales_b.double() * (a.double() @ b.double()), bias)


MM = {
    "a": torch.zeros(4, 32, dtype=torch.int8),
    "b": torch.zeros(16, 32, dtype=torch.int8).t(),
    "scale_a": torch.ones(4),
    "scale_b": torch.ones(16),
    "out_dtype": torch.bfloat16,
}
FP8 = torch.zeros(4, 32).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"a": FP8}, ".*float8_e4m3fn"),
        ({"b": FP8.t()}, "b: .*float8_e4m3fn"),
        ({"a": torch.zeros(4, 32)}, "a: .*float32"),
        ({"a": torch.zeros((), dtype=torch.int8)}, "a: .*scalar"),
        ({"a": torch.zeros(4, 31, dtype=torch.int8)}, "K|31"),
        ({"b": torch.zeros(32, dtype=torch.int8)}, "b: expected 2 dimensions"),
        ({"b": torch.zeros(32, 16, dtype=torch.int8)}, "b"),
        ({"scale_a": torch.ones(3)}, "scale_a"),
        ({"scale_b": torch.ones(15)}, "scale_b"),
        ({"out_dtype": torch.float32}, "out_dtype: expected torch.bfloat16 or torch.float16"),
        ({"bias": torch.zeros(15, dtype=torch.bfloat16)}, "bias: expected 16 elements"),
        ({"bias": torch.zeros(16)}, "bias"),
    ],
)
def test_vllm_matrix_products_refuse(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm.cutlass_scaled_mm(**MM | wrong)
    with pytest.raises(ValueError, match=message):
        vllm.cutlass_scaled_mm_azp(**MM | {"azp_adj": torch.zeros(16, dtype=torch.int32)} | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"azp_adj": torch.zeros(15, dtype=torch.int32)}, "azp_adj: expected 16 elements"),
        ({"azp": torch.zeros(1, dtype=torch.int32)}, "azp: expected 4 elements"),
    ],
)
def test_vllm_scaled_mm_azp_refuses(wrong: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm.cutlass_scaled_mm_azp(**MM | {"azp_adj": torch.zeros(16, dtype=torch.int32)} | wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": torch.ones(1), "symmetric": False}, "azp: .*got none with symmetric=False"),
        ({"scale": torch.ones(1), "azp": torch.zeros(1, dtype=torch.int32)}, "azp: .*got one with symmetric=True"),
        ({"scale": torch.ones(3)}, "scale: expected 1 elements"),
        ({"scale": torch.ones(1), "azp": torch.zeros(3, dtype=torch.int32), "symmetric": False}, "azp: expected 1"),
    ],
)
def test_vllm_quant_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"scaled_int8_quant: {message}"):
        vllm.scaled_int8_quant(torch.ones(3, 8), **arguments)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mat_a": FP8}, "mat_a: .*float8"),
        ({"mat_a": torch.zeros(2, 2, 32, dtype=torch.int8)}, "mat_a: expected 2 dimensions"),
        ({"mat_b": torch.zeros(32, 16, dtype=torch.int8)}, "b"),
        ({"scales_a": torch.ones(1)}, "scales_a: expected 4 elements"),
        ({"scales_b": torch.ones(1)}, "scales_b: expected 16 elements"),
        ({"bias": torch.zeros(4, dtype=torch.bfloat16)}, "bias: expected 16 elements"),
        ({"out_dtype": torch.float32}, "out_dtype"),
    ],
)
def test_sglang_refuses(wrong: dict[str, object], message: str) -> None:
    names = {"a": "mat_a", "b": "mat_b", "scale_a": "scales_a", "scale_b": "scales_b", "out_dtype": "out_dtype"}
    with pytest.raises(ValueError, match=message):
        sglang.int8_scaled_mm(**{names[name]: value for name, value in MM.items()} | wrong)


def test_transposed_inputs_are_copied(seed: int) -> None:
    """As vLLM copies them."""
    x = torch.randn(24, 7).t()
    for given in (x, torch.randn(2, 3, 24).transpose(0, 1)):
        whole = given.contiguous()
        for how in ({}, {"symmetric": False}, {"scale": torch.full((1,), 0.02)}):
            for found, expected in zip(
                vllm.scaled_int8_quant(given, **how), vllm.scaled_int8_quant(whole, **how), strict=True
            ):
                assert (found is None and expected is None) or torch.equal(found, expected)
        for per_token in (True, False):
            found = vllm.scaled_fp8_quant(given, use_per_token_if_dynamic=per_token)
            expected = vllm.scaled_fp8_quant(whole.view(-1, 24), use_per_token_if_dynamic=per_token)
            assert found[0].shape == given.shape and torch.equal(found[1], expected[1])
            assert torch.equal(found[0].view(torch.uint8).reshape(-1, 24), expected[0].view(torch.uint8))
            out = torch.empty(given.shape, dtype=torch.float8_e4m3fn)
            assert vllm.scaled_fp8_quant(given, use_per_token_if_dynamic=per_token, output=out)[0] is out
            assert torch.equal(out.view(torch.uint8).reshape(-1, 24), expected[0].view(torch.uint8))


def test_empty_tensors_are_quantised_like_others(seed: int) -> None:
    """By int8 and FP8: an empty tensor has the scale of zeros."""
    for shape in ((0, 5), (3, 0), (0, 0), (2, 0, 4)):
        x = torch.empty(shape)
        for granularity in ("tensor", "token"):
            q, scale, azp = epiloq.quantize_int8(x, granularity=granularity, symmetric=False)
            e4m3, other = epiloq.quantize_fp8(x, granularity=granularity)
            assert q.shape == e4m3.shape == x.shape and torch.equal(scale, other)
            assert azp is not None and (azp == -128).all() and azp.shape == scale.shape
