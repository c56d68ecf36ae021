"""Models in float32 that generate within ``torch.autocast``, where queries, keys and values differ in type."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import epiloq
from small_models import relative

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("", {"intermediate_size": 128, "num_key_value_heads": 2}),
    "Llama, attention in floating point": ("*self_attn*", {"intermediate_size": 128, "num_key_value_heads": 2}),
    "GptOss": ("", {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4}),
}


def made(name: str) -> Any:
    family = name.partition(",")[0]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    ignore, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return epiloq.quantize_(model, "w4a16-g32", ignore=ignore or ())


def cache_of(kind: str, model: Any) -> dict[str, Any]:
    if kind == "static":
        return {"cache_implementation": "static"}
    options = {"fixed": {"max_cache_len": 32}, "growing": {}}
    return {"past_key_values": epiloq.QuantizedCache(model.config, **options[kind])} if kind in options else {}


@pytest.mark.parametrize("cache", ["default", "static", "growing", "fixed"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_before(name: str, cache: str, seed: int) -> None:
    plain = made(name)
    optimised = copy.deepcopy(plain)
    epiloq.optimize_(optimised)
    ids = torch.randint(96, (2, 5))
    options = {"max_new_tokens": 3, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}

    def generated(model: Any, **more: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model.generate(ids, **options, **cache_of(cache, model), **more)

    expected = generated(plain)
    for more in ({}, {"custom_generate": epiloq.decode}):
        found = generated(optimised, **more)
        for step, (scores, before) in enumerate(zip(found.scores, expected.scores, strict=True)):
            # Near ties another token may be chosen, and scores then differ.
            if torch.equal(found.sequences[:, : 5 + step], expected.sequences[:, : 5 + step]):
                assert relative(scores, before) < 0.05
