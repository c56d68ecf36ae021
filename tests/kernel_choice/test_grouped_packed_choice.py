"""Which kernel multiplies experts of packed weights, by which tile, and in how many slices of K, without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import epiloq
from epiloq import _core


def explained(
    experts: int,
    n: int,
    k: int,
    rows: int,
    arch: str = "sm90",
    bits: int = 4,
    scale: torch.dtype = torch.float16,
    masked: bool = False,
) -> str:
    q = torch.empty(experts * n // 16, -(-k // 128) * bits // 2, 32, 16, dtype=torch.uint8)
    scales = torch.empty(experts * n // 16, -(-k // 128), 16, dtype=scale)
    shape = (experts, rows // experts) if masked else (rows,)
    x, out = torch.empty(*shape, k, dtype=torch.float16), torch.empty(*shape, n, dtype=torch.float16)
    counts = torch.zeros(experts, dtype=torch.int32)
    tensors = (out, x, q, scales, None, None, None, None, counts, masked)
    with epiloq.config(arch=arch):
        return _core.explain_grouped_packed_mm(*tensors, "int", bits, experts * n, k, 128)


def choice(experts: int, n: int, k: int, rows: int, arch: str = "sm90") -> tuple[int, int]:
    """Tokens of a tile, and slices of K, with scales of a type that the persistent kernel for few tokens lacks."""
    text = explained(experts, n, k, rows, arch, scale=torch.float32)
    found = re.search(r"x (\d+) tokens, .*split-K (\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("experts", "n", "k", "rows", "expected"),
    [
        # CTAs of 128 weight rows by a tile, on 132 SMs with four each; the K steps of the SM with the most CTAs.
        (128, 1536, 2048, 9, (8, 8)),  # 108: eighths follow each other, 6.5 of 2, rather than four of 4
        (8, 4096, 7168, 8, (8, 4)),  # 256: two of 56; quarters follow each other, 7.8 of 14
        (8, 28672, 4096, 2, (8, 2)),  # 448: four of 32 on some SMs; halves follow each other, 6.8 of 16
        (8, 32768, 4096, 2, (8, 2)),  # 512: four of 32, 7.8 of 16
        (8, 17408, 4096, 2, (8, 2)),  # 272: three of 32 on few; halves follow each other, 4.1 of 16
        (8, 25344, 4096, 2, (8, 1)),  # 396: three of 32 on each
        (8, 28672, 4096, 16, (8, 1)),  # 1792: CTAs follow each other
        (8, 28672, 896, 2, (8, 1)),  # 448: four of 7; a prologue more would take as long
    ],
)
def test_slices_of_k(experts: int, n: int, k: int, rows: int, expected: tuple[int, int]) -> None:
    assert choice(experts, n, k, rows) == expected


def test_older_architectures_do_not_split() -> None:
    for sizes in ((128, 1536, 2048, 8), (8, 28672, 4096, 2)):
        assert choice(*sizes, arch="sm80") == (8, 1)


GEMV, SMALL_GEMV, TILES, NARROW, WIDE, WGMMA = (
    "^grouped GEMV, .*x 8 warps",
    "^grouped GEMV, .*x 4 warps",
    "^grouped sm90 mma.sync, 64 weight rows x 8 to 24 tokens",
    "^grouped sm90 mma.sync, 128 weight rows x 8 to 16 tokens",
    "^grouped sm90 mma.sync, 128 weight rows x 8 to 24 tokens",
    "^grouped sm90 wgmma, 256 weight rows x 16 to 64 tokens",
)


@pytest.mark.parametrize(
    ("format", "experts", "n", "k", "rows", "expected"),
    [
        # 132 SMs with three CTAs each of 64 rows, three of 128 rows, four with fewer tokens, or one of WGMMA's 256.
        # GEMV: 264 CTAs of 8 warps at a time, or 528 of 4, each with 32 rows, for at most 8 rows of x.
        ("int", 128, 1536, 2048, 8, SMALL_GEMV),
        ("int", 128, 2048, 768, 8, SMALL_GEMV),  # 498
        ("int", 128, 2176, 768, 8, TILES),  # 529
        ("int", 128, 1536, 2048, 9, TILES),
        ("int", 128, 1536, 2048, 32, WIDE),  # three quarters of a wave, where TILES needs two
        ("int", 128, 1536, 2048, 128, NARROW),
        ("int", 128, 1536, 2048, 1024, NARROW),
        ("int", 128, 1536, 2048, 1152, WGMMA),
        ("int", 8, 4096, 7168, 2, GEMV),  # 240
        ("int", 8, 4096, 7168, 4, SMALL_GEMV),  # 424
        ("int", 8, 4096, 7168, 8, TILES),
        ("int", 8, 4096, 7168, 32, WGMMA),  # 128 tiles
        ("mxfp4", 32, 5760, 2880, 4, TILES),  # 687 CTAs
        ("mxfp4", 32, 2880, 2880, 4, SMALL_GEMV),
        ("nvfp4", 8, 4096, 14336, 2, GEMV),
        ("mxfp4", 32, 5760, 2880, 8, WIDE),
        ("mxfp4", 32, 5760, 2880, 64, NARROW),
        ("mxfp4", 32, 2880, 2880, 64, WIDE),
        ("mxfp4", 32, 5760, 2880, 384, NARROW),
        ("nvfp4", 32, 5760, 2880, 416, WGMMA),
    ],
)
def test_few_tokens(format: str, experts: int, n: int, k: int, rows: int, expected: str) -> None:
    operation = "grouped_packed_mm" if format == "int" else "packed_fp4_mm"
    text = epiloq.explain(operation, m=rows, n=n, k=k, experts=experts, format=format)
    assert re.search(expected, text), text


@pytest.mark.parametrize(
    ("rows", "bits", "scale", "arch", "expected"),
    [
        (5, 4, torch.float32, "sm90", "grouped mma.sync"),
        (6, 4, torch.float16, "sm90", "x 16 to 64 tokens"),
        (96, 8, torch.float16, "sm90", "x 16 to 64 tokens"),
        (97, 4, torch.float16, "sm90", "x 64 to 256 tokens.*rounded"),
        (97, 8, torch.float16, "sm90", "x 64 to 192 tokens.*rounded"),
        (97, 4, torch.bfloat16, "sm90", "x 16 to 64 tokens"),  # scales of another type are not rounded
        (97, 4, torch.float16, "sm80", "grouped mma.sync, .*x 64 tokens"),
    ],
)
def test_many_rows(rows: int, bits: int, scale: torch.dtype, arch: str, expected: str) -> None:
    text = explained(8, 4096, 7168, 8 * rows, arch, bits, scale)
    assert re.search(expected, text), text
    assert ("rounded" in text) == ("rounded" in expected)


def test_batch_invariance_takes_one_tile() -> None:
    with epiloq.config(batch_invariant=True):
        assert "grouped mma.sync, 128 weight rows x 16 tokens" in explained(8, 4096, 7168, 8 * 97)


def test_room_for_rows_does_not_make_them_many() -> None:
    assert "x 16 to 64 tokens" in explained(8, 4096, 7168, 8 * 512, masked=True)


@pytest.mark.parametrize("operation", ["grouped_packed_mm", "packed_fp4_mm"])
@pytest.mark.parametrize(
    ("experts", "rows", "expected"),
    [
        (512, 64, "grouped sm90 wgmma"),
        (512, 1024, "grouped sm90 wgmma"),
        (513, 64, "grouped mma.sync"),
        (513, 1024, "one expert after the other"),
    ],
)
def test_more_experts_than_wgmma_counts(operation: str, experts: int, rows: int, expected: str) -> None:
    """They have mma.sync alone, and so a limit of rows."""
    assert epiloq.explain(operation, m=rows * experts, n=4096, k=7168, experts=experts).startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"masked": True}, True),
        ({"masked": True, "has_gaps": True}, False),
        ({"same_type": False}, False),
        ({"format": "mxfp4", "same_type": False}, True),
        ({"format": "mxfp4", "dtype": "float16"}, False),
        ({"format": "nvfp4", "dtype": "float16"}, True),
        ({"experts": 513}, False),
        ({"m": 2**28}, False),  # rows of all experts, which TMA addresses by 31 bits
        ({"arch": "sm80"}, False),
    ],
)
def test_which_experts_have_wgmma(options: dict[str, Any], expected: bool) -> None:
    problem = {"m": 4096, "n": 4096, "k": 7168, "experts": 8} | options
    assert _core.has_expert_wgmma(**problem) == expected


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
@pytest.mark.parametrize("bits", [4, 8])
def test_sizes_are_explained_as_tensors(seed: int, arch: str, bits: int) -> None:
    for masked in (False, True):
        experts, panels, k, rows = (int(torch.randint(1, most, ())) for most in (9, 20, 1000, 200))
        n, k, m = 16 * panels, k + -k % 8, rows if masked else experts * rows  # rows of x are 16-byte aligned
        sizes = {"m": m, "n": n, "k": k, "experts": experts, "bits": bits, "masked": masked, "dtype": "float16"}
        expected = explained(experts, n, k, experts * rows, arch, bits, masked=masked)
        assert _core.explain_grouped_packed_mm_problem(**sizes, arch=arch) == expected


@pytest.mark.parametrize(
    ("operation", "sizes", "expected"),
    [
        ("grouped_packed_mm", {"m": 4096}, "grouped sm90 wgmma, .*rounded"),
        ("grouped_packed_mm", {"m": 4096, "dtype": torch.float16, "bits": 3}, "one expert after the other: dequantise"),
        ("grouped_packed_mm", {"m": 4096, "arch": "sm80"}, "one expert after the other: dequantise"),
        ("grouped_packed_mm", {"m": 128, "arch": "sm80"}, "grouped mma.sync"),
        ("grouped_packed_mm", {"m": 64, "dtype": torch.float8_e4m3fn}, "activations as bfloat16: grouped sm90 wgmma"),
        ("grouped_packed_mm", {"m": 40960, "dtype": torch.int8}, "one expert after the other, by w4a8_mm"),
        ("grouped_packed_mm", {"m": 64, "dtype": torch.int8, "format": "mxfp4"}, "activations as bfloat16: grouped"),
        ("packed_fp4_mm", {"m": 4096}, "grouped sm90 wgmma, .* tiles of tokens at most$"),
        ("packed_fp4_mm", {"m": 40960, "dtype": torch.float16}, "one expert after the other: .*to float16, in memory"),
        ("packed_fp4_mm", {"m": 16, "experts": None}, "GEMV"),
        ("packed_fp4_mm", {"m": 300, "experts": None, "format": "nvfp4"}, "sm90 wgmma, FP4"),
        ("packed_fp4_mm", {"m": 300, "experts": None, "arch": "sm80"}, "^the weight dequantised to bfloat16"),
        ("packed_fp4_mm", {"m": 0}, "nothing to launch"),
    ],
)
def test_experts_by_sizes(operation: str, sizes: dict[str, object], expected: str) -> None:
    text = epiloq.explain(operation, **{"n": 4096, "k": 7168, "experts": 8} | sizes)
    assert re.search(expected, text), text


@pytest.mark.parametrize(
    ("operation", "sizes", "message"),
    [
        ("grouped_packed_mm", {"n": 40}, "grouped_packed_mm: n: expected a multiple of 16"),
        ("grouped_packed_mm", {"experts": 0}, "experts: expected at least 1"),
        ("grouped_packed_mm", {"format": "mxfp4"}, "dtype: expected int8 or float8_e4m3fn with FP4"),
        ("grouped_packed_mm", {"bits": 5}, "bits: expected 2, 3, 4 or 8"),
        ("packed_fp4_mm", {"n": 40}, "packed_fp4_mm: n: expected a multiple of 16"),
        ("packed_fp4_mm", {"format": "int"}, "format: expected mxfp4 or nvfp4"),
        ("packed_fp4_mm", {"dtype": torch.int8}, "dtype: expected float16, bfloat16 or float32"),
        ("packed_fp4_mm", {"experts": None, "masked": True}, "experts: expected a number with masked"),
    ],
)
def test_wrong_sizes_of_experts(operation: str, sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epiloq.explain(operation, **{"m": 8, "n": 64, "k": 64, "experts": 4} | sizes)


def test_batch_invariance_needs_a_kernel_for_fp4() -> None:
    with epiloq.config(batch_invariant=True):
        assert "x 16 tokens" in epiloq.explain("packed_fp4_mm", m=4096, n=64, k=64)
        with pytest.raises(NotImplementedError, match="bfloat16 on sm75"):
            epiloq.explain("packed_fp4_mm", m=1, n=64, k=64, arch="sm75")
