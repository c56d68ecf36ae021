"""Packed FP4 weights, which lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import epiloq
import fp4_reference
from fp4_reference import KINDS, packed
from reference import assert_rounded_product

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k", "matrices"), [(1, 1, 1), (33, 100, 1), (64, 4096, 4), (1029, 33, 1), (16, 640, 1)])
def test_dequantised_on_a_gpu(n: int, k: int, matrices: int, form: str, dtype: torch.dtype, seed: int) -> None:
    """By one kernel: the bits of `fp4_dequantize` on the CPU."""
    codes, scale, _ = fp4_reference.weight(n, k, KINDS[form])
    scale.view(torch.uint8).flatten()[-1] = 255 if form == "mxfp4" else 127
    factor = torch.rand(matrices) + 0.1 if form == "nvfp4" else None
    each = None if factor is None else factor.repeat_interleave(n // matrices)
    expected = epiloq.fp4_dequantize(codes, scale, in_features=k, global_scale=each, dtype=dtype)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=k, global_scale=factor).to("cuda")
    found = weight.dequantize(dtype).cpu()
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()
    assert torch.equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@given(
    n=st.integers(0, 70),
    k=st.integers(0, 300),
    form=st.sampled_from(sorted(KINDS)),
    random=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_packing_loses_nothing(n: int, k: int, form: str, random: int) -> None:
    torch.manual_seed(random)
    codes = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8)
    blocks = (n, -(-k // fp4_reference.BLOCK[KINDS[form]]))
    # Of NVFP4 all bytes but those of negative numbers and of 0.
    low, high = (0, 256) if form == "mxfp4" else (1, 128)
    scale = torch.randint(low, high, blocks, dtype=torch.uint8).view(KINDS[form])
    factor = None if form == "mxfp4" else torch.rand(1)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=k, global_scale=factor)
    again = weight.unpack()
    if k % 2 and n:
        codes[:, -1] &= 15
    assert torch.equal(again[0], codes) and torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))
    assert again[2] is factor or torch.equal(again[2], factor)
    expected = epiloq.fp4_dequantize(codes, scale, in_features=k, global_scale=factor)
    for dtype in DTYPES:
        found = weight.dequantize(dtype)
        assert found.dtype == dtype and torch.equal(found.nan_to_num(nan=3.5), expected.to(dtype).nan_to_num(nan=3.5))


def test_scales_of_zero_and_below(seed: int, device: str) -> None:
    codes, scale, _ = fp4_reference.weight(20, 70, KINDS["nvfp4"], device)
    scale.view(torch.uint8)[3, 1], scale.view(torch.uint8)[18, 4] = 0, 0x80
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=70)
    expected = epiloq.fp4_dequantize(codes, scale, in_features=70)
    assert torch.equal(weight.dequantize(), expected)
    x = torch.randn(3, 70, device=device).bfloat16()
    assert_rounded_product(epiloq.packed_fp4_mm(x, weight), x, expected.double(), None)
    assert (epiloq.weights.fp4.code_values(weight.unpack()[0], 70)[3, 16:32] == 0).all()
    scale.view(torch.uint8)[0, 0], scale.view(torch.uint8)[0, 1] = 0xB8, 0x7F  # -1 beside NaN, which is allowed
    with pytest.raises(ValueError, match=r"epiloq\.pack_fp4_weight: scale: expected no negative numbers, got -1"):
        epiloq.pack_fp4_weight(codes, scale, in_features=70)


def test_rows_share_memory(seed: int) -> None:
    weight, _ = packed(64, 40, "nvfp4", "cpu", 2)
    part = weight.row_slice(32, 55)
    assert part.q.data_ptr() == weight.q[2].data_ptr() and part.n == 23
    assert torch.equal(part.dequantize(), weight.dequantize()[32:55])
    assert weight.nbytes == weight.q.nbytes + weight.scale.nbytes + 8 and "nvfp4" in repr(weight)
