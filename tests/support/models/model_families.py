"""Small models of transformers of five families, as trained ones are where it matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> Any:
    sizes = {**SIZES, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3}
    config = transformers.LlamaConfig(intermediate_size=100, num_key_value_heads=1, head_dim=12, **sizes)
    return transformers.LlamaForCausalLM(config)


def qwen() -> Any:
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = transformers.Qwen2Config(intermediate_size=72, num_key_value_heads=2, **windows, **SIZES)
    return transformers.Qwen2ForCausalLM(config)


def neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(intermediate_size=64, **SIZES))


def opt() -> Any:
    config = transformers.OPTConfig(word_embed_proj_dim=32, ffn_dim=64, max_position_embeddings=64, **SIZES)
    return transformers.OPTForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(intermediate_size=64, max_position_embeddings=64, **SIZES)
    return transformers.BertForMaskedLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {"llama": llama, "qwen": qwen, "neox": neox, "opt": opt, "bert": bert}


# Layers that share an input, by the last part of their names.
SHARED = {
    "llama": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "qwen": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "neox": [{"query_key_value"}, {"attention.dense"}, {"dense_h_to_4h"}, {"dense_4h_to_h"}],
    "opt": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
    "bert": [{"query", "key", "value"}, {"attention.output.dense"}, {"intermediate.dense"}, {"0.output.dense"}],
}


def outlying(model: nn.Module) -> nn.Module:
    """Norms that make a few channels large, and weights of ordinary size, as in trained models."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
        elif type(module).__name__.endswith("Norm"):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)
                module.weight[::7] *= 6
    return model.eval()
