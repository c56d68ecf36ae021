"""Models whose initialisation in transformers reads weights, which packed layers do not have, opened by it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

import epiloq.integrations.transformers as integration
from epiloq.formats import convert, epiloq_modules
from epiloq.models.parent_reads import initialisation_reads
from epiloq.schemes import quantize_
from more_families import MORE, answer, inputs

# Other tests want transformers as it is.
integration.unregister()

READING = ("falcon", "bigcode", "t5", "mamba", "modernbert", "siglip", "rwkv")
GUARDED = ("llama", "opt", "bert", "gemma3n")


def gemma3() -> Any:
    """Gemma 3 with images, whose tower is SigLIP's."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 128, "num_key_value_heads": 2, "head_dim": 8}
    ids = {"image_token_index": 127, "boi_token_index": 126, "eoi_token_index": 125, "mm_tokens_per_image": 4}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, **ids)
    )


def described(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]  # type: ignore[no-any-return]


def exported(model: Any, scheme: str, folder: Path) -> Path:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    epiloq_modules.save(quantize_(model, scheme), folder / "epiloq")
    convert.perform(convert.prepare(folder / "epiloq", folder / "out", "compressed-tensors"))
    return folder / "out"


@pytest.mark.filterwarnings("ignore:quantize_. left in floating point")
@pytest.mark.parametrize("family", [*READING, *GUARDED])
def test_stock_transformers_opens_packed_layers(seed: int, tmp_path: Path, family: str) -> None:
    model = MORE[family]().eval()
    folder = exported(model, "w8a16", tmp_path)
    assert described(folder).get("dequantize", False) == (family in READING)
    given = inputs(family)
    theirs = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(answer(theirs, given), answer(model, given), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:quantize_. left in floating point")
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-mxfp4", "w4a16-nvfp4", "fp8-token", "w8a8-int8"])
def test_a_tower_inside_another_model(seed: int, tmp_path: Path, scheme: str) -> None:
    """Only layouts without a tensor named weight are dequantised: the others keep their activations in 8 bits."""
    dtype = torch.bfloat16 if "fp4" in scheme else torch.float32
    model = gemma3().eval().to(dtype)
    folder = exported(model, scheme, tmp_path)
    assert described(folder).get("dequantize", False) == (scheme in ("w8a16", "w4a16-mxfp4", "w4a16-nvfp4"))
    theirs = type(model).from_pretrained(folder, dtype=dtype).eval()
    given = {
        "input_ids": torch.tensor([[2, 3, 4, 127, 127, 127, 127, 5]]),
        "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0]]),
        "pixel_values": torch.randn(1, 3, 32, 32, dtype=dtype),
    }
    found, expected = answer(theirs, given), answer(model, given)
    coarse = dtype == torch.bfloat16 or scheme == "w8a8-int8"
    assert float((found - expected).norm() / expected.norm()) < (0.03 if coarse else 1e-5)


@pytest.mark.filterwarnings("ignore:quantize_. left in floating point")
def test_several_groups_are_warned_of(tmp_path: Path) -> None:
    """transformers would dequantise all of them by one group's description."""
    model = quantize_(quantize_(MORE["t5"](), "w8a16", ignore=["encoder"]), "w4a16-g32")
    epiloq_modules.save(model, tmp_path / "epiloq")
    with pytest.warns(UserWarning, match="cannot open several groups of this model.*use one scheme"):
        convert.perform(convert.prepare(tmp_path / "epiloq", tmp_path / "out", "compressed-tensors"))
    assert "dequantize" not in described(tmp_path / "out")


def test_only_the_layers_that_are_packed_count(seed: int) -> None:
    model = MORE["siglip"]()
    assert initialisation_reads(model, ["vision_model.encoder.layers.0.mlp.fc1"])
    assert not initialisation_reads(model, [])
    assert not initialisation_reads(torch.nn.Sequential(torch.nn.Linear(8, 8)), ["0"])


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a16", "fp8-token"])
def test_the_base_model_of_one_without_its_pooler(seed: int, tmp_path: Path, scheme: str) -> None:
    """``AutoModel`` has a pooler, which a model for masked tokens has not: transformers initialises it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=99, **sizes)).eval()
    folder = exported(model, scheme, tmp_path)
    base, ids = transformers.AutoModel.from_pretrained(folder).eval(), torch.arange(1, 9)[None]
    found, expected = (each(ids).last_hidden_state.detach() for each in (base, model.bert))
    assert float((found - expected).norm() / expected.norm()) < (1e-5 if scheme == "w8a16" else 0.02)
    assert type(base.pooler.dense) is torch.nn.Linear and base(ids).pooler_output.isfinite().all()
