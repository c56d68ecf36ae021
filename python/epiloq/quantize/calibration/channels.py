"""Mapping from each input channel of a linear layer to the output channel of another layer that produces it, found by
running the model.

The input of attention's output layer is linear in the values, head by head. With grouped heads several query heads use
the same value head, so this input has more channels than the value layer, and each of them corresponds to one of the
value layer's channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from epiloq.quantize.calibration.inputs import last_inputs

BASE = 8
"""A channel's number is found digit by digit, each encoded as a power of two from 2 to 2^8. 1 is not used, because an
input that does not depend on the producer would also scale by 1, nor smaller factors, for which float16 values may
become subnormal."""


@torch.no_grad()
def channel_map(producer: nn.Linear, consumer: nn.Linear, run: Callable[[], object]) -> Tensor | None:
    """The output channel of `producer` to which each input channel of `consumer` is proportional, int64 ``[K]``.

    The producer's rows are multiplied by powers of two, which are exact in floating point, and every channel of the
    consumer's input must scale by one of them. The result is None if one does not, or if a channel is always zero. A
    difference of one unit in the last place is allowed: a value that is subnormal in the model's dtype (in float16,
    below 2^-14) has more significant bits after the multiplication, so that a sum of such values may be rounded
    differently. Other readers of the producer are not detected. The layers are restored.

    Args:
        run: a run of the model in which the consumer is called.
    """
    exact = _input(consumer, run)
    numbers = torch.arange(producer.out_features, device=producer.weight.device)
    found = torch.zeros(consumer.in_features, dtype=torch.int64, device=exact.device)
    place = 1
    while place < producer.out_features or place == 1:
        digits = _followed(producer, consumer, run, exact, numbers // place % BASE)
        if digits is None:
            return None
        found += place * digits
        place *= BASE
    return found if bool((found < producer.out_features).all()) else None


def _followed(
    producer: nn.Linear, consumer: nn.Linear, run: Callable[[], object], exact: Tensor, digits: Tensor
) -> Tensor | None:
    """The digit of each of the consumer's channels, if its input multiplies the producer's rows by powers of two."""
    powers = 2.0 ** (digits + 1)
    with restored([producer]):
        producer.weight.mul_(powers.to(producer.weight.dtype)[:, None])
        if producer.bias is not None:
            producer.bias.mul_(powers.to(producer.bias.dtype))
        moved = _input(consumer, run)
    if moved.shape != exact.shape:
        return None
    limits = torch.finfo(exact.dtype)
    exact, moved = exact.double(), moved.double()
    largest = exact.abs().argmax(0, keepdim=True)
    exponents = (moved.gather(0, largest) / exact.gather(0, largest))[0].log2().round()
    inside = (exponents >= 1) & (exponents <= BASE)  # False for NaN, of channels that are zero.
    unit = limits.eps * exact.abs().clamp(min=2 * limits.tiny)
    if not inside.all() or not ((moved * 2.0**-exponents - exact).abs() <= unit).all():
        return None
    return exponents.to(torch.int64) - 1


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore their weights and biases afterwards. (Not every float16 number survives halving and doubling.)"""
    found = (getattr(module, name, None) for module in modules for name in ("weight", "bias"))
    tensors = [tensor for tensor in found if isinstance(tensor, Tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Temporarily convert float16 tensors to float32, where powers of two are exact; afterwards they are restored."""
    narrow = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype == torch.float16]
    before = [tensor.data for tensor in narrow]
    try:
        for tensor in narrow:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, value in zip(narrow, before, strict=True):
            tensor.data = value


def _input(layer: nn.Linear, run: Callable[[], object]) -> Tensor:
    # With other producer values the tokens may be routed to other experts, and none to this one.
    found = last_inputs({"": layer}, run).get("", layer.weight.new_empty(0, layer.in_features))
    return found.detach().reshape(-1, layer.in_features).clone()


def reduce_by_channel(values: Tensor, channels: Tensor | None, reduce: str) -> Tensor:
    """Reduce ``[K]`` values by "amax" or "mean" to one per distinct channel number; unchanged if `channels` is None."""
    if channels is None:
        return values
    distinct = values.new_zeros(int(channels.max()) + 1)
    return distinct.scatter_reduce(0, channels, values, reduce, include_self=False)[channels]
