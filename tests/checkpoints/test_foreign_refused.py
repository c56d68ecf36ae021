"""Directories of other tools whose descriptions or tensors do not agree, or are of kinds that epiloq does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import foreign_checkpoints as foreign
import foreign_layers
import foreign_variants as variants
from epiloq.formats.io import model as models


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack_dtype": "int16"}, "pack_dtype: expected int32 .*got 'int16'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format: expected one of gptq, gptq_v2, got 'marlin'"),
        ({"bits": 5}, "bits: expected"),
    ],
)
def test_what_gptq_packs_otherwise(seed: int, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    pack, config = variants.VARIANTS["gptq without g_idx"]
    foreign.write_as(tmp_path / "in", foreign.llama(), pack, config | change)
    with pytest.raises(ValueError, match=message):
        models.from_directory(tmp_path / "in")


def test_exponents_that_are_none(seed: int, tmp_path: Path) -> None:
    """E8M0's last byte is NaN."""

    def pack(name: str, linear: nn.Linear) -> foreign.Layer:
        parts, weight = foreign_layers.mxfp8(name, linear)
        parts["weight_scale_inv"][0, 0] = 255
        return parts, weight

    foreign.write_as(tmp_path / "in", foreign.llama(), pack, variants.VARIANTS["mxfp8"][1])
    with pytest.raises(ValueError, match="weight_scale_inv: expected finite numbers, got NaN"):
        models.from_directory(tmp_path / "in")


def test_blocks_that_mxfp8_does_not_have(seed: int, tmp_path: Path) -> None:
    config = variants.VARIANTS["mxfp8"][1] | {"weight_block_size": [128, 128]}
    foreign.write_as(tmp_path / "in", foreign.llama(), foreign_layers.mxfp8, config)
    with pytest.raises(ValueError, match=r"weight_block_size: expected \[1, 32\] with mxfp8"):
        models.from_directory(tmp_path / "in")


def test_an_order_that_is_missing(seed: int, tmp_path: Path) -> None:
    pack, config = variants.VARIANTS["gptq without g_idx"]
    foreign.write_as(tmp_path / "in", foreign.llama(), pack, config | {"desc_act": True})
    with pytest.raises(ValueError, match=r"g_idx: expected a tensor with desc_act, found none"):
        models.from_directory(tmp_path / "in")


def test_zero_points_of_a_symmetric_group_that_are_some(seed: int, tmp_path: Path) -> None:
    pack, config = variants.VARIANTS["zero points of a symmetric group"]

    def wrong(name: str, linear: nn.Linear) -> foreign.Layer | None:
        packed = pack(name, linear)
        assert packed is not None
        packed[0]["weight_zero_point"][0, 0] = 1
        return packed

    foreign.write_as(tmp_path / "in", foreign.llama(), wrong, config)
    with pytest.raises(ValueError, match="weight_zero_point: expected zeros of a symmetric layer"):
        models.from_directory(tmp_path / "in")
