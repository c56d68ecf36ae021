"""Which tile multiplies experts of packed weights, and in how many slices of K, without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

import epiloq
from epiloq import _core


def choice(experts: int, n: int, k: int, rows: int, arch: str = "sm90") -> tuple[int, int]:
    """Tokens of a tile, and slices of K."""
    q = torch.empty(experts * n // 16, -(-k // 128) * 2, 32, 16, dtype=torch.uint8)
    scale = torch.empty(experts * n // 16, -(-k // 128), 16, dtype=torch.float16)
    x, out = torch.empty(rows, k, dtype=torch.float16), torch.empty(rows, n, dtype=torch.float16)
    counts = torch.zeros(experts, dtype=torch.int32)
    tensors = (out, x, q, scale, None, None, None, None, counts, False)
    with epiloq.config(arch=arch):
        text = _core.explain_grouped_weight_only_mm(*tensors, "int", 4, experts * n, k, 128)
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
        (2, 17408, 4096, 64, (32, 1)),  # limited by arithmetic
    ],
)
def test_slices_of_k(experts: int, n: int, k: int, rows: int, expected: tuple[int, int]) -> None:
    assert choice(experts, n, k, rows) == expected


def test_older_architectures_do_not_split() -> None:
    for sizes in ((128, 1536, 2048, 8), (8, 28672, 4096, 2)):
        assert choice(*sizes, arch="sm80") == (8, 1)
