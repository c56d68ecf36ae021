"""Which models within a model attend by epiloq's function after `optimize_`, and which keep their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

import epiloq
from epiloq.optimize import optimize_
from epiloq.optimize.attention import NAMES
from small_models import relative

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_key_value_heads": 2, **_SIZES}


def implementations(model: Any) -> dict[str, str]:
    found = {m: m.config._attn_implementation for m in model.modules() if isinstance(m, transformers.PreTrainedModel)}
    return {type(each).__name__: name for each, name in found.items()}


def llava(**options: Any) -> Any:
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "image_size": 16, "patch_size": 8, **_SIZES}
    config = transformers.LlavaConfig(text_config=_TEXT, vision_config=vision, image_token_index=95)
    return transformers.LlavaForConditionalGeneration._from_config(config, **options).eval()


@torch.no_grad()
def test_submodel_with_other_attention_keeps_it(seed: int) -> None:
    model = llava(attn_implementation={"text_config": "eager", "vision_config": "sdpa"})
    before = implementations(epiloq.quantize_(model, "w8a16"))
    assert before["LlamaModel"] == "eager" and before["CLIPVisionModel"] == "sdpa"
    image = torch.full((1, 4), 95)
    given = {"input_ids": torch.cat([image, torch.arange(3, 9)[None]], 1), "pixel_values": torch.randn(1, 3, 16, 16)}
    expected = model(**given).logits
    assert optimize_(model).grouped_attention
    assert implementations(model)["LlamaModel"] == "eager" and implementations(model)["CLIPVisionModel"] in NAMES
    assert relative(model(**given).logits, expected) <= 1e-5


def test_a_backbone_without_attention(seed: int) -> None:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5}
    config = transformers.DetrConfig(backbone_config=backbone, use_timm_backbone=False, backbone=None, **sizes, **heads)
    model, image = transformers.DetrForObjectDetection(config).eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = epiloq.quantize_(model, "w8a16")(image).logits
        assert optimize_(model).grouped_attention
        assert relative(model(image).logits, expected) <= 1e-5


# In another process epiloq is imported before transformers, which knows none of its names.
_LOADS = """
import sys
import epiloq, torch
model, given, expected = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    found = model(**given).logits
seen = given["attention_mask"].bool()
assert torch.equal(found[seen], expected[seen]), (found - expected)[seen].abs().max()
for module in (model.model, model.model.layers[0].self_attn):
    assert "_epiloq_attention" in vars(module)
"""


@pytest.mark.parametrize("family", ["Llama", "GptOss"])
@torch.no_grad()
def test_unpickled_in_another_process(seed: int, family: str, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 32}
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_key_value_heads": 2, **_SIZES}
    config = getattr(transformers, f"{family}Config")(**sizes, **(experts if family == "GptOss" else {}))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    optimize_(epiloq.quantize_(model, "w4a16-g32"))
    ids = torch.randint(96, (2, 13))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][0, :5] = 0
    file = tmp_path / "model.pt"
    torch.save((model, given, model(**given).logits), file)
    done = subprocess.run([sys.executable, "-c", _LOADS, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
