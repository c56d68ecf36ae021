"""Directories of other tools, of models whose modules read, initialise or change the weights of their parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from epiloq.formats import convert, epiloq_modules
from epiloq.formats.io.model import from_directory
from epiloq.formats.layouts.base import FormatError
from epiloq.models.parent_reads import changed_by_parents
from epiloq.nn import GatedExperts
from more_families import MORE, answer, inputs
from other_mixtures import qwen3_omni

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")
TOKENS = torch.arange(3, 27).view(2, 12)


def written(folder: Path, family: str, tool: str) -> Any:
    return foreign.write(folder, foreign.with_biases(MORE[family]().eval()), tool, shards=1)


@pytest.mark.parametrize(("scheme", "layout"), [("w8a16", "compressed-tensors"), ("fp8-block", "deepseek-fp8")])
def test_experts_that_a_parent_initialises(seed: int, tmp_path: Path, scheme: str, layout: str) -> None:
    """A matrix an expert in the files, while the block around initialises ``experts.gate_up_proj``."""
    model = epiloq.quantize_(qwen3_omni(), scheme)
    epiloq_modules.save(model, tmp_path / "own")
    convert.perform(convert.prepare(tmp_path / "own", tmp_path / "other", layout))
    found = type(model).from_pretrained(tmp_path / "other")
    experts = [module for name, module in found.named_modules() if name.endswith(".mlp.experts")]
    assert len(experts) == 2 and all(type(each) is GatedExperts for each in experts)
    with torch.no_grad():
        assert torch.equal(found(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
    found.save_pretrained(tmp_path / "again")
    assert epiloq_modules.layers_of(type(model).from_pretrained(tmp_path / "again")).keys() == (
        epiloq_modules.layers_of(model).keys()
    )


@pytest.mark.parametrize("tool", ["gptq", "pack-quantized", "int-quantized", "float-quantized", "fp8"])
def test_layers_kept_in_float32(seed: int, tmp_path: Path, tool: str) -> None:
    """transformers keeps T5's "wo" in float32 in a model of float16, and would convert FP8 weights to it, too."""
    exact, given = written(tmp_path / "in", "t5", tool), inputs("t5")
    model = type(exact).from_pretrained(tmp_path / "in", dtype=torch.float16)
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            torch.testing.assert_close(module.dequantized_weight(), exact.get_submodule(name).weight)
    found, wanted = answer(model, given), answer(exact, given)
    assert float((found - wanted).norm() / wanted.norm()) < (0.02 if tool in ("gptq", "pack-quantized") else 0.2)


@pytest.mark.parametrize("family", ["t5", "deberta"])
@pytest.mark.parametrize("tool", ["gptq", "int-quantized"])
def test_weights_that_a_parent_reads(seed: int, tmp_path: Path, family: str, tool: str) -> None:
    """Quantised weights are dequantised where a parent reads them."""
    exact, given = written(tmp_path / "in", family, tool), inputs(family)
    for model in (type(exact).from_pretrained(tmp_path / "in"), from_directory(tmp_path / "in")):
        found, wanted = answer(model, given), answer(exact, given)
        # int8 activations are off by up to 1 / 254 of the largest, in each of a few layers
        assert float((found - wanted).norm() / wanted.norm()) < (1e-5 if tool == "gptq" else 0.02)


@pytest.mark.parametrize("tool", ["pack-quantized", "int-quantized", "gptq"])
@torch.no_grad()
def test_the_output_of_torchs_attention(seed: int, tmp_path: Path, tool: str) -> None:
    """SigLIP's last attention is torch's, which reads the weight of its output projection."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.SiglipVisionConfig(image_size=32, patch_size=16, **sizes)
    exact = foreign.with_biases(transformers.SiglipVisionModel(config).eval())
    foreign.write(tmp_path / "in", exact, tool, shards=1)
    pixels = torch.randn(2, 3, 32, 32)
    for model in (type(exact).from_pretrained(tmp_path / "in"), from_directory(tmp_path / "in")):
        last = model.head.attention
        assert "head.attention.out_proj" in epiloq_modules.layers_of(model)
        assert torch.equal(last.out_proj.weight.dequantize(), exact.head.attention.out_proj.weight)
        found, wanted = (each(pixels).pooler_output for each in (model, exact))
        assert float((found - wanted).norm() / wanted.norm()) < (0.02 if tool == "int-quantized" else 1e-5)


@pytest.mark.parametrize("tool", ["gptq", "pack-quantized", "int-quantized", "fp8"])
def test_weights_that_a_model_changes_are_refused(seed: int, tmp_path: Path, tool: str) -> None:
    """RWKV divides weights when it runs first: refused when opened, not when it runs; otherwise opened."""
    exact = written(tmp_path / "in", "rwkv", tool)
    assert changed_by_parents(exact).keys() == {
        f"rwkv.blocks.{block}.{layer}" for block in (0, 1) for layer in ("attention.output", "feed_forward.value")
    }
    match = r"rwkv\.blocks\.\d\.\w+\.\w+: .*RwkvModel if self\.config\.rescale_every > 0.*config\.json"
    for open_it in (type(exact).from_pretrained, from_directory):
        with pytest.raises(FormatError, match=match):
            open_it(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"rescale_every": 0}))
    for open_it in (type(exact).from_pretrained, from_directory):
        found, wanted = (answer(model, inputs_of_rwkv()) for model in (open_it(tmp_path / "in"), exact))
        bound = 1e-5 if tool in ("gptq", "pack-quantized") else 0.15
        assert float((found - wanted).norm() / wanted.norm()) < bound


def inputs_of_rwkv() -> dict[str, torch.Tensor]:
    return {"input_ids": TOKENS}
