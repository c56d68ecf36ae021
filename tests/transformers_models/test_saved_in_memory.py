"""A model of transformers that `quantize_` changed in memory opens as it was saved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints
from epiloq.formats.io.model import from_directory

WEIGHT_ONLY = ["w8a16", "w4a16", "w4a16-g32"]
SCHEMES = ["w8a8-int8", "fp8-token", "fp8-block", "w4a8-fp8", "w4a8-mxfp4-fp8", "w4a8-block", *WEIGHT_ONLY]


def model_of(tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(24).view(2, 12)).logits


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_directories_open(scheme: str, tmp_path: Path) -> None:
    model = epiloq.quantize_(model_of(), scheme)
    found = logits(model)
    model.save_pretrained(tmp_path)
    message = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert message["format"] == "epiloq"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), found)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_heads_and_a_second_scheme(tmp_path: Path) -> None:
    model = epiloq.quantize_(model_of(tied=True), None, head="w8a16")
    epiloq.quantize_(model, "w8a8-int8", ignore="*.o_proj")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def gemma3() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 16}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **heads))


def shieldgemma2() -> Any:
    """Its files name layers otherwise than the model."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = transformers.ShieldGemma2Config(
        text_config=gemma3().config.to_dict(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        yes_token_index=5,
        no_token_index=6,
        **tokens,
    )
    return transformers.ShieldGemma2ForImageClassification(config)


def mbart() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "scale_embedding": True, "vocab_size": 96}
    return transformers.MBartForConditionalGeneration(transformers.MBartConfig(**sizes, **heads))


@pytest.mark.parametrize("make", [gemma3, shieldgemma2, mbart])
def test_embeddings_that_scale_their_rows(make: Callable[[], Any], seed: int, tmp_path: Path) -> None:
    """Found out by running them, which transformers' own defaults must not disturb."""
    model = epiloq.quantize_(make().eval(), "w8a16", embedding="w8a16")
    given: dict[str, torch.Tensor] = {"input_ids": torch.arange(3, 19)[None]}
    if make is shieldgemma2:
        given["input_ids"][0, 2:6] = 90
        given["pixel_values"] = torch.randn(1, 3, 28, 28)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**given).logits
        for again in (type(model).from_pretrained(tmp_path), from_directory(tmp_path)):
            assert any(isinstance(module, epiloq.nn.QuantizedEmbedding) for module in again.modules())
            assert torch.equal(again(**given).logits, expected)


@pytest.mark.slow
def test_importing_registers_nothing() -> None:
    code = """
import torch, transformers, epiloq
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
before = dict(AUTO_QUANTIZER_MAPPING)
config = transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=16)
epiloq.quantize_(transformers.LlamaForCausalLM(config), "w8a8-int8")
print(dict(AUTO_QUANTIZER_MAPPING) == before)
"""
    message = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=600, capture_output=True, text=True
    ).stdout
    assert message.split()[-1] == "True"


@pytest.mark.slow
def test_an_import_after_quantising_registers(tmp_path: Path) -> None:
    """As README has it: the package is imported for the first time after a model was quantised in memory."""
    model_of().save_pretrained(tmp_path / "float")
    code = """
import sys, transformers, epiloq
model = epiloq.quantize_(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/float"), "w8a16")
model.save_pretrained(sys.argv[1] + "/w8")
import epiloq.integrations.transformers
again = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/w8")
print(type(again.model.layers[0].mlp.up_proj).__name__)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    message = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True).stdout
    assert message.split()[-1] == "WeightOnlyLinear"


@pytest.mark.parametrize("tool", ["gptq in activation order", "awq"])
def test_what_from_directory_returns(seed: int, tmp_path: Path, tool: str) -> None:
    """Saved as epiloq's format, whatever the directory's was, and not without a description."""
    foreign_checkpoints.write(tmp_path / "model", foreign_checkpoints.llama(), tool, shards=1)
    model = from_directory(tmp_path / "model")
    model.save_pretrained(tmp_path / "again")
    for again in (
        from_directory(tmp_path / "again"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"),
    ):
        assert torch.equal(logits(again), logits(model))


def test_what_a_gguf_file_contains(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    gguf_files = pytest.importorskip("gguf_files")
    from epiloq.formats.io import gguf_model

    kinds = {"attn_q": "Q4_K", "ffn_down": "Q6_K", "ffn_": "Q4_0", "token_embd": "Q8_0"}
    gguf_files.write(tmp_path / "tiny.gguf", gguf_files.reference("llama"), "llama", kinds)
    model = gguf_model.load(tmp_path / "tiny.gguf")
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
