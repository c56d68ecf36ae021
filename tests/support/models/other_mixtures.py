"""Small mixtures of experts that are gated, stacked or attended to in other ways than Mixtral's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
TOKENS = torch.arange(26).view(2, 13) * 5 % 90 + 3


def made(name: str, **sizes: Any) -> Any:
    """A model, by the first part of its class's name."""
    config = getattr(transformers, f"{name}Config")
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM", None)
    return filled((kind or getattr(transformers, f"{name}ForCausalLM"))(config(**COMMON | sizes)))


def filled(model: Any) -> Any:
    """A model with weights of many magnitudes."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            values = torch.randn(parameter.shape) * torch.exp(torch.randn(parameter.shape) / 2)
            parameter.data = values / parameter.shape[-1] ** 0.5
    return model.eval()


def nemotron_h() -> Any:
    """Experts without gates, of squared ReLUs; files have a matrix an expert."""
    state = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}
    routed = {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 48, **ROUTED}
    kinds = {"layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3}
    return made("NemotronH", head_dim=16, **state, **routed, **kinds)


def aria() -> Any:
    """Transposed stacks, which files have too."""
    model = made("AriaText", head_dim=16, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)
    if hasattr(model.model.layers[0].mlp.experts, "fc1"):
        pytest.skip("this version of transformers has a module for each of Aria's stacks")
    return model


def deepseek_v4() -> Any:
    """Limited gates."""
    return made("DeepseekV4", n_routed_experts=4, n_shared_experts=1, head_dim=16, swiglu_limit=0.7, **_SPARSE_V4)


def minimax_m3() -> Any:
    """GPT-OSS's gates, one after the other."""
    return made("MiniMaxM3VLText", num_local_experts=4, head_dim=16, **ROUTED)


def deepseek_v32() -> Any:
    """Attention to the keys that an indexer chooses, of fewer than there are."""
    routed = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **ROUTED}
    index = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 5}
    return made("DeepseekV32", **LATENT, **routed, **index)


def qwen3_omni() -> Any:
    """The part of Qwen3-Omni that thinks, with what it hears and sees; its blocks initialise the experts' stacks."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    rotation = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
    text = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_experts": 4}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config={**text, **heads, **rotation, **ROUTED},
        vision_config=vision | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        audio_config=audio | {"num_mel_bins": 16, "downsample_hidden_size": 8},
    )
    return filled(transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config))


_SPARSE_V4 = {"q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 4, "index_head_dim": 32, **ROUTED}
FAMILIES: dict[str, Callable[[], Any]] = {
    "nemotron_h": nemotron_h,
    "aria": aria,
    "deepseek_v4": deepseek_v4,
    "minimax_m3": minimax_m3,
}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS, use_cache=False).logits  # type: ignore[no-any-return]
