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
from command_line import run
from epiloq import quantize_
from epiloq.formats.io.model import from_directory
from opened_models import layers

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
