"""`decode`: a decoding loop for transformers' ``generate`` that never waits for the GPU between two tokens."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from epiloq.generation.loop import generate_tokens
from epiloq.generation.support import needs_transformers_loop

__all__ = ["decode"]


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decoding loop for ``model.generate(**inputs, custom_generate=epiloq.decode)``: transformers' tokens, faster.

    transformers prepares the prompt, the cache, the processors of logits and the criteria for stopping as always, and
    calls this function, with these arguments, for the loop alone. Greedy choice and sampling give the same tokens, and
    leave the generator of random numbers in the same state.

    - On a GPU the step for the next token is queued before the host knows the last one: it sees two steps late that
      all sequences have ended, and removes the surplus tokens. Processors and criteria that are not transformers' own
      are called once for each token, so the host waits for each of them; so it does if a cache that is returned to the
      user could not forget the surplus tokens.
    - With a cache of fixed size, of full attention and sliding windows, positions and masks advance on the device, and
      a step is one call of one function, with the greedy choice within. It is compiled where transformers compiles its
      step (on a GPU, by `generation_config.compile_config`, or else in CUDA graphs).
    - On a GPU such a cache is made unless a cache, ``cache_implementation``, ``prefill_chunk_size`` or
      ``disable_compile=True`` is given; with ``cache_implementation="static"`` on every device. It is kept with the
      model until a call needs another shape, so that a step is compiled, and CUDA graphs are recorded, once.

    transformers' own loop runs where a step needs more than token, mask, positions and cache: encoder-decoder and
    multimodal models, models with a loop or inputs of their own, ``use_cache=False``, ``inputs_embeds``, attentions or
    hidden states in the output, several processes in step (``synced_gpus``), and beam search.

    Args:
        model: a transformers model.
        input_ids: the prompt, int64 ``[B, T]``.
        logits_processor: called with ids ``[B, T]`` and float32 logits ``[B, vocabulary]``.
        stopping_criteria: called with ids ``[B, T]`` and the scores; they return bool ``[B]``.
        generation_config: of transformers, prepared.
        synced_gpus: whether processes must take the same number of steps.
        streamer: receives the tokens ``[B]`` of each step. ``generate(streamer=…)`` works too.
        model_kwargs: mask, positions, cache and others, as `generate` prepared them.

    Returns:
        int64 ids ``[B, T + new]``, or with ``return_dict_in_generate`` transformers' output with scores and logits.

    Raises:
        ValueError: assisted generation, contrastive search, DoLa or constrained beam search was asked for.
    """
    from transformers.generation.configuration_utils import GenerationMode

    given = _dropped_by_generate()
    streamer = given.get("streamer") if streamer is None else streamer
    synced_gpus = bool(synced_gpus or given.get("synced_gpus"))
    mode = generation_config.get_generation_mode(given.get("assistant_model"))
    arguments = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "synced_gpus": synced_gpus,
    }
    if mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE):
        return type(model)._beam_search(model, input_ids, **arguments, **model_kwargs)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            "epiloq.decode: generation_config: expected greedy search, sampling or beam search, got "
            f"{mode.value.replace('_', ' ')}; call generate without custom_generate=epiloq.decode"
        )
    if needs_transformers_loop(model, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs):
        return type(model)._sample(model, input_ids, **arguments, streamer=streamer, **model_kwargs)
    return generate_tokens(
        model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
    )


def _dropped_by_generate() -> dict[str, Any]:
    """Arguments of the calling ``generate`` that it does not pass on.

    transformers gives a function in `custom_generate` neither the streamer, which has already received the prompt, nor
    the assistant: ignoring them would be silent.
    """
    caller = sys._getframe(2)
    if caller.f_code.co_name != "generate":
        return {}
    return {name: caller.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
