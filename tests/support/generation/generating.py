"""Small random models that generate, by transformers' loop and by `epiloq.decode`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import epiloq

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
}
WINDOW = 8
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "pad_token_id": 0},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": None},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW},
    "cohere2": {"sliding_window": WINDOW},
    "gpt_oss": {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
NEW = 14


def model(family: str = "llama", **options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 48, "max_position_embeddings": 256, "initializer_range": 0.5}
    config = transformers.AutoConfig.for_model(family, **sizes | FAMILIES.get(family, {}) | options)
    made = AutoModelForCausalLM.from_config(config).eval()
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


def prompts(length: int = 7) -> dict[str, Tensor]:
    """Three, of which two are padded on the left."""
    ids, mask = torch.randint(1, 48, (3, length)), torch.ones(3, length, dtype=torch.long)
    mask[0, :3] = mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(found: Any, custom: Any, **options: Any) -> tuple[Any, Tensor]:
    """The result, and the next random number."""
    torch.manual_seed(17)
    result = found.generate(**{"max_new_tokens": NEW, "do_sample": False} | options, custom_generate=custom)
    return result, torch.rand(3)


def assert_same(found: Any, **options: Any) -> Any:
    expected, after = generated(found, None, **options)
    result, after_ours = generated(found, epiloq.decode, **options)
    assert torch.equal(after_ours, after)
    assert type(result) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(result, expected)
        return result
    assert torch.equal(result.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or (len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)))
    return result


def ends_of(found: Any, **inputs: Tensor) -> list[int]:
    """End tokens that end the sequences at different steps."""
    plain = found.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    return [int(plain[row, 3 + 2 * row]) for row in range(3)]


def assert_same_caches(*caches: Any) -> None:
    """The same keys and values of the same tokens, in the same places, of caches of the same kind."""
    ours, theirs = caches
    assert type(ours) is type(theirs) and len(ours.layers) == len(theirs.layers)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(mine) is type(other)
        assert int(mine.get_seq_length()) == int(other.get_seq_length())
        if hasattr(mine, "cumulative_length"):
            assert int(mine.cumulative_length) == int(other.cumulative_length)
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(mine, name).float(), getattr(other, name).float(), rtol=1e-4, atol=1e-4)
