"""Fields of 2 to 8 bits in int32 words, least significant first; those of 3, 5, 6 and 7 bits may span two words."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from epiloq.formats.layouts.base import FormatError

BITS = (2, 3, 4, 8)
"""The bits of fields in GPTQ's words; those of compressed-tensors may have 2 to 8."""


def period(bits: int) -> int:
    """Number of fields after which a field is aligned to a word again, such as 8 for 4 bits or 32 for 3 bits. Raises
    ValueError for other than 2 to 8 bits."""
    if not 2 <= bits <= 8:
        raise ValueError(f"words: bits: expected 2 to 8, got {bits}")
    return 32 // gcd(bits, 32)


def words_of(length: int, bits: int) -> int:
    """Number of words for a number of fields."""
    return -(-length * bits // 32)


def pack(values: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unsigned ``[…, n]`` fields as int32 ``[…, words_of(n, bits)]``; field i of a period holds its value order[i].

    Raises FormatError for a value that does not fit, such as a zero point of 2^bits.
    """
    count = period(bits)
    if values.numel() and (largest := int(values.max())) >= 1 << bits:
        raise FormatError(f"words: expected integers and zero points below {1 << bits}, got {largest}")
    length = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -length % count))
    stride = count * bits // 32
    words = torch.zeros(*padded.shape[:-1], padded.shape[-1] // count * stride, dtype=torch.int32, device=values.device)
    for field, source in enumerate(order or range(count)):
        word, shift = divmod(field * bits, 32)
        found = padded[..., source::count].int()
        words[..., word::stride] |= found << shift
        if shift + bits > 32:
            words[..., word + 1 :: stride] |= found >> 32 - shift
    return words[..., : words_of(length, bits)].contiguous()


def unpack(words: Tensor, bits: int, length: int, order: Sequence[int] | None = None) -> Tensor:
    """The inverse of `pack`: uint8 ``[…, length]``."""
    count = period(bits)
    wanted = words_of(length, bits)
    if words.dtype != torch.int32 or words.shape[-1] != wanted:
        raise ValueError(f"words: expected int32 […, {wanted}], got {words.dtype} {list(words.shape)}")
    stride, periods = count * bits // 32, -(-length // count)
    padded = torch.nn.functional.pad(words, (0, periods * stride - wanted))
    values = torch.empty(*words.shape[:-1], periods * count, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for field, target in enumerate(order or range(count)):
        word, shift = divmod(field * bits, 32)
        found = padded[..., word::stride] >> shift & mask
        if shift + bits > 32:
            # Mask the lower word, because the shift is arithmetic.
            found = found & (1 << 32 - shift) - 1 | padded[..., word + 1 :: stride] << 32 - shift & mask
        values[..., target::count] = found
    return values[..., :length].contiguous()
