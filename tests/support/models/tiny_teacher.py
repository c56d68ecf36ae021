"""A language model small enough to measure in a test, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers


def tiny_model(**sizes: int) -> Any:
    """A Llama with tied embeddings, random weights and, unless told otherwise, odd sizes."""
    odd = {
        "hidden_size": 36,
        "intermediate_size": 100,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(vocab_size=256, tie_word_embeddings=True, **(odd | sizes))
    return transformers.LlamaForCausalLM(config).train(False)


def sharpen(model: Any) -> None:
    """Give a random model predictions that depend on its layers, on some of them more."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * (0.3 if "layers.0" in name else 0.1)
                )


def save(path: Path, model: Any = None) -> Path:
    """Save the tiny model (or another) and a tokenizer of single bytes as a Hugging Face directory, `path`."""
    (model or tiny_model()).save_pretrained(path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrapper: Any = transformers.PreTrainedTokenizerFast
    wrapper(tokenizer_object=byte_level).save_pretrained(path)
    return path
