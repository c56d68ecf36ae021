"""epiloq.compat: other libraries' parameters, by name, order and default."""

from __future__ import annotations

import inspect

import pytest

from epiloq.compat import deep_gemm, sglang, vllm


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
