"""Tensors of other engines' layouts to packed weights and back: every bit pattern, against each format's definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epiloq
import layout_definitions as definitions
from epiloq.formats.layouts import awq, compressed_tensors, gptq, marlin
from epiloq.formats.layouts.base import FormatError
from layout_inputs import awq_tensors, scales, words


def shuffled_groups(k: int, group_size: int) -> Tensor:
    return (torch.randperm(k) // group_size).to(torch.int32)


def assert_same_bytes(found: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and found[name].is_contiguous(), name
        assert torch.equal(found[name], tensor), name


def assert_dense(packed: epiloq.PackedWeight, exact: Tensor) -> None:
    """Each weight within the roundings of a product and a sum in fp32."""
    found = packed.dequantize()
    assert found.shape == exact.shape
    size = exact.abs() + (0 if packed.offset is None else packed.offset.abs().max().double())
    assert ((found.double() - exact).abs() <= 2.0**-23 * size).all()


# --- GPTQ


@pytest.mark.parametrize("version", gptq.VERSIONS)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("bits", "group_size", "dtype"),
    [
        (4, 32, torch.float16),
        (4, -1, torch.bfloat16),
        (8, 32, torch.float16),
        (2, 64, torch.float16),
        (3, 32, torch.float32),
    ],
)
def test_gptq(seed: int, bits: int, group_size: int, dtype: torch.dtype, ordered: bool, version: str) -> None:
    n, k = 64, 128
    length = k if group_size == -1 else group_size
    tensors = {
        "qweight": words(k * bits // 32, n),
        "qzeros": words(k // length, n * bits // 32),
        "scales": scales(k // length, n, dtype=dtype),
        "g_idx": (torch.arange(k) // length).to(torch.int32) if ordered else shuffled_groups(k, length),
    }
    if bits == 8:  # 256 is a zero point that no kernel takes.
        tensors["qzeros"] &= 0x7F7F7F7F
    packed = gptq.to_packed(**tensors, bits=bits, group_size=group_size, checkpoint_format=version, shape=(n, k))
    assert (packed.perm is None) == (ordered or group_size == -1)
    assert_dense(packed, definitions.gptq(tensors, bits, version))
    assert_same_bytes(gptq.from_packed(packed, checkpoint_format=version), tensors)


def test_gptq_symmetric_and_short_last_group(seed: int) -> None:
    """All zero points in the middle need none; the last group of 72 channels in groups of 32 has 8."""
    tensors = {"qweight": words(9, 16), "qzeros": torch.full((3, 2), 0x77777777, dtype=torch.int32)}
    tensors |= {"scales": scales(3, 16)}
    packed = gptq.to_packed(**tensors, group_size=32)
    assert packed.symmetric and packed.shape == (16, 72)
    given = tensors | {"g_idx": (torch.arange(72) // 32).to(torch.int32)}
    assert_dense(packed, definitions.gptq(given, 4, "gptq"))
    assert_same_bytes(gptq.from_packed(packed), given)


# --- AWQ


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize(
    ("n", "k", "group_size", "dtype"),
    [
        (16, 256, 32, torch.float16),
        (8, 576, 64, torch.float16),
        (16, 384, 128, torch.bfloat16),
        (24, 192, -1, torch.float16),
    ],
)
def test_awq(seed: int, version: str, n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    tensors = awq_tensors(version, n, k, group_size, dtype)
    packed = awq.to_packed(**tensors, group_size=group_size, version=version, shape=(n, k))
    assert_dense(packed, getattr(definitions, f"awq_{version}")(tensors, group_size))
    assert_same_bytes(awq.from_packed(packed, version=version), tensors)


def test_awq_versions_of_one_weight(seed: int) -> None:
    """From gemm to the others; gemv_fast rounds scale times zero point to the scale's type."""
    packed = awq.to_packed(**awq_tensors("gemm", 16, 128, 32, torch.float16), group_size=32)
    gemv = awq.to_packed(**awq.from_packed(packed, version="gemv"), group_size=32, version="gemv")
    assert torch.equal(gemv.dequantize(), packed.dequantize())
    fast = awq.to_packed(**awq.from_packed(packed, version="gemv_fast"), group_size=32, version="gemv_fast")
    q, scale, zero = packed.unpack()
    assert zero is not None
    assert torch.equal(fast.unpack()[2], -(scale.double() * zero).half())  # type: ignore[arg-type]
    assert torch.equal(fast.unpack()[0], q)
    with pytest.raises(FormatError, match="awq gemm: expected integer zero points"):
        awq.from_packed(fast)
    symmetric = epiloq.pack_weight(torch.randint(-8, 8, (8, 64)), scales(8, 2), bits=4, group_size=32)
    for version in ("gemm", "gemv", "gemv_fast"):
        again = awq.to_packed(**awq.from_packed(symmetric, version=version), group_size=32, version=version)
        assert torch.equal(again.dequantize(), symmetric.dequantize())
        assert again.symmetric == (version != "gemv_fast")


