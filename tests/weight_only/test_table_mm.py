"""`table_mm` against float64: the CPU's path, the decode kernel and the dense product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from epiloq import _core
from epiloq.ops.table_mm import dequantized
from reference import assert_rounded_product

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# M, N, K, block size. The kernel takes those of K % block == 0, block % 64 == 0 and M <= 64.
SIZES = [
    (1, 1, 64, 64),
    (1, 300, 1024, 64),
    (3, 17, 192, 64),
    (8, 33, 4096, 128),
    (9, 130, 576, 192),
    (16, 65, 2048, 2048),
    (17, 48, 640, 64),
    (32, 100, 1280, 256),
    (64, 40, 128, 64),
    (65, 40, 128, 64),
    (5, 24, 96, 64),
    (4, 7, 33, 24),
    (2, 3, 5, 1),
    (0, 8, 64, 64),
    (2, 0, 64, 64),
    (2, 4, 0, 64),
]


def problem(m: int, n: int, k: int, block: int, dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments, and W in float64."""
    codes = torch.randint(0, 256, (-(-n * k // 2),), dtype=torch.uint8, device=device)
    table, scale = torch.randn(16, device=device), torch.rand(-(-n * k // block), device=device) + 0.1
    flat = torch.stack((codes >> 4, codes & 15), 1).flatten()[: n * k].long()
    weight = table.double()[flat] * scale.double().repeat_interleave(block)[: n * k]
    x, bias = torch.randn(m, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    return {"x": x, "codes": codes, "table": table, "scale": scale, "bias": bias}, weight.view(n, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k", "block"), SIZES)
def test_products(m: int, n: int, k: int, block: int, dtype: torch.dtype, device: str, seed: int) -> None:
    arguments, weight = problem(m, n, k, block, dtype, device)
    for bias in (None, arguments["bias"]):
        given = arguments | {"bias": bias}
        found = epiloq.table_mm(**given, out_features=n, block_size=block)
        assert_rounded_product(found, given["x"], weight, bias)
        out = torch.full((m, n + 3), float("nan"), dtype=dtype, device=device)[:, :n]
        assert epiloq.table_mm(**given, out_features=n, block_size=block, out=out) is out
        # Torch's product may be another one for other strides.
        torch.testing.assert_close(out, found, rtol=torch.finfo(dtype).eps, atol=1e-3 + torch.finfo(dtype).eps)
    assert epiloq.explain("table_mm", **arguments, out_features=n, block_size=block)


def test_rows_of_any_stride(device: str, seed: int) -> None:
    arguments, weight = problem(6, 40, 128, 64, torch.bfloat16, device)
    wide = torch.randn(6, 200, device=device, dtype=torch.bfloat16)
    for first in (0, 1, 8):  # 16-byte aligned or not
        x = wide[:, first : first + 128]
        assert_rounded_product(
            epiloq.table_mm(**arguments | {"x": x}, out_features=40, block_size=64), x, weight, arguments["bias"]
        )
    x = wide[:, :128].reshape(2, 3, 128)
    found = epiloq.table_mm(**arguments | {"x": x}, out_features=40, block_size=64)
    assert found.shape == (2, 3, 40)
    assert_rounded_product(found.flatten(0, 1), x.flatten(0, 1), weight, arguments["bias"])


def test_nan_affects_only_its_row(device: str, seed: int) -> None:
    arguments, _ = problem(4, 32, 128, 64, torch.float16, device)
    arguments["x"][1, 5] = float("nan")
    found = epiloq.table_mm(**arguments, out_features=32, block_size=64)
    assert found[1].isnan().all() and not found[[0, 2, 3]].isnan().any()


@settings(max_examples=80)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 70),
    blocks=st.integers(1, 20),
    block=st.sampled_from([8, 16, 24, 32, 64, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 3),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_size_on_a_cpu(
    m: int, n: int, blocks: int, block: int, dtype: torch.dtype, threads: int, draw: int
) -> None:
    torch.manual_seed(draw)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        arguments, weight = problem(m, n, blocks * block, block, dtype, "cpu")
        found = epiloq.table_mm(**arguments, out_features=n, block_size=block)
    finally:
        torch.set_num_threads(before)
    assert_rounded_product(found, arguments["x"], weight, arguments["bias"])
    method = epiloq.explain("table_mm", **arguments, out_features=n, block_size=block)
    assert ("in registers" in method) == (m <= 8)


def test_rows_dequantised_on_a_cpu(seed: int) -> None:
    """By the library as by torch, bit for bit; blocks that it does not support are refused."""
    for n, k, block in ((5, 192, 64), (3, 40, 8), (70, 72, 24)):
        arguments, _ = problem(1, n, k, block, torch.float32, "cpu")
        weight = (arguments["codes"], arguments["table"], arguments["scale"])
        for dtype in DTYPES:
            found = torch.empty(n, k, dtype=dtype)
            _core.dequantize_table(found, *weight, n, k, block, 2)
            assert torch.equal(found, dequantized(*weight, k, block, slice(0, n), dtype))
    arguments, _ = problem(1, 4, 20, 4, torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match="block_size: expected a multiple of 8"):
        weight = (arguments["codes"], arguments["table"], arguments["scale"])
        _core.dequantize_table(torch.empty(4, 20), *weight, 4, 20, 4)


@pytest.mark.gpu
def test_kernel_is_used(seed: int) -> None:
    for m, k, block, dtype, kernel in (
        (64, 256, 64, torch.bfloat16, True),
        (65, 256, 64, torch.bfloat16, False),
        (1, 256, 32, torch.bfloat16, False),
        (1, 320, 128, torch.float16, False),
        (1, 256, 64, torch.float32, False),
    ):
        arguments, _ = problem(m, 64, k, block, dtype, "cuda")
        assert ("decode kernel" in epiloq.explain("table_mm", **arguments, out_features=64, block_size=block)) == kernel


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(2, 65), r"x: expected rows|codes|columns"),
        ("codes", torch.zeros(31, dtype=torch.uint8), r"codes: expected"),
        ("codes", torch.zeros(128, dtype=torch.int8), r"codes: expected"),
        ("table", torch.zeros(15), r"table: expected"),
        ("scale", torch.zeros(3), r"scale: expected"),
        ("bias", torch.zeros(5), r"bias"),
        ("out_features", -1, r"out_features: expected at least 0, got -1"),
        ("block_size", 0, r"block_size: expected at least 1, got 0"),
    ],
)
def test_refused(name: str, value: object, message: str) -> None:
    arguments, _ = problem(2, 4, 64, 64, torch.float32, "cpu")
    with pytest.raises(ValueError, match=rf"epiloq\.table_mm: .*({message})"):
        epiloq.table_mm(**{**arguments, "out_features": 4, "block_size": 64, name: value})
