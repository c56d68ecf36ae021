"""Directories in floating point whose config.json describes quantised layers, as merged and dequantised models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="models of transformers need the extra hf")

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from command_line import run
from epiloq.formats.io.model import from_directory
from epiloq.formats.layouts.base import FormatError
from opened_models import logits
from tiny_mixtures import gpt_oss
from tiny_mixtures import logits as logits_of_mixture

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")

_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: foreign.TOOLS[name][1] for name in ("gptq", "awq", "pack-quantized", "float-quantized", "fp8")},
    "all ignored": foreign.TOOLS["pack-quantized"][1] | {"ignore": ["re:.*"]},
    "a quantised cache alone": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "format": "dense",
        "kv_cache_scheme": _CACHE,
    },
    "bitsandbytes int8": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["model"]},
    "bitsandbytes nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model"]},
}
UNUSED = "config.json describes quantised layers, but the files have none"


def in_floating_point(folder: Path, config: dict[str, Any], model: Any | None = None) -> Any:
    return foreign.write_as(folder, model or foreign.llama(), lambda name, linear: None, config, shards=1)


@pytest.mark.filterwarnings("ignore:.*key-value cache")
@pytest.mark.parametrize("name", CONFIGS)
def test_opened_in_floating_point(seed: int, tmp_path: Path, name: str) -> None:
    """With a warning, and saved without the description, so that it opens everywhere."""
    exact = in_floating_point(tmp_path / "in", CONFIGS[name])
    for number, open_it in enumerate((type(exact).from_pretrained, from_directory)):
        with pytest.warns(UserWarning, match=f"the model is in floating point: {UNUSED}"):
            model = open_it(tmp_path / "in")
        assert torch.equal(logits(model), logits(exact))
        assert getattr(model, "hf_quantizer", None) is None
        model.save_pretrained(tmp_path / f"{number}")
        assert "quantization_config" not in json.loads((tmp_path / f"{number}" / "config.json").read_text())
        assert torch.equal(logits(type(exact).from_pretrained(tmp_path / f"{number}")), logits(exact))


def test_stacked_experts_in_floating_point(seed: int, tmp_path: Path) -> None:
    """GPT-OSS as after dequantisation."""
    exact = in_floating_point(tmp_path / "in", CONFIGS["mxfp4"], gpt_oss())
    for open_it in (type(exact).from_pretrained, from_directory):
        with pytest.warns(UserWarning, match=UNUSED):
            model = open_it(tmp_path / "in")
        assert torch.equal(logits_of_mixture(model), logits_of_mixture(exact))


@pytest.mark.filterwarnings(f"ignore:.*{UNUSED}")
def test_commands(seed: int, tmp_path: Path) -> None:
    in_floating_point(tmp_path / "in", CONFIGS["gptq"])
    result = run("inspect", tmp_path / "in")
    assert result.exit_code == 0 and "LlamaForCausalLM, in floating point" in result.output
    result = run("convert", tmp_path / "in", tmp_path / "out", "--format", "epiloq")
    assert result.exit_code == 2 and "got one in floating point; use epiloq quantize" in result.output
    result = run("quantize", tmp_path / "in", "--output", tmp_path / "out", "--scheme", "w8a16", "--algorithm", "rtn")
    reported = " ".join(result.output.split())
    assert result.exit_code == 2 and f"{UNUSED}: expected a config.json without quantization_config" in reported


@pytest.mark.parametrize("tool", ["fp8", "float-quantized", "int-quantized"])
def test_weights_without_scales_are_refused(seed: int, tmp_path: Path, tool: str) -> None:
    pack, config = foreign.TOOLS[tool]

    def weight_alone(name: str, linear: torch.nn.Linear) -> foreign.Layer:
        tensors, weight = pack(linear)
        return {"weight": tensors["weight"]}, weight

    exact = foreign.write_as(tmp_path / "in", foreign.llama(), weight_alone, config, shards=1)
    for open_it in (type(exact).from_pretrained, from_directory):
        with pytest.raises(FormatError, match=r"proj\.weight: (F8_E4M3|I8): expected scales beside it"):
            open_it(tmp_path / "in")


def test_transforms_of_float_weights_are_refused(tmp_path: Path) -> None:
    """What a description says beside the layers changes the computation all the same."""
    transforms = {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}}
    exact = in_floating_point(tmp_path / "in", CONFIGS["a quantised cache alone"] | transforms)
    for open_it in (type(exact).from_pretrained, from_directory):
        with pytest.raises(FormatError, match="transform_config: expected none"):
            open_it(tmp_path / "in")
