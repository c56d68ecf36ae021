"""epiloq.compat.sglang: FP8 functions by name, against the formulas of sgl_kernel written out."""

from __future__ import annotations

import pytest
import torch

from compat_reference import E4M3, FLOATS, HALF, assert_product, assert_quantised, fp8, power_of_two, scales, spread
from epiloq.compat import sglang
from reference import poisoned


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
