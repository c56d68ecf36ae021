"""Which kernel multiplies experts of packed weights, by which tile, and in how many slices of K, without a GPU."""

from __future__ import annotations

import re

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
        return _core.explain_grouped_weight_only_mm(*tensors, "int", bits, experts * n, k, 128)


def choice(experts: int, n: int, k: int, rows: int, arch: str = "sm90") -> tuple[int, int]:
    """Tokens of a tile, and slices of K."""
    text = explained(experts, n, k, rows, arch)
    found = re.search(r"x (\d+) tokens, .*split-K (\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("experts", "n", "k", "rows", "expected"),
    [
        # CTAs of 128 weight rows by a tile, on 132 SMs with four each.
        (128, 1536, 2048, 8, (8, 4)),  # 96: five slices would fit, of which 16 K steps make four
        (8, 4096, 7168, 8, (8, 2)),  # 256
        (8, 28672, 4096, 2, (8, 2)),  # 448: four on some SMs, and halves make seven
        (8, 32768, 4096, 2, (8, 1)),  # 512: four on most
        (8, 17408, 4096, 2, (8, 2)),  # 272: three on few, and halves make five
        (8, 25344, 4096, 2, (8, 1)),  # 396: three on each
        (8, 28672, 4096, 16, (8, 1)),  # 1792: CTAs follow each other
        (8, 28672, 896, 2, (8, 1)),  # seven K steps are too few for two slices
    ],
)
def test_slices_of_k(experts: int, n: int, k: int, rows: int, expected: tuple[int, int]) -> None:
    assert choice(experts, n, k, rows) == expected


def test_older_architectures_do_not_split() -> None:
    for sizes in ((128, 1536, 2048, 8), (8, 28672, 4096, 2)):
        assert choice(*sizes, arch="sm80") == (8, 1)


@pytest.mark.parametrize(
    ("rows", "bits", "scale", "arch", "expected"),
    [
        (5, 4, torch.float16, "sm90", "grouped mma.sync"),
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
