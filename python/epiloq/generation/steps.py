"""One decode step: from the last tokens ``[B, 1]`` to the logits of the next, with nothing for the host to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epiloq.generation.support import is_fixed
from epiloq.models.cache_argument import cache_argument


class Sequences:
    """The ids ``[B, W]`` of all sequences in a buffer, and which of them go on; everything advances on the device."""

    def __init__(self, prompt: Tensor, width: int, eos: Tensor | None, pad: Tensor | None) -> None:
        batch = prompt.shape[0]
        self.ids = prompt.new_zeros((batch, width))
        self.token = prompt.new_zeros((batch, 1))
        self.column = prompt.new_zeros(1)
        self.unfinished = torch.ones_like(self.token[:, 0])
        self.eos = None if eos is None else eos.clone()
        self.pad = None if pad is None else pad.clone()
        for tensor in (self.ids, self.token, self.column, self.unfinished, self.eos, self.pad):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        self.begin(prompt, eos, pad)

    def begin(self, prompt: Tensor, eos: Tensor | None, pad: Tensor | None) -> None:
        """Start again with another prompt ``[B, T]``, in the same memory."""
        self.ids[:, : prompt.shape[1]] = prompt
        self.column.fill_(prompt.shape[1])
        self.unfinished.fill_(1)
        if self.eos is not None and eos is not None:
            self.eos.copy_(eos)
        if self.pad is not None and pad is not None:
            self.pad.copy_(pad)

    def append(self, tokens: Tensor) -> None:
        """Append tokens ``[B]``; sequences that have ended get the padding token if an end token can end them."""
        if self.pad is not None:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.token.copy_(tokens[:, None])
        self.ids.index_copy_(1, self.column, self.token)
        self.column.add_(1)

    def end_by_eos(self) -> None:
        """End the sequences whose last token is an end token."""
        if self.eos is not None:
            self.unfinished.mul_((self.token != self.eos).all(1))


class FixedStep:
    """A step with a cache of fixed size: all inputs stay where they are, and advance on the device."""

    def __init__(self, model: Any, cache: Any, inputs: dict[str, Any], seen: int, sequences: Sequences) -> None:
        self.model, self.sequences = model, sequences
        masks = inputs["attention_mask"]
        self.masks: list[Tensor] = list(masks.values()) if isinstance(masks, dict) else [masks]
        self.positions: Tensor | None = inputs.get("position_ids")
        self.place = sequences.column.new_tensor([seen])
        self.inputs = inputs | {"input_ids": sequences.token, cache_argument(model): cache}
        for tensor in (*self.masks, self.place, self.positions):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    def begin(self, inputs: dict[str, Any], seen: int) -> None:
        """Start again after another prompt with inputs of the same shapes, in the same memory."""
        masks = inputs["attention_mask"]
        for mask, new in zip(self.masks, masks.values() if isinstance(masks, dict) else [masks], strict=True):
            mask.copy_(new)
        if self.positions is not None:
            self.positions.copy_(inputs["position_ids"])
        self.place.fill_(seen)

    def logits(self) -> Tensor:
        """float32 logits ``[B, vocabulary]`` after the last tokens."""
        for mask in self.masks:
            mask.index_fill_(3, self.place, True)
        outputs = self.model(**self.inputs, return_dict=True)
        self.place.add_(1)
        if self.positions is not None:
            self.positions.add_(1)
        result: Tensor = outputs.logits[:, -1].float()
        return result

    def choose(self) -> None:
        """Append the most probable tokens."""
        self.sequences.append(torch.argmax(self.logits(), dim=-1))
        self.sequences.end_by_eos()


class PreparedStep:
    """A step whose inputs transformers prepares on the host: with a growing cache, or one with a sliding window."""

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


def fixed_inputs(model: Any, cache: Any, kwargs: dict[str, Any], seen: int, token: Tensor) -> dict[str, Any] | None:
    """Inputs of the first step after `seen` tokens, for `FixedStep`.

    None if the cache has no fixed size, or a mask is not ``[B, 1, 1, L]`` in bool, of the tokens so far.
    """
    if not is_fixed(cache) or not all(layer.is_initialized for layer in cache.layers):
        return None
    batch, positions, mask = token.shape[0], kwargs.get("position_ids"), kwargs.get("attention_mask")
    shown = token.new_ones((batch, seen + 1))
    if mask is not None:
        shown[:, :seen] = mask
    kwargs = kwargs | {"attention_mask": shown}
    if positions is not None:
        kwargs["position_ids"] = positions[:, -1:] + 1
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(token, **kwargs)
    masks = inputs.get("attention_mask")
    length = cache.layers[0].max_cache_len
    expected = torch.zeros((batch, 1, 1, length), dtype=torch.bool, device=token.device)
    if seen + 1 > length:
        return None
    expected[:, 0, 0, : seen + 1] = shown.bool()
    found: list[Any] = list(masks.values()) if isinstance(masks, dict) else [masks]
    if not found or any(not isinstance(each, Tensor) or each.dtype != torch.bool for each in found):
        return None
    if any(each.shape != expected.shape or not torch.equal(each, expected) for each in found):
        return None
    # Each in memory of its own, since they are written.
    inputs["attention_mask"] = (
        {name: each.clone(memory_format=torch.contiguous_format) for name, each in masks.items()}
        if isinstance(masks, dict)
        else found[0].clone(memory_format=torch.contiguous_format)
    )
    return inputs
