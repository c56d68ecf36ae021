"""What the decoding loop supports: models, arguments, caches, and who may be called for surplus tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from epiloq.kv_cache import QuantizedDynamicLayer, QuantizedStaticLayer
from epiloq.models.cache_argument import cache_argument

# Parts of transformers' loop that a model may replace.
_METHODS = (
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
)
_STEP_ARGUMENTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep"})
FIXED_LAYERS = (StaticLayer, QuantizedStaticLayer)
_GROWING_LAYERS = (DynamicLayer, QuantizedDynamicLayer)
# They call a function of the user's, or have a state.
_WITH_STATE = (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def needs_transformers_loop(
    model: Any,
    input_ids: Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> bool:
    """Whether a step needs what only transformers' own loop does."""
    if model.config.is_encoder_decoder or synced_gpus or generation_config.is_assistant:
        return True
    if any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in _METHODS):
        return True
    if model.is_remote_code() or input_ids.dim() != 2 or input_ids.shape[1] == 0 or input_ids.device != model.device:
        return True
    if generation_config.return_dict_in_generate and (
        generation_config.output_attentions or generation_config.output_hidden_states
    ):
        return True
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return True
    name = cache_argument(model)
    given = {key for key, value in model_kwargs.items() if value is not None}
    if not given <= _STEP_ARGUMENTS | {name} or not model_kwargs.get("use_cache"):
        return True
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if any(tensor is not None and tensor.dim() != 2 for tensor in (positions, mask)):
        return True
    return not isinstance(model_kwargs.get(name), Cache) or stopping_criteria.max_length is None


def is_fixed(cache: Any) -> bool:
    """Whether every layer of a cache has a fixed size and keeps all tokens."""
    return all(type(layer) in FIXED_LAYERS for layer in cache.layers)


def forgets(cache: Any) -> bool:
    """Whether `forget` can remove the last tokens of a cache."""
    return all(type(layer) in (*FIXED_LAYERS, *_GROWING_LAYERS) for layer in cache.layers)


def forget(cache: Any, count: int) -> None:
    """Remove the last `count` tokens of each sequence."""
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            layer.cumulative_length.sub_(count)
        else:
            layer.crop(-count)


def without_state(parts: Any) -> bool:
    """Whether calls of these processors or criteria for surplus tokens have no effect: only of transformers' own."""
    return all(type(part).__module__.startswith("transformers.") and type(part) not in _WITH_STATE for part in parts)
