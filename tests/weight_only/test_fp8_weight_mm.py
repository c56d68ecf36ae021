"""`fp8_weight_mm` against float64: the CPU's path, the decode kernel and the dense product."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from reference import poisoned

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Block = tuple[int, int]
BLOCKS: tuple[Block, ...] = ((1, -1), (-1, -1), (128, 128), (1, 128), (128, 64), (7, 5), (3, 1000), (-1, 64))
BLOCKS += ((-1, 128), (2, 256), (16, -1))
# Sizes that the decode kernel takes with most of the blocks, and others: odd N and K, empty ones.
SIZES = [
    (1, 1, 64),
    (1, 300, 1024),
    (3, 17, 208),
    (8, 33, 4096),
    (9, 130, 592),
    (16, 65, 2048),
    (17, 48, 656),
    (32, 100, 1280),
    (33, 272, 400),
    (64, 40, 128),
    (65, 40, 128),
    (5, 24, 33),
    (2, 3, 5),
    (0, 8, 64),
    (2, 0, 64),
    (2, 4, 0),
]


def problem(m: int, n: int, k: int, block: Block, dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments, with every finite FP8 value among the weights, and W in float64."""
    codes = torch.randint(0, 254, (n, k), dtype=torch.uint8, device=device)
    codes += (codes >= 127).to(torch.uint8)  # neither 0x7f nor 0xff
    rows, columns = (max(whole, 1) if size == -1 else size for size, whole in zip(block, (n, k), strict=True))
    shape = (1 if block[0] == -1 else -(-n // rows), 1 if block[1] == -1 else -(-k // columns))
    scale = torch.rand(shape, device=device) * 0.02 + 1e-4
    spread = scale.double().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    x, bias = torch.randn(m, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    weight = codes.view(FP8)
    return {"x": x, "weight": weight, "scale": scale, "bias": bias}, weight.float().double() * spread


def is_rounded(arguments: dict[str, Any], block: Block = (1, -1)) -> bool:
    """Whether W is rounded to x's dtype: where no kernel fits, on a CPU only for more than 64 rows."""
    x = arguments["x"]
    method = epiloq.explain("fp8_weight_mm", **arguments, block=block)
    dense_on_cpu = "cpu, torch" in method and x.shape[:-1].numel() > 64
    return x.dtype != torch.float32 and (dense_on_cpu or "dequantised into memory" in method)


def assert_product(
    found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, weight_is_rounded: bool = False
) -> None:
    """Within docs/numerics.md's bound: the result's rounding and sums in fp32, and W's rounding where it is rounded."""
    of_bias = torch.zeros(()) if bias is None else bias.double()
    of_bias = of_bias.to(x.device)
    exact = x.double() @ weight.t() + of_bias
    size = x.double().abs() @ weight.abs().t() + of_bias.abs()
    info = torch.finfo(x.dtype)
    bound = (
        exact.abs() * info.eps + size * (2.0**-23 * math.sqrt(max(x.shape[-1], 1))) + info.smallest_normal * info.eps
    )
    if weight_is_rounded:
        bound += size * info.eps + 2.0**-25 * x.double().abs().sum(-1, keepdim=True)
    assert found.shape == exact.shape and found.dtype == x.dtype
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_products(m: int, n: int, k: int, dtype: torch.dtype, device: str, seed: int) -> None:
    for block in BLOCKS:
        arguments, weight = problem(m, n, k, block, dtype, device)
        rounded = is_rounded(arguments, block)
        for bias in (None, arguments["bias"]):
            given = arguments | {"bias": bias}
            found = epiloq.fp8_weight_mm(**given, block=block)
            assert_product(found, given["x"], weight, bias, weight_is_rounded=rounded)
            wide = poisoned((m, n + 3), dtype, device)
            out, untouched = wide[:, :n], wide[:, n:].clone()
            assert epiloq.fp8_weight_mm(**given, block=block, out=out) is out
            assert_product(out, given["x"], weight, bias, weight_is_rounded=rounded)
            assert torch.equal(wide[:, n:].nan_to_num(), untouched.nan_to_num())
        assert epiloq.explain("fp8_weight_mm", **arguments, block=block)


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 150), st.integers(1, 300)),
    st.tuples(st.sampled_from((-1, 1, 16, 128)), st.sampled_from((-1, 16, 64, 128))),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 9), st.integers(0, 40)),
    st.integers(0, 2**31),
)
def test_any_sizes_and_strides(
    sizes: tuple[int, int, int], block: Block, dtype: torch.dtype, apart: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    m, n, k = sizes
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        arguments, weight = problem(m, n, k, block, dtype, device)
        of_x, of_weight = (torch.zeros(1, 1).expand(rows, k + more) for rows, more in zip((m, n), apart, strict=True))
        x = of_x.to(device, dtype).contiguous()[:, apart[0] :].copy_(arguments["x"])
        stored = of_weight.to(device, torch.uint8).contiguous()[:, :k].copy_(arguments["weight"].view(torch.uint8))
        arguments |= {"x": x, "weight": stored.view(FP8)}
        found = epiloq.fp8_weight_mm(**arguments, block=block)
        rounded = is_rounded(arguments, block)
        assert_product(found, x, weight, arguments["bias"], weight_is_rounded=rounded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_every_byte_alone(m: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """Each of the 256 values in each of 64 columns, times a power of two: exactly, signs of zero aside."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    for column in (0, 1, 2, 3, 5, 22, 47, 63):
        weight = torch.zeros(256, 64, dtype=torch.uint8, device=device)
        weight[:, column] = codes
        x = torch.zeros(m, 64, dtype=dtype, device=device)
        x[:, column] = torch.randint(-3, 4, (m,), device=device).to(dtype).exp2()
        found = epiloq.fp8_weight_mm(x, weight.view(FP8), torch.ones(256, 1, device=device))
        exact = (x[:, column : column + 1].double() * codes.view(FP8).float().double()).to(dtype)
        assert torch.equal(found.nan_to_num(nan=1e4), exact.nan_to_num(nan=1e4))
        assert found[:, [0x7F, 0xFF]].isnan().all()


def test_nan_affects_only_its_element(device: str, seed: int) -> None:
    for dtype in DTYPES:
        arguments, _ = problem(4, 48, 128, (128, 128), dtype, device)
        arguments["x"][1, 5] = float("nan")
        arguments["weight"].view(torch.uint8)[37, 100] = 0x7F
        found = epiloq.fp8_weight_mm(**arguments, block=(128, 128))
        expected = torch.zeros(4, 48, dtype=torch.bool, device=device)
        expected[1], expected[:, 37] = True, True
        assert torch.equal(found.isnan(), expected)
        arguments, _ = problem(4, 48, 128, (1, -1), dtype, device)
        arguments["scale"][9] = float("nan")
        arguments["x"][2, 7] = float("inf")
        found = epiloq.fp8_weight_mm(**arguments)
        assert found[:, 9].isnan().all() and not found[[0, 1, 3]][:, :9].isnan().any()
        assert not found[2].isfinite().any()


def test_large_and_small_scales(device: str, seed: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for size in (1e-30, 1e30):
            arguments, weight = problem(3, 20, 256, (1, 128), dtype, device)
            found = epiloq.fp8_weight_mm(arguments["x"], arguments["weight"], arguments["scale"] * size, block=(1, 128))
            assert_product(found, arguments["x"], weight * size, None)


def test_rows_of_any_stride(device: str, seed: int) -> None:
    arguments, weight = problem(6, 40, 128, (1, -1), torch.bfloat16, device)
    wide = torch.randn(6, 200, device=device, dtype=torch.bfloat16)
    for first in (0, 1, 8):  # 16-byte aligned or not
        given = arguments | {"x": wide[:, first : first + 128]}
        rounded = is_rounded(given)
        assert rounded == (device == "cuda" and first == 1)
        found = epiloq.fp8_weight_mm(**given)
        assert_product(found, given["x"], weight, arguments["bias"], weight_is_rounded=rounded)
    x = wide[:, :128].reshape(2, 3, 128)
    found = epiloq.fp8_weight_mm(**arguments | {"x": x})
    assert found.shape == (2, 3, 40)
    assert_product(found.flatten(0, 1), x.flatten(0, 1), weight, arguments["bias"])


@pytest.mark.gpu
def test_kernel_is_used(seed: int) -> None:
    for m, k, block, dtype, kernel in (
        (64, 256, (1, -1), torch.bfloat16, True),
        (64, 272, (128, 128), torch.float16, True),
        (65, 256, (1, -1), torch.bfloat16, False),
        (9, 1280, (3, 1000), torch.float16, False),
        (17, 592, (7, 5), torch.bfloat16, False),
        (33, 400, (-1, 64), torch.bfloat16, True),
        (8, 208, (1, 128), torch.float16, True),
        (1, 256, (1, 32), torch.bfloat16, False),
        (1, 257, (1, -1), torch.float16, False),
        (1, 256, (1, -1), torch.float32, False),
    ):
        arguments, _ = problem(m, 64, k, block, dtype, "cuda")
        assert ("decode kernel" in epiloq.explain("fp8_weight_mm", **arguments, block=block)) == kernel


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
def test_repeated_calls_are_bit_equal(arch: str, seed: int) -> None:
    with epiloq.config(arch=arch):
        for m, n, k in ((1, 5120, 5120), (16, 1280, 8192), (64, 3584, 18944)):
            arguments, weight = problem(m, n, k, (128, 128), torch.float16, "cuda")
            found = [epiloq.fp8_weight_mm(**arguments, block=(128, 128)) for _ in range(3)]
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
            assert_product(found[0], arguments["x"], weight, arguments["bias"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(2, 65), "expected 64 columns"),
        ("x", torch.zeros(2, 64, dtype=torch.float64), "x: expected"),
        ("weight", torch.zeros(4, 64), "weight: expected"),
        ("weight", torch.zeros(256, dtype=torch.uint8).view(FP8), r"weight: expected \[N, K\]"),
        ("weight", torch.zeros(64, 4, dtype=torch.uint8).view(FP8).t(), "weight: "),
        ("scale", torch.zeros(3), r"scale: expected \[4, 1\] or its first dimension, got"),
        ("scale", torch.zeros(4, 1, dtype=torch.float16), "scale: expected"),
        ("bias", torch.zeros(5), "bias: "),
        ("out", torch.zeros(2, 5), "out: expected"),
        ("out", torch.zeros(2, 4, dtype=torch.float16), "out: expected"),
        ("block", (0, -1), r"block\[0\]: expected at least 1, or -1 for all, got 0"),
        ("block", (1, -2), r"block\[1\]: expected at least 1, or -1 for all, got -2"),
        ("block", 128, r"block: expected rows and columns below 2\^31, -1 for all, got 128"),
    ],
)
def test_refused(name: str, value: object, message: str) -> None:
    arguments, _ = problem(2, 4, 64, (1, -1), torch.float32, "cpu")
    with pytest.raises(ValueError, match=rf"epiloq\.fp8_weight_mm: .*{message}"):
        epiloq.fp8_weight_mm(**{**arguments, name: value})
