"""What the decoding loop supports: models, arguments, caches, and who may be called for surplus tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from epiloq.kv_cache import QuantizedDynamicLayer, QuantizedStaticLayer
from epiloq.models.cache_argument import cache_argument
from epiloq.optimize.structure import body_of_function

# Parts of transformers' loop that a model may replace.
_METHODS = ("_sample", "_prefill", "_update_model_kwargs_for_generation")
# Phi-3's preparation: drops the cache where the frequencies of the rotary embedding change with the length.
_UP_TO_ORIGINAL_LENGTH = """\
if cache and hasattr(self.config, 'original_max_position_embeddings') and \
(input_ids.shape[1] >= self.config.original_max_position_embeddings + 1):
    past_length = cache.get_seq_length()
    if past_length <= self.config.original_max_position_embeddings:
        cache = None
        kwargs['next_sequence_length'] = None
model_inputs = super().prepare_inputs_for_generation()
return model_inputs"""
_UP_TO_ORIGINAL_LENGTH_5_17 = _UP_TO_ORIGINAL_LENGTH.replace("        kwargs['next_sequence_length'] = None\n", "")
"""The same in transformers 5.17."""
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
    if not _prepares_as_usual(model, stopping_criteria.max_length):
        return True
    name = cache_argument(model)
    given = {key for key, value in model_kwargs.items() if value is not None}
    if not given <= _STEP_ARGUMENTS | {name} or not model_kwargs.get("use_cache"):
        return True
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if any(tensor is not None and tensor.dim() != 2 for tensor in (positions, mask)):
        return True
    return not isinstance(model_kwargs.get(name), Cache) or stopping_criteria.max_length is None


def _prepares_as_usual(model: Any, limit: int | None) -> bool:
    """Whether inputs of sequences of up to `limit` tokens are prepared by transformers' general function."""
    prepare = type(model).prepare_inputs_for_generation
    if prepare is GenerationMixin.prepare_inputs_for_generation:
        return True
    most = getattr(model.config, "original_max_position_embeddings", None)
    is_short = limit is not None and (most is None or limit <= most)
    return is_short and body_of_function(prepare) in (_UP_TO_ORIGINAL_LENGTH, _UP_TO_ORIGINAL_LENGTH_5_17)


def slides(layer: Any) -> bool:
    """Whether a layer of a cache keeps the last tokens only."""
    return isinstance(layer, (StaticSlidingWindowLayer, DynamicSlidingWindowLayer))


def is_fixed(cache: Any) -> bool:
    """Whether every layer of a cache has a fixed size, and keeps all tokens or a window of them."""
    kinds = (*FIXED_LAYERS, StaticSlidingWindowLayer)
    return not getattr(cache, "offloading", False) and all(type(layer) in kinds for layer in cache.layers)


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


def holds(cache: Any, count: int) -> bool:
    """Whether a cache has room for so many tokens."""
    return all(layer.max_cache_len >= count for layer in cache.layers if type(layer) in FIXED_LAYERS)


def fill(growing: Any, fixed: Any, count: int) -> None:
    """Copy the first `count` tokens of a static cache, the last of a window, to an empty one that grows."""
    for layer, source in zip(growing.layers, fixed.layers, strict=True):
        held = min(count, source.max_cache_len)
        layer.update(source.keys[:, :, :held], source.values[:, :, :held])
        if slides(layer):
            layer.cumulative_length = count


def without_state(parts: Any) -> bool:
    """Whether calls of these processors or criteria for surplus tokens have no effect: only of transformers' own."""
    return all(type(part).__module__.startswith("transformers.") and type(part) not in _WITH_STATE for part in parts)
