"""The decoding loop: queues step after step, and looks for the end some steps late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from epiloq.generation.mailbox import Mailbox
from epiloq.generation.steps import FixedStep, PreparedStep, Sequences, fixed_inputs
from epiloq.generation.support import fill, forget, forgets, holds, is_fixed, without_state
from epiloq.generation.workspace import fixed_step, static_cache, workspace_of
from epiloq.models.cache_argument import cache_argument

# Steps by which the host is late to see that all sequences have ended, by the kind of device; 0 on others.
LAG = {"cuda": 2}
# Devices on which a cache of fixed size is made if none was asked for.
STATIC_ON = frozenset({"cuda"})


def generate_tokens(
    model: Any,
    prompt: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """`epiloq.decode` for arguments that it supports."""
    name, limit = cache_argument(model), stopping_criteria.max_length
    call = _Call(model, prompt, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
    own = model_kwargs[name]
    lock = workspace_of(model).lock
    # Another thread's call, or a call within a processor of the user's, may be using the workspace.
    if not _may_replace(model, own, generation_config) or not lock.acquire(blocking=False):
        return call.run(own)
    try:
        length = max(limit - 1, generation_config.max_cache_len or 0)
        model_kwargs[name] = static_cache(model, len(prompt), length)
        return call.run(own)
    finally:
        model_kwargs[name] = own
        lock.release()


class _Call(NamedTuple):
    """The arguments of `generate_tokens`."""

    model: Any
    prompt: Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    streamer: Any
    model_kwargs: dict[str, Any]

    def run(self, given: Any) -> Any:
        """The result, with tokens in the cache of the arguments; `given` is the one that `generate` prepared."""
        model, prompt, config, kwargs = self.model, self.prompt, self.generation_config, self.model_kwargs
        name, limit = cache_argument(model), self.stopping_criteria.max_length
        returns_dict, cache = config.return_dict_in_generate, kwargs[name]
        is_returned = returns_dict or getattr(cache, "_is_user_defined", False)
        held = int(cache.get_seq_length())
        seen = _length_after(prompt, held, kwargs, config)
        lag = LAG.get(prompt.device.type, 0)
        if not without_state((*self.logits_processor, *self.stopping_criteria)) or (is_returned and not forgets(cache)):
            lag = 0
        if not holds(cache, seen + limit - prompt.shape[1] - 1):
            lag = 0  # surplus tokens would have no place

        outputs = model._prefill(prompt, config, kwargs, is_first_iteration=True)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        del outputs  # the logits of the whole prompt may be large

        plan = _Plan.of(self.logits_processor, self.stopping_criteria, config)
        with model._optimize_model_for_decode():
            step, sequences = _step_of(model, prompt, limit, seen, config, kwargs, plan)
            run = _Run(plan, sequences, prompt.shape[1], Mailbox(sequences, lag, self.streamer), lag)
            try:
                choose, next_logits = _functions(model, step, config, kwargs)
                run.choose(logits)
                while not run.has_ended(limit):
                    if plan.is_greedy_alone and choose is not None:
                        choose()
                        run.appended()
                    else:
                        run.choose(next_logits())
            finally:
                step.end(max(run.mailbox.posted - 1, 0), is_returned)
        count = run.mailbox.finish()
        run.undo(count)
        surplus = run.mailbox.posted - count
        if surplus and is_returned:
            forget(cache, surplus)
        if self.streamer is not None:
            self.streamer.end()
        ids = sequences.ids[:, : prompt.shape[1] + count].clone()
        if not returns_dict:
            return ids
        if cache is not given:
            fill(given, cache, seen + count - 1)
        fields: dict[str, Any] = {"sequences": ids, "scores": run.scores, "logits": run.raw, name: given}
        return GenerateDecoderOnlyOutput(**fields)


class _Plan(NamedTuple):
    """What happens to logits, and what ends a sequence."""

    processors: Any
    criteria: Any
    eos: Tensor | None
    """All end tokens, if `EosTokenCriteria` and the length are all the criteria."""
    pad: Tensor | None
    """The padding token, if an end token may end a sequence."""
    is_plain: bool
    """Whether `eos` and the length are all the criteria."""
    samples: bool
    keeps_scores: bool
    keeps_logits: bool

    @staticmethod
    def of(processors: Any, criteria: Any, config: Any) -> _Plan:
        ends = [each.eos_token_id for each in criteria if type(each) is EosTokenCriteria]
        is_plain = all(type(each) in (EosTokenCriteria, MaxLengthCriteria) for each in criteria)
        pads = any(hasattr(each, "eos_token_id") for each in criteria)
        keeps = config.return_dict_in_generate
        return _Plan(
            processors,
            criteria,
            torch.cat([each.reshape(-1) for each in ends]) if ends and is_plain else None,
            config._pad_token_tensor if pads else None,
            is_plain,
            bool(config.do_sample),
            bool(keeps and config.output_scores),
            bool(keeps and config.output_logits),
        )

    @property
    def is_greedy_alone(self) -> bool:
        """Whether the most probable token is all that is needed of a step."""
        return self.is_plain and not (len(self.processors) or self.samples or self.keeps_scores or self.keeps_logits)


class _Run:
    """State of one call: what was chosen, and what is to be undone if the end is seen late."""

    def __init__(self, plan: _Plan, sequences: Sequences, length: int, mailbox: Mailbox, lag: int) -> None:
        self.plan, self.sequences, self.prompt_length, self.mailbox = plan, sequences, length, mailbox
        self.scores: tuple[Tensor, ...] | None = () if plan.keeps_scores else None
        self.raw: tuple[Tensor, ...] | None = () if plan.keeps_logits else None
        self._generator = _generator_of(sequences.ids.device) if plan.samples and lag else None
        self._states: list[Tensor] = []

    @property
    def length(self) -> int:
        """Of the sequences, in tokens."""
        return self.prompt_length + self.mailbox.posted

    def choose(self, logits: Tensor) -> None:
        """Append a token to each sequence, by logits ``[B, vocabulary]``, as transformers does."""
        plan, sequences = self.plan, self.sequences
        scores = plan.processors(self._ids(0), logits) if len(plan.processors) else logits
        if self.scores is not None:
            self.scores += (scores,)
        if self.raw is not None:
            self.raw += (logits,)
        if plan.samples:
            tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self._generator is not None:
            self._states = [*self._states[-self.mailbox.lag :], self._generator.get_state()]
        sequences.append(tokens)
        if plan.is_plain:
            sequences.end_by_eos()
        else:
            sequences.unfinished.mul_(~plan.criteria(self._ids(1), self.scores))
        self.appended()

    def appended(self) -> None:
        """Let the host know of a step, later."""
        self.mailbox.post()

    def has_ended(self, limit: int) -> bool:
        """Whether no further token is needed, as far as the host knows."""
        return self.mailbox.ended is not None or self.length >= limit

    def undo(self, count: int) -> None:
        """Remove what was recorded after `count` steps."""
        surplus = self.mailbox.posted - count
        if surplus and self._generator is not None:
            self._generator.set_state(self._states[-1 - surplus])
        self.scores = None if self.scores is None else self.scores[:count]
        self.raw = None if self.raw is None else self.raw[:count]

    def _ids(self, more: int) -> Tensor:
        """All tokens so far in a tensor of their own, which processors and criteria may keep."""
        return self.sequences.ids[:, : self.length + more].clone()


def _may_replace(model: Any, cache: Any, config: Any) -> bool:
    """Whether `generate` made a cache that this call may leave empty: one of fixed size that was asked for, or one that
    grows because nothing was asked for."""
    if getattr(cache, "_is_user_defined", False) or config.prefill_chunk_size is not None or cache.get_seq_length():
        return False
    if config.cache_implementation == "static":
        return type(cache) is StaticCache and is_fixed(cache) and not config.return_dict_in_generate
    if model.device.type not in STATIC_ON or config.disable_compile or config.cache_implementation is not None:
        return False
    return type(cache) is DynamicCache and bool(getattr(model, "_can_compile_fullgraph", False))


def _length_after(prompt: Tensor, held: int, kwargs: dict[str, Any], config: Any) -> int:
    """Tokens in a cache of `held` tokens after the prompt, which may repeat those."""
    mask = kwargs.get("attention_mask")
    covered = getattr(config, "_mask_length", prompt.shape[1]) if mask is None else mask.shape[1]
    return int(prompt.shape[1]) + (0 if covered == prompt.shape[1] else held)


def _step_of(
    model: Any, prompt: Tensor, limit: int, seen: int, config: Any, kwargs: dict[str, Any], plan: _Plan
) -> tuple[FixedStep | PreparedStep, Sequences]:
    cache = kwargs[cache_argument(model)]
    found = fixed_inputs(model, cache, kwargs, seen, prompt[:, -1:])
    if found is not None:
        step = fixed_step(model, cache, found, prompt, limit, plan.eos, plan.pad)
        return step, step.sequences
    sequences = Sequences(prompt, limit, plan.eos, plan.pad)
    compiles = model._valid_auto_compile_criteria(kwargs, config)
    forward = model.get_compiled_call(config.compile_config) if compiles else model.__call__
    return PreparedStep(model, forward, kwargs, seen, limit - prompt.shape[1], sequences), sequences


def _functions(
    model: Any, step: FixedStep | PreparedStep, config: Any, kwargs: dict[str, Any]
) -> tuple[Callable[[], None] | None, Callable[[], Tensor]]:
    """A greedy step, if it is one function, and a step up to the logits."""
    if not isinstance(step, FixedStep):
        return None, step.logits
    choose, logits = step.choose, step.logits
    if not model._valid_auto_compile_criteria(kwargs, config):
        return partial(choose, model), partial(logits, model)
    held, options = workspace_of(model), (config.compile_config or model._default_compile_config()).to_dict()
    choose, logits = (torch.compile(held.own(each), **options) for each in (choose, logits))
    return _begins(partial(choose, model)), _begins(partial(logits, model), clone=True)


def _begins(function: Callable[[], Any], clone: bool = False) -> Callable[[], Any]:
    """`function` as the beginning of a step for CUDA graphs, whose memory the next one reuses."""

    def run() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        result = function()
        return result.clone() if clone else result

    return run


def _generator_of(device: torch.device) -> torch.Generator:
    """The generator that `torch.multinomial` uses."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
