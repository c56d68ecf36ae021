"""Small models of transformers beside those of `model_families`: of other structures, and not only language models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from model_families import FAMILIES, SIZES, VOCABULARY

_WIDTHS = {**SIZES, "intermediate_size": 64}


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def falcon() -> Any:
    return transformers.FalconForCausalLM(transformers.FalconConfig(ffn_hidden_size=64, **SIZES))


def bigcode() -> Any:
    config = transformers.GPTBigCodeConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPTBigCodeForCausalLM(config)


def t5() -> Any:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCABULARY, feed_forward_proj="gated-gelu", **sizes)
    return transformers.T5ForConditionalGeneration(config)


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config)


def modernbert() -> Any:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**_WIDTHS, **ids))


def siglip() -> Any:
    sizes = {key: value for key, value in _WIDTHS.items() if key != "vocab_size"}
    text = {**_WIDTHS, "max_position_embeddings": 64, "projection_size": 32}
    config = transformers.SiglipConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8})
    return transformers.SiglipModel(config)


def llama4() -> Any:
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}
    config = transformers.Llama4TextConfig(num_key_value_heads=2, head_dim=8, pad_token_id=0, **experts, **_WIDTHS)
    return transformers.Llama4ForCausalLM(config)


def gemma3n() -> Any:
    sizes = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 8}
    attention = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    config = transformers.Gemma3nTextConfig(
        activation_sparsity_pattern=[0.0, 0.0], **sizes, **attention, **layers, **_WIDTHS
    )
    return transformers.Gemma3nForCausalLM(config)


def rwkv() -> Any:
    sizes = {"attention_hidden_size": 32, "context_length": 64}
    config = transformers.RwkvConfig(**sizes, **{k: v for k, v in _WIDTHS.items() if k != "num_attention_heads"})
    return transformers.RwkvForCausalLM(config)


def deberta() -> Any:
    return transformers.DebertaForMaskedLM(transformers.DebertaConfig(relative_attention=True, **_WIDTHS))


def openai() -> Any:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.OpenAIGPTLMHeadModel(config)


MORE: dict[str, Callable[[], Any]] = {
    **FAMILIES,
    "gpt2": gpt2,
    "falcon": falcon,
    "bigcode": bigcode,
    "t5": t5,
    "mamba": mamba,
    "modernbert": modernbert,
    "siglip": siglip,
    "llama4": llama4,
    "gemma3n": gemma3n,
    "rwkv": rwkv,
    "deberta": deberta,
    "openai": openai,
}


def inputs(family: str) -> dict[str, torch.Tensor]:
    """What a model of this family is called with."""
    tokens = {"input_ids": torch.randint(3, VOCABULARY, (2, 11))}
    if family == "t5":
        return {**tokens, "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 5))}
    return {**tokens, "pixel_values": torch.randn(2, 3, 16, 16)} if family == "siglip" else tokens


@torch.no_grad()
def answer(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """A model's logits, float32; of one of images and texts what it makes of either."""
    found = model(**given)
    return (found.logits if hasattr(found, "logits") else torch.cat([found.image_embeds, found.text_embeds])).float()
