"""Which output channel of one linear layer each input channel of another is made of, found by running the model.

What attention hands to its output layer is linear in the values, head by head, and grouped heads use a value head
several times over: the input of the output layer has more channels than the value layer, and each is one of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from epiloq.quantize.calibration.inputs import last_inputs

BASE = 8
"""A channel's number is found digit by digit, each as a power of two from 2 to 2^8: none is 1, by which what does not
depend on the producer would follow it, and none is less, for which float16 may have no normal numbers."""


@torch.no_grad()
def channel_map(producer: nn.Linear, consumer: nn.Linear, run: Callable[[], object]) -> Tensor | None:
    """For each input channel of `consumer` the output channel of `producer` it is proportional to, int64 ``[K]``.

    The producer's rows are multiplied by powers of two, which floating point follows exactly, and every channel of the
    consumer's input has to follow by one of them; None if it does not, or if a channel is zero throughout. It may be
    one unit in the last place off: a value that is subnormal in the model's dtype (in float16, below 2^-14) has more
    bits once it is multiplied, and what is summed from it may then round the other way. Whether something else reads
    the producer is not looked at. The layers end as they were.

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
    """The digit of each of the consumer's channels, if its input follows powers of two in the producer's rows."""
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
    """Their weights and biases may be changed meanwhile. (Not every float16 number survives halving and doubling.)"""
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
    """Its float16 tensors are float32 meanwhile, in which powers of two are exact; then they are what they were."""
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
    # Other values of a producer may lead tokens to other experts, and none to this one.
    found = last_inputs({"": layer}, run).get("", layer.weight.new_empty(0, layer.in_features))
    return found.detach().reshape(-1, layer.in_features).clone()


def alike(values: Tensor, channels: Tensor | None, reduce: str) -> Tensor:
    """``[K]`` values, those of channels with one number reduced ("amax", "mean") to one value; as they are for None."""
    if channels is None:
        return values
    distinct = values.new_zeros(int(channels.max()) + 1)
    return distinct.scatter_reduce(0, channels, values, reduce, include_self=False)[channels]
