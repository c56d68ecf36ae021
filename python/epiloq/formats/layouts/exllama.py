"""The order of GPTQ's fields that ExLlamaV2's kernels read, and vLLM's after ``gptq_shuffle``.

Channels 2 i and 2 i + 1 share a shift in the lower and the upper half of a word. With 3 bits each word has ten such
channels, and bit w of channels 30 and 31 is the last bit of either half of word w. Defined by ExLlamaV2
(``cuda/quant/qdq_*.cuh``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq.formats.layouts import words

_ORDERS = {bits: (*range(0, 32 // bits, 2), *range(1, 32 // bits, 2)) for bits in (2, 4)}
_PAIRS, _LAST = 5, (30, 31)


def pack(values: Tensor, bits: int) -> Tensor:
    """Unsigned ``[…, n]`` fields, n a multiple of ``words.period(bits)``, as int32 ``[…, n bits / 32]``."""
    if bits != 3:
        return words.pack(values, bits, _ORDERS.get(bits))
    fields = values.reshape(*values.shape[:-1], -1, 32).int()
    packed = torch.zeros(*fields.shape[:-1], 3, dtype=torch.int32, device=values.device)
    for word in range(3):
        for half, last in enumerate(_LAST):
            for pair in range(_PAIRS):
                packed[..., word] |= fields[..., 10 * word + 2 * pair + half] << 16 * half + 3 * pair
            packed[..., word] |= (fields[..., last] >> word & 1) << 16 * half + 15
    return packed.flatten(-2)


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """The inverse of `pack`: uint8 ``[…, length]``."""
    if bits != 3:
        return words.unpack(packed, bits, length, _ORDERS.get(bits))
    by_period = packed.reshape(*packed.shape[:-1], -1, 3)
    fields = torch.zeros(*by_period.shape[:-1], 32, dtype=torch.uint8, device=packed.device)
    for word in range(3):
        for half, last in enumerate(_LAST):
            for pair in range(_PAIRS):
                fields[..., 10 * word + 2 * pair + half] = by_period[..., word] >> 16 * half + 3 * pair & 7
            fields[..., last] |= ((by_period[..., word] >> 16 * half + 15 & 1) << word).to(torch.uint8)
    return fields.flatten(-2)
