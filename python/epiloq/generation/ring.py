"""Sliding windows in decode steps: rings of fixed size, in which a new token replaces the oldest where that lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticSlidingWindowLayer


class RingLayer(StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A static layer with a sliding window of W tokens during decode steps, in the memory of transformers' own.

    transformers moves all keys and values of a full window by one for each token, and counts tokens on the host.
    Attention does not depend on the order of keys that are rotated already, so here token t is written to slot t mod W,
    counted from the first slot of the window that the prompt left.
    """

    def __init__(self, layer: StaticSlidingWindowLayer, slot: Tensor, seen: Tensor) -> None:
        vars(self).update(vars(layer))
        self.slot, self.seen = slot, seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token ``[B, H, 1, D]``; returns all slots ``[B, H, W, D]``."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """All tokens so far, int64 scalar on the device."""
        return self.seen[0]


def first_slot(seen: int, window: int) -> int:
    """Slot of the next token after `seen` tokens, as transformers leaves a window: the oldest token first."""
    return 0 if seen >= window else seen


def in_slots(shown: Tensor, window: int) -> Tensor:
    """Which slots ``[B, W]`` of a window hold tokens that are attended to, given all tokens ``[B, T]`` so far."""
    held = shown[:, -window:]
    return torch.nn.functional.pad(held, (0, window - held.shape[1]))


def unroll(layer: StaticSlidingWindowLayer, slot: int, count: int) -> None:
    """Leave `layer` as transformers does after `count` more tokens, of which the next would have been in `slot`."""
    assert layer.keys is not None and layer.values is not None
    seen, window = layer.cumulative_length_int, layer.max_cache_len
    layer.cumulative_length_int = seen + count
    if seen < window:
        # transformers counts on the device until the window is full.
        layer.cumulative_length.fill_(min(seen + count, window))
    if slot and seen + count > window:
        layer.keys.copy_(layer.keys.roll(-slot, 2))
        layer.values.copy_(layer.values.roll(-slot, 2))
