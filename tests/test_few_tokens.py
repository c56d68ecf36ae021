"""Tiles of few tokens on an SM90 GPU against float64: of each width, several to a block, every epilogue."""

from __future__ import annotations

import pytest

from tile_products import EPILOGUES, groups, only_its_own

pytestmark = pytest.mark.gpu

# Ragged rows of weights; the tile with more stages of weights than of tokens, two to a block, of nine steps each.
SIZES = [(4096, 640), (6152, 576), (7168, 2320), (8192, 1040), (14336, 1040), (14344, 1040), (1032, 2320)]


@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("m", [1, 7, 15, 18, 64])
def test_rows_that_fill_no_warp(seed: int, kind: str, m: int) -> None:
    for n, k in SIZES:
        only_its_own(EPILOGUES[kind], (m, n, k), 8, 8)


@pytest.mark.parametrize("m", [1, 18, 64])
def test_outputs_off_16_bytes(seed: int, m: int) -> None:
    for n, k in SIZES:
        only_its_own(groups, (m, n, k), 8, 3)
