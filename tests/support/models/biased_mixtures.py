"""Small mixtures whose experts are not two stacked matrices alone, or are not called as others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers

from other_mixtures import COMMON, LATENT, ROUTED, filled, made


def gpt_oss() -> Any:
    """Transposed stacks whose gates and ups take turns, and biases."""
    return made("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2)


def privacy_filter() -> Any:
    """The same with gates before ups."""
    routed = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.CONFIG_MAPPING["openai_privacy_filter"](**COMMON, head_dim=16, **routed)
    return filled(transformers.AutoModel.from_config(config))


def longcat() -> Any:
    """Two experts among six that return their tokens."""
    sizes = {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "n_routed_experts": 4}
    common = {name: value for name, value in COMMON.items() if name not in ("intermediate_size", "num_hidden_layers")}
    config = transformers.LongcatFlashConfig(**common, **sizes, **LATENT, head_dim=16, zero_expert_num=2, moe_topk=2)
    return filled(transformers.LongcatFlashForCausalLM(config))


def muse_spark() -> Any:
    """A norm after every expert."""
    routed = {"num_local_experts": 4, "moe_hidden_size": 64, **ROUTED}
    if "muse_spark_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no Muse Spark")
    config = transformers.CONFIG_MAPPING["muse_spark_text"](**COMMON, head_dim=16, **routed)
    return filled(transformers.AutoModel.from_config(config))


def llama4() -> Any:
    """Called with every token for every expert."""
    sizes = {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16}
    return made("Llama4Text", **sizes, interleave_moe_layer_step=1)


FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt_oss": gpt_oss,
    "privacy_filter": privacy_filter,
    "longcat": longcat,
    "muse_spark": muse_spark,
    "llama4": llama4,
}
