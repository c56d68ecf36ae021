"""Fields of 2, 4 or 8 bits in int32 words, least significant first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def per_word(bits: int) -> int:
    """How many fields a word holds. Raises ValueError unless they fill it."""
    if bits not in (2, 4, 8):
        raise ValueError(f"words: bits: expected 2, 4 or 8, got {bits}")
    return 32 // bits


def pack(values: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unsigned ``[.., n]`` fields as int32 ``[.., ceil(n / fields)]``; field i of a word holds its value order[i].

    Raises ValueError for a value that does not fit.
    """
    count = per_word(bits)
    if values.numel() and (largest := int(values.max())) >= 1 << bits:
        raise ValueError(f"words: expected values below {1 << bits}, got {largest}")
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % count))
    words = torch.zeros(*padded.shape[:-1], padded.shape[-1] // count, dtype=torch.int32, device=values.device)
    for field, source in enumerate(order or range(count)):
        words |= padded[..., source::count].int() << bits * field
    return words


def unpack(words: Tensor, bits: int, length: int, order: Sequence[int] | None = None) -> Tensor:
    """The inverse of `pack`: uint8 ``[.., length]``."""
    count = per_word(bits)
    if words.dtype != torch.int32 or words.shape[-1] != -(-length // count):
        raise ValueError(f"words: expected int32 [.., {-(-length // count)}], got {words.dtype} {list(words.shape)}")
    values = torch.empty(*words.shape[:-1], words.shape[-1] * count, dtype=torch.uint8, device=words.device)
    for field, target in enumerate(order or range(count)):
        values[..., target::count] = words >> bits * field & (1 << bits) - 1
    return values[..., :length].contiguous()
