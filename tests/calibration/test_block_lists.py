"""Models with several lists of blocks, such as detectors: what says which lists there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn

from command_line import ROUND, run
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.quantize import Grid
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from tiny_teacher import save, tiny_model

RTN = ("--scheme", "w4a16-g32", "--algorithm", "rtn")
DECODER, LISTS = "model.decoder.layers", "model.encoder.aifi (1 block)"


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RT-DETR: a backbone of convolutions, an encoder and a decoder, and heads in lists of their own."""
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, layer_type="basic", out_indices=[2, 3, 4]
    )
    sizes = {"d_model": 64, "encoder_hidden_dim": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_labels": 3}
    channels = {"encoder_in_channels": [16, 32, 32], "decoder_in_channels": [64] * 3, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 5}
    config = transformers.RTDetrConfig(backbone_config=backbone, **sizes, **channels, **heads)
    folder = tmp_path_factory.mktemp("detector") / "model"
    transformers.RTDetrForObjectDetection(config).save_pretrained(folder)
    return folder


def said(result: Any) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_every_list_of_a_detector_is_quantised(detector: Path, tmp_path: Path) -> None:
    result = run("quantize", detector, "--output", tmp_path / "out", *RTN)
    assert result.exit_code == 0 and "--blocks" not in said(result), result.output
    names = Checkpoint(tmp_path / "out").files
    assert any(name.startswith("model.encoder.encoder.0.") and name.endswith(".weight_packed") for name in names)
    assert any(name.startswith(f"{DECODER}.1.") and name.endswith(".weight_packed") for name in names)


def test_lists_that_stay_in_floating_point_are_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    text, vision = {**sizes, "num_hidden_layers": 3, "vocab_size": 64}, {**sizes, "num_hidden_layers": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision | {"image_size": 16, "patch_size": 8})
    folder = save(tmp_path / "model", transformers.CLIPModel(config))
    note = "only text_model.encoder.layers is quantised; --blocks NAME takes another list instead: "
    result = run("quantize", folder, "--output", tmp_path / "out", *RTN)
    assert result.exit_code == 0 and f"{note}vision_model.encoder.layers (2 blocks)" in said(result), result.output
    chosen = run("quantize", folder, "--output", tmp_path / "other", *RTN, "--blocks", "vision_model.encoder.layers")
    assert chosen.exit_code == 0 and "takes another list" not in said(chosen), chosen.output


def test_a_list_that_is_not_there(detector: Path, tmp_path: Path) -> None:
    result = run("quantize", detector, "--output", tmp_path / "out", *RTN, "--blocks", "decoder.layers")
    assert result.exit_code == 2
    assert f"got 'decoder.layers'; those with layers to quantise: {DECODER} (2 blocks), {LISTS}" in said(result)


def test_language_models_have_no_such_note(tmp_path: Path) -> None:
    result = run("quantize", save(tmp_path / "model", tiny_model(**ROUND)), "--output", tmp_path / "out", *RTN)
    assert result.exit_code == 0 and "--blocks" not in said(result), result.output


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    sizes = {
        "d_model": 64,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **layers))
    (tmp_path / "text.txt").write_text("a b c")
    chosen = ("--scheme", "w4a16-g32", "--calibration", tmp_path / "text.txt")
    result = run("quantize", save(tmp_path / "model", model), "--output", tmp_path / "out", *chosen)
    assert result.exit_code == 2
    assert "one list with --blocks" in said(result)
    assert "model.decoder.layers (2 blocks), model.encoder.layers (1 block)" in said(result)


class Towers(nn.Module):
    """Two lists of blocks; the first and larger one is no chain, or shares its blocks."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        first = nn.Linear(32, 32)
        self.wide = nn.ModuleList([first, first if shares else nn.Linear(32, 32), nn.Linear(32, 32)])
        self.narrow = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.one_hot(ids, 32).float()
        for block in self.wide:
            x = 2 * block(x)
        for block in self.narrow:
            x = block(x)
        return x


@pytest.mark.parametrize("shares", [True, False])
def test_lists_instead_of_one_that_cannot_be_calibrated(seed: int, shares: bool) -> None:
    model, windows = Towers(shares), [torch.randint(0, 32, (1, 16))]
    with pytest.raises(
        ValueError, match=r"wide.*; name another list by epiloq quantize --blocks.*: narrow \(2 blocks\)"
    ):
        list(calibrate(model, windows, Grid(4, 32), ALGORITHMS["gptq"]))
    list(calibrate(model, windows, Grid(4, 32), ALGORITHMS["gptq"], blocks="narrow"))


def test_no_other_list(seed: int) -> None:
    model = Towers(shares=False)
    del model.narrow
    model.narrow = ()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"expected a chain.* \(wide\); epiloq\.quantize_ and save_pretrained"):
        list(calibrate(model, [torch.randint(0, 32, (1, 16))], Grid(4, 32), ALGORITHMS["gptq"]))
