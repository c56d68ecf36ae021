"""``epiloq quantize`` on families whose files or blocks are unlike most: what it writes reopens with every tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="models of transformers need the extra hf, the command line the extra cli")

import transformers

import epiloq.integrations.transformers as integration
from command_line import letters, run
from epiloq import quantize_
from epiloq.formats.io.model import from_directory
from opened_models import layers
from tiny_teacher import save

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def videomae() -> tuple[Any, Tensor]:
    """Files call the biases of query and value q_bias and v_bias, beside the layers rather than in them."""
    config = transformers.VideoMAEConfig(
        intermediate_size=64, image_size=32, patch_size=16, num_frames=4, num_labels=4, **SIZES
    )
    return transformers.VideoMAEForVideoClassification(config), torch.randn(1, 4, 3, 32, 32)


def mgp_str() -> tuple[Any, Tensor]:
    """The blocks are in a Sequential."""
    config = transformers.MgpstrConfig(
        image_size=[32, 32],
        max_token_length=5,
        num_character_labels=20,
        num_bpe_labels=20,
        num_wordpiece_labels=20,
        **SIZES,
    )
    return transformers.MgpstrForSceneTextRecognition(config), torch.randn(1, 3, 32, 32)


FAMILIES: dict[str, Callable[[], tuple[Any, Tensor]]] = {"videomae": videomae, "mgp-str": mgp_str}


def with_images(kind: str, **more: Any) -> Any:
    """CLIP or BLIP, of text and images."""
    vision = {**SIZES, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    text = {**SIZES, "intermediate_size": 64, "vocab_size": 256, **more}
    return getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)


def clip() -> Any:
    return transformers.CLIPModel(with_images("CLIP"))


def blip() -> Any:
    return transformers.BlipForConditionalGeneration(with_images("Blip", encoder_hidden_size=64))


def vit() -> Any:
    config = transformers.ViTConfig(intermediate_size=64, image_size=16, patch_size=8, **SIZES)
    return transformers.ViTForImageClassification(config)


def wav2vec2() -> Any:
    convolutions = {"conv_dim": (32, 32), "conv_kernel": (3, 3), "conv_stride": (2, 2)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    config = transformers.Wav2Vec2Config(intermediate_size=64, vocab_size=256, **convolutions, **positions, **SIZES)
    return transformers.Wav2Vec2ForCTC(config)


def multiple_choice() -> Any:
    """Runs on text, but with a dimension more."""
    return transformers.BertForMultipleChoice(transformers.BertConfig(intermediate_size=64, vocab_size=256, **SIZES))


def bart() -> Any:
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    widths = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 256}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**layers, **widths))


def calibrated(folder: Path, model: Any, *options: object) -> Any:
    """``epiloq quantize`` by an algorithm that runs the model on text."""
    save(folder / "model", model)
    (folder / "text.txt").write_text(letters(600))
    text = ("--calibration", folder / "text.txt", "--windows", 16, "--length", 16)
    return run("quantize", folder / "model", "--scheme", "w4a16-g32", "--output", folder / "out", *text, *options)


BESIDE_TEXT: dict[str, tuple[Callable[[], Any], str]] = {
    "clip": (clip, "CLIPModel cannot be run on text alone"),
    "multiple choice": (multiple_choice, "BertForMultipleChoice cannot be run on text alone"),
    "vit": (vit, "ViTForImageClassification runs on pixel_values"),
    "blip": (blip, "BlipForConditionalGeneration runs on pixel_values"),
    "wav2vec2": (wav2vec2, "Wav2Vec2ForCTC runs on input_values"),
}


@pytest.mark.parametrize("name", BESIDE_TEXT)
def test_models_that_need_more_than_text_are_not_calibrated(seed: int, tmp_path: Path, name: str) -> None:
    make, message = BESIDE_TEXT[name]
    result = calibrated(tmp_path, make())
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and message in said and "--algorithm rtn" in said, result.output
    assert not (tmp_path / "out").exists()
    assert calibrated(tmp_path, make(), "--algorithm", "rtn").exit_code == 0


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_encoders_and_decoders_are_calibrated_alone(seed: int, tmp_path: Path, part: str) -> None:
    """As the message that refuses both says."""
    result = calibrated(tmp_path, bart(), "--blocks", f"model.{part}.layers")
    assert result.exit_code == 0, result.output
    found = layers(transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "out"))
    assert found and all(name.startswith(f"model.{part}.layers.") for name in found)


def test_guided_layers_that_do_not_read_the_blocks_are_named(seed: int, tmp_path: Path) -> None:
    result = calibrated(tmp_path, bart(), "--blocks", "model.decoder.layers", "--algorithm", "gptq-guided")
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and "encoder_attn.k_proj: expected each token" in said, result.output


@pytest.mark.parametrize("make", [bart, blip])
def test_models_without_a_perplexity_are_not_evaluated(seed: int, tmp_path: Path, make: Callable[[], Any]) -> None:
    save(tmp_path / "model", make())
    (tmp_path / "text.txt").write_text(letters(600))
    result = run("eval", tmp_path / "model", "--text", tmp_path / "text.txt", "--length", 16)
    assert result.exit_code == 2 and "expected a causal language model" in " ".join(result.output.split())


OWN_CONFIG = """
from transformers import PreTrainedConfig
class OwnConfig(PreTrainedConfig):
    model_type = "own_of_a_directory"
"""
OWN_MODEL = """
from torch import nn
from transformers import PreTrainedModel
from .configuration_own import OwnConfig
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.post_init()
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x
"""


@torch.no_grad()
def output(model: Any, pixels: Tensor) -> Tensor:
    found = model.eval()(pixels).logits
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
def test_written_and_reopened(seed: int, tmp_path: Path, name: str, scheme: str) -> None:
    model, pixels = FAMILIES[name]()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)  # biases of zeros would hide their loss
    model.eval().save_pretrained(tmp_path / "float")
    result = run("quantize", tmp_path / "float", "--algorithm", "rtn", "--scheme", scheme, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = type(model).from_pretrained(tmp_path / "out")
    for layer, module in layers(found).items():  # the float model with its own biases and the written weights
        model.get_submodule(layer).weight.data = module.dequantized_weight()
    values, expected = output(found, pixels), output(model, pixels)
    assert layers(found) and _distance(values, expected) < (1e-4 if scheme == "w4a16-g32" else 0.1)
    # Convolutions may differ in the last digit, and by it the quantised activations.
    assert _distance(output(from_directory(tmp_path / "out"), pixels), values) < 0.02


def _distance(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).norm() / expected.norm())


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
def test_code_from_a_directory(seed: int, tmp_path: Path, scheme: str) -> None:
    """Run by transformers if trusted; the command never does, and says what to type."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "configuration_own.py").write_text(OWN_CONFIG)
    (folder / "modeling_own.py").write_text(OWN_MODEL)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    written = {"model_type": "own_of_a_directory", "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(written))
    result = run("quantize", folder, "--algorithm", "rtn", "--scheme", scheme, "--output", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = quantize_(transformers.AutoModel.from_config(config, trust_remote_code=True).eval(), scheme)
    x = torch.randn(3, 64)
    model.save_pretrained(tmp_path / "out")
    again = transformers.AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert layers(again).keys() == {"blocks.0", "blocks.1"} and torch.equal(again(x), model(x))
    result = run("inspect", tmp_path / "out", "--check")
    assert result.exit_code == 2 and "trust_remote_code=True" in " ".join(result.output.split())