# --- Marlin


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize(("zeros", "ordered"), [(False, True), (True, True), (False, False)])
def test_marlin(seed: int, bits: int, group_size: int, zeros: bool, ordered: bool) -> None:
    n, k = 128, 256
    count = 1 if group_size == -1 else k // group_size
    tensors = {"B": words(k // 16, n * bits // 2), "s": scales(count, n)}
    if zeros:
        tensors["qzeros"] = words(count, n * bits // 32)
    if not ordered:
        tensors["g_idx_sort_indices"] = torch.randperm(k).to(torch.int32)
    packed = marlin.to_packed(**tensors, bits=bits, group_size=group_size, shape=(n, k))
    assert packed.symmetric == (not zeros) and (packed.perm is None) == ordered
    assert_dense(packed, definitions.marlin(tensors, bits, group_size))
    assert_same_bytes(marlin.from_packed(packed), tensors)


def test_marlin_of_one_group_that_is_said(seed: int) -> None:
    """A group as long as the row is a group of its own, whatever it is called: scales lie as for -1."""
    tensors = {"B": words(8, 128), "s": scales(1, 64)}
    packed = marlin.to_packed(**tensors, group_size=128)
    assert_dense(packed, definitions.marlin(tensors, 4, -1))
    assert_same_bytes(marlin.from_packed(packed), tensors)


# --- compressed-tensors


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("bits", "n", "k", "group_size"), [(4, 24, 96, 32), (4, 20, 100, -1), (8, 9, 66, -1), (3, 17, 96, 32)]
)
def test_pack_quantized(seed: int, bits: int, n: int, k: int, group_size: int, zeros: bool, ordered: bool) -> None:
    length = k if group_size == -1 else group_size
    tensors = {
        "weight_packed": _full(bits, n, k),
        "weight_scale": scales(n, k // length, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }
    if zeros:
        tensors["weight_zero_point"] = _full(bits, k // length, n).t().contiguous()
    if not ordered:
        tensors["weight_g_idx"] = shuffled_groups(k, length)
    packed = compressed_tensors.to_packed(**tensors, bits=bits, group_size=group_size)
    assert packed.symmetric == (not zeros)
    assert_dense(packed, definitions.compressed(tensors, bits, group_size))
    if not ordered and group_size == -1:
        assert (packed.perm is None) and tensors.pop("weight_g_idx") is not None
    assert_same_bytes(compressed_tensors.from_packed(packed), tensors)


def _full(bits: int, rows: int, fields: int) -> Tensor:
    """Random words, with zeros where the last of a row is not full."""
    found = words(rows, -(-fields * bits // 32))
    used = fields * bits % 32
    if used:
        found[:, -1] &= (1 << used) - 1
    return found


@pytest.mark.parametrize("zeros", [False, True])
def test_int_quantized(seed: int, zeros: bool) -> None:
    tensors = {"weight": torch.randint(-128, 128, (10, 64), dtype=torch.int8), "weight_scale": scales(10, 1)}
    zero = torch.zeros(10, 1, dtype=torch.int8)
    if zeros:
        zero = tensors["weight_zero_point"] = torch.randint(-128, 128, (10, 1), dtype=torch.int8)
    packed = compressed_tensors.to_packed(**tensors, bits=8)
    exact = (tensors["weight"].double() - zero.double()) * tensors["weight_scale"].double()
    assert_dense(packed, exact)
    assert_same_bytes(compressed_tensors.from_packed(packed, layout="int-quantized"), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scale", "static"), [((1,), False), ((1,), True), ((200, 1), False), ((200, 1), True), ((2, 3), False)]
)
def test_float_quantized(seed: int, scale: tuple[int, ...], static: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": scales(*scale, dtype=dtype), "bias": torch.randn(200)}
    if static:
        tensors["input_scale"] = scales(1, dtype=dtype)
    layer = compressed_tensors.to_fp8(**tensors)
    found = compressed_tensors.from_fp8(layer, dtype=dtype)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    spread = tensors["weight_scale"].double()
    if scale == (2, 3):
        spread = spread.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    x = torch.randn(5, 300) * (0.5 if static else 1)
    exact = x.double() @ (weight.double() * spread).t() + tensors["bias"].double()
    limit = 448 * tensors["input_scale"].double() if static else torch.tensor(float("inf"))
    if (x.abs().double() < limit).all():
        error = (layer(x).double() - exact).norm() / exact.norm()
        assert error < 0.05


def test_compressed_tensors_with_its_own_compressor(seed: int) -> None:
    """In activation order, which its decompressor unpacks from weight_g_idx."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    words_of = compressors.pack_to_int32
    for bits in (2, 3, 4, 8):
        q = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (12, 64), dtype=torch.int8)
        packed = epiloq.pack_weight(q, scales(12, 2), bits=bits, group_size=32)
        ours = compressed_tensors.from_packed(packed)["weight_packed"]
        assert torch.equal(ours, words_of(q, bits))
