"""Small-M tiles on an SM90 GPU against float64: of each width, several to a CTA, split-K over two CTAs."""

from __future__ import annotations

import pytest
import torch

import epiloq
from tile_products import EPILOGUES, PRODUCTS, groups, only_its_own

pytestmark = pytest.mark.gpu

# N, K. Partial tiles in N; the tile with more stages of weights than of tokens, two per CTA, with nine K steps each;
# four tiles per CTA, with an odd number of K steps.
SIZES = [(4096, 640), (6152, 576), (7168, 2320), (8192, 1040), (14336, 1040), (14344, 1040), (28680, 272)]
# N, K with so few tiles that two CTAs split K; an odd number of K steps in all but one. The last also for M >= 65.
SPLIT = [(40, 3216), (1032, 528), (1032, 2320), (2112, 7184), (3080, 4112), (3424, 8208), (4096, 14464)]


@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("m", [1, 7, 15, 18, 64])
def test_partial_warps(seed: int, kind: str, m: int) -> None:
    for n, k in SIZES:
        only_its_own(EPILOGUES[kind], (m, n, k), 8, 8)


@pytest.mark.parametrize("m", [1, 18, 64])
def test_outputs_off_16_bytes(seed: int, m: int) -> None:
    for n, k in SIZES + SPLIT:
        only_its_own(groups, (m, n, k), 8, 3)


@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("m", [1, 8, 9, 17, 33, 64, 65, 127])
def test_split_k_over_two_ctas(seed: int, kind: str, m: int) -> None:
    kernels = {only_its_own(EPILOGUES[kind], (m, n, k), 8, 8) for n, k in SPLIT}
    tiles = {kernel.split(" weights")[0] for kernel in kernels if "K over clusters of 2" in kernel}
    few, many = (2, 1) if kind == "a scale a column" else (4, 2)
    assert len(tiles) >= (few if m <= 64 else many), kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_split_k_over_two_ctas_with_other_outputs(seed: int, dtype: torch.dtype) -> None:
    for m, (n, k) in ((m, size) for m in (1, 50, 100) for size in SPLIT):
        kernel = only_its_own(groups, (m, n, k), 8, 8, dtype)
        assert "K over clusters of 2" in kernel or m > 64


@pytest.mark.parametrize("kind", PRODUCTS)
def test_consecutive_split_k_products(seed: int, kind: str) -> None:
    """Each begins while the preceding one still exchanges its partial sums."""
    sizes = [(3, 2112, 2320), (64, 1032, 2320), (100, 4096, 14464), (64, 2112, 2320)]
    for _ in range(3):
        for size in sizes:
            only_its_own(PRODUCTS[kind], size, 0, 0)


def test_experts_use_no_split_k(seed: int) -> None:
    sizes = {"m": 4, "n": 512, "k": 4096, "arch": "sm90", "sm_count": 132}
    assert "K over clusters of 2" in epiloq.explain("groupwise_mm", **sizes)
    assert "K over" not in epiloq.explain("grouped_mm", **sizes, experts=1)
