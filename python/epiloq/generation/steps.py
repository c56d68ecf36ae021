"""One decode step: from the last tokens ``[B, 1]`` to the logits of the next, with nothing for the host to wait for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache

from epiloq.generation.ring import RingLayer, first_slot, in_slots, unroll
from epiloq.generation.support import is_fixed, slides
from epiloq.models.cache_argument import cache_argument

# End tokens are compared with a multiple of so many numbers, so that their count does not change the graph.
_EOS_STEP = 8


class Sequences:
    """The ids ``[B, W]`` of all sequences in a buffer, and which of them go on; everything advances on the device."""

    def __init__(self, prompt: Tensor, width: int, eos: Tensor | None, pad: Tensor | None) -> None:
        batch = prompt.shape[0]
        # transformers joins ids in int32 and new tokens to int64.
        zeros = partial(prompt.new_zeros, dtype=torch.long)
        self.ids = zeros((batch, width))
        self.token = zeros((batch, 1))
        self.column = zeros(1)
        self.unfinished = torch.ones_like(self.token[:, 0])
        self.eos = zeros(ends_in(eos))
        self.pad = zeros(())
        self.pads = zeros(())
        for tensor in vars(self).values():
            torch._dynamo.mark_static_address(tensor)
        self.begin(prompt, eos, pad)

    def begin(self, prompt: Tensor, eos: Tensor | None, pad: Tensor | None) -> None:
        """Start again with another prompt ``[B, T]``, in the same memory."""
        self.ids[:, : prompt.shape[1]] = prompt
        self.column.fill_(prompt.shape[1])
        self.unfinished.fill_(1)
        self.eos.fill_(-1)
        if eos is not None:
            self.eos[: len(eos)] = eos
        self.pads.fill_(pad is not None)
        if pad is not None:
            self.pad.copy_(pad.reshape(()))

    def append(self, tokens: Tensor) -> None:
        """Append tokens ``[B]``; sequences that have ended get the padding token if an end token can end them."""
        pads = self.pads * (1 - self.unfinished)
        self.token.copy_((tokens * (1 - pads) + self.pad * pads)[:, None])
        self.ids.index_copy_(1, self.column, self.token)
        self.column.add_(1)

    def end_by_eos(self) -> None:
        """End the sequences whose last token is an end token."""
        self.unfinished.mul_((self.token != self.eos).all(1))


def ends_in(eos: Tensor | None) -> int:
    """Length of the buffer of end tokens."""
    return -(-max(1, 0 if eos is None else len(eos)) // _EOS_STEP) * _EOS_STEP


class FixedInputs(NamedTuple):
    """Inputs of the first step after the prompt, found to be as `FixedStep` advances them."""

    inputs: dict[str, Any]
    """Of the model, with a mask in place of ``attention_mask``, or masks by the kind of layers."""
    seen: int
    """Tokens in the cache."""
    windowed: frozenset[str]
    """Keys of the masks of sliding windows."""


# Key of the mask if there is one for all layers.
_ALL = ""
_SLIDING = "sliding_attention"


class FixedStep:
    """A step with a cache of fixed size: all inputs stay where they are, and advance on the device."""

    def __init__(self, model: Any, cache: Any, found: FixedInputs, sequences: Sequences) -> None:
        self.sequences, inputs = sequences, found.inputs
        self.masks: dict[str, Tensor] = _by_kind(inputs["attention_mask"])
        self.positions: Tensor | None = inputs.get("position_ids")
        self.seen = sequences.column.new_zeros(1)
        self.slots = {kind: sequences.column.new_zeros(1) for kind in self.masks}
        self.cache, self._own = cache, list(cache.layers)
        window = next((self.slots[kind] for kind in found.windowed), self.seen)
        self._rings = [RingLayer(each, window, self.seen) if slides(each) else each for each in self._own]
        self._windowed = found.windowed
        self.inputs = inputs | {"input_ids": sequences.token, cache_argument(model): cache}
        for tensor in (*self.masks.values(), *self.slots.values(), self.seen, self.positions):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        self._start(found.seen)

    def begin(self, found: FixedInputs) -> None:
        """Start again after another prompt with inputs of the same shapes, in the same memory."""
        for kind, new in _by_kind(found.inputs["attention_mask"]).items():
            self.masks[kind].copy_(new)
        if self.positions is not None:
            self.positions.copy_(found.inputs["position_ids"])
        self._start(found.seen)

    def _start(self, seen: int) -> None:
        self.seen.fill_(seen)
        for kind, slot in self.slots.items():
            slot.fill_(first_slot(seen, self.masks[kind].shape[-1]) if kind in self._windowed else seen)
        self.cache.layers[:] = self._rings

    def end(self, count: int, keeps: bool) -> None:
        """Leave the cache after `count` steps; with `keeps` as transformers would, for whoever reads it next."""
        self.cache.layers[:] = self._own
        if keeps and self._windowed:
            slot = next(int(self.slots[kind]) for kind in self._windowed)
            for layer in filter(slides, self._own):
                unroll(layer, slot, count)

    def logits(self, model: Any) -> Tensor:
        """float32 logits ``[B, vocabulary]`` after the last tokens."""
        for kind, mask in self.masks.items():
            mask.index_fill_(3, self.slots[kind], 1 if mask.dtype == torch.bool else 0)
        outputs = model(**self.inputs, return_dict=True)
        self.seen.add_(1)
        for kind, slot in self.slots.items():
            slot.add_(1)
            if kind in self._windowed:
                slot.remainder_(self.masks[kind].shape[-1])
        if self.positions is not None:
            self.positions.add_(1)
        result: Tensor = outputs.logits[:, -1].float()
        return result

    def choose(self, model: Any) -> None:
        """Append the most probable tokens."""
        self.sequences.append(torch.argmax(self.logits(model), dim=-1))
        self.sequences.end_by_eos()


class PreparedStep:
    """A step whose inputs transformers prepares on the host: with a growing cache, or one of another kind."""

    def __init__(
        self, model: Any, forward: Callable[..., Any], kwargs: dict[str, Any], seen: int, new: int, sequences: Sequences
    ) -> None:
        self.model, self.forward, self.sequences, self.seen = model, forward, sequences, seen
        self.kwargs, mask, positions = dict(kwargs), kwargs.get("attention_mask"), kwargs.get("position_ids")
        self.mask = None if mask is None else torch.cat((mask, mask.new_ones((mask.shape[0], new))), -1)
        self.count = 0
        self.positions = None
        if positions is not None:
            self.positions = positions[:, -1:] + torch.arange(1, new + 1, device=positions.device)

    def logits(self) -> Tensor:
        """float32 logits ``[B, vocabulary]`` after the last tokens."""
        kwargs, self.count = self.kwargs, self.count + 1
        if self.mask is not None:
            kwargs["attention_mask"] = self.mask[:, : self.seen + self.count]
        if self.positions is not None:
            kwargs["position_ids"] = self.positions[:, self.count - 1 : self.count]
        inputs = self.model.prepare_inputs_for_generation(self.sequences.token, **kwargs)
        outputs = self.forward(**inputs, return_dict=True)
        return outputs.logits[:, -1].to(copy=True, dtype=torch.float32)  # type: ignore[no-any-return]

    def end(self, count: int, keeps: bool) -> None:
        """The cache is as transformers leaves it."""


def fixed_inputs(model: Any, cache: Any, kwargs: dict[str, Any], seen: int, token: Tensor) -> FixedInputs | None:
    """Inputs of the first step after `seen` tokens, for `FixedStep`.

    None if the cache has no fixed size, or is not of this model's kinds of layers, or a mask is not ``[B, 1, 1, L]``
    of the tokens so far: in bool, or zeros and the least number of a floating-point type.
    """
    if not is_fixed(cache) or not all(layer.is_initialized for layer in cache.layers):
        return None
    config = model.config.get_text_config(decoder=True)
    lengths = {slides(layer): layer.max_cache_len for layer in cache.layers}
    if any(layer.max_cache_len != lengths[slides(layer)] for layer in cache.layers):
        return None
    if list(map(slides, StaticCache(config=config, max_cache_len=1).layers)) != list(map(slides, cache.layers)):
        return None
    if True in lengths and getattr(config, "attention_chunk_size", None) is not None:
        return None  # chunks are stored as windows are, and masked otherwise
    if False in lengths and seen + 1 > lengths[False]:
        return None
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    shown = token.new_ones((token.shape[0], seen + 1))
    if mask is not None:
        shown[:, :seen] = mask
    kwargs = kwargs | {"attention_mask": shown}
    if positions is not None:
        kwargs["position_ids"] = positions[:, -1:] + 1
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(token, **kwargs)
    masks = _by_kind(inputs.get("attention_mask"))
    # The only mask is that of the only kind of layers.
    windowed = frozenset(kind for kind in masks if (True in lengths if len(lengths) == 1 else kind == _SLIDING))
    if not masks or len(masks) != len(lengths) or {kind in windowed for kind in masks} != set(lengths):
        return None
    for kind, found in masks.items():
        length = lengths[kind in windowed]
        if not _equals(found, in_slots(shown, length)):
            return None
        if kind in windowed:
            found = _like(found, in_slots(shown[:, :seen], length))
        # Each in memory of its own, since they are written.
        masks[kind] = found.clone(memory_format=torch.contiguous_format)
    inputs["attention_mask"] = masks if isinstance(inputs["attention_mask"], dict) else masks[_ALL]
    return FixedInputs(inputs, seen, windowed)


def _by_kind(masks: Any) -> dict[str, Any]:
    return dict(masks) if isinstance(masks, dict) else {_ALL: masks}


def _like(mask: Tensor, shown: Tensor) -> Tensor:
    """A mask ``[B, 1, 1, L]`` in the type of `mask`, of tokens ``[B, L]``."""
    tokens = shown.bool()[:, None, None]
    if mask.dtype == torch.bool:
        return tokens
    return torch.where(tokens, mask.new_zeros(()), torch.finfo(mask.dtype).min)


def _equals(mask: Any, shown: Tensor) -> bool:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        return False
    expected = _like(mask, shown)
    return mask.shape == expected.shape and torch.equal(mask, expected)
