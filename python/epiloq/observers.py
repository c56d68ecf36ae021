"""Observers of activation ranges, and the int8 quantisers derived from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import epiloq

BINS = 2048
# Parts of the whole range that HistogramMse tries for either end.
_PARTS = 48
_SMALLEST_PART = 0.05


class Observer(Protocol):
    """Called by `epiloq.quantize_` with each input of a layer; then returns the range to quantise."""

    def add(self, x: Tensor) -> None:
        """Add a batch of any shape. NaN and infinities make the range non-finite."""

    def ends(self) -> Tensor | None:
        """Lower and upper end of the range, float32 ``[2]``, or None before any value was added."""


class MinMax:
    """The whole range."""

    def __init__(self) -> None:
        self._ends: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        seen = torch.stack(x.detach().aminmax()).float()
        if self._ends is not None:
            seen = torch.stack((torch.minimum(self._ends[0], seen[0]), torch.maximum(self._ends[1], seen[1])))
        self._ends = seen

    def ends(self) -> Tensor | None:
        return self._ends


class Histogram:
    """Histogram with equal bins over the range so far. When the range grows, counts move to the bins that contain the
    old bins' centres."""

    def __init__(self) -> None:
        self._range = MinMax()
        self.counts = torch.zeros(BINS, dtype=torch.float64)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        before = self._range.ends()
        self._range.add(x)
        after = self._range.ends()
        assert after is not None
        if not after.isfinite().all():
            return
        middles = None if before is None else _middles(before)
        if middles is None or before is None or not torch.equal(before, after):
            old, self.counts = self.counts, torch.zeros(BINS, dtype=torch.float64, device=x.device)
            if middles is not None:
                self.counts.index_add_(0, _bins(middles, after), old)
        self.counts += torch.bincount(_bins(x.detach().float().flatten(), after), minlength=BINS)

    def whole(self) -> Tensor | None:
        return self._range.ends()


class Percentile(Histogram):
    """Range that contains the fraction `part` of the values, with equal fractions beyond either end."""

    def __init__(self, part: float = 0.9999) -> None:
        if not 0 < part <= 1:
            raise ValueError(f"Percentile: part: expected more than 0, at most 1, got {part}")
        super().__init__()
        self.part = part

    def ends(self) -> Tensor | None:
        whole = self.whole()
        if whole is None or not whole.isfinite().all() or self.part == 1:
            return whole
        beyond = (1 - self.part) / 2 * self.counts.sum()
        from_low, from_high = self.counts.cumsum(0), self.counts.flip(0).cumsum(0)
        low, high = (int((counts <= beyond).sum()) for counts in (from_low, from_high))
        edges = torch.linspace(float(whole[0]), float(whole[1]), BINS + 1)
        kept = torch.stack((edges[min(low, BINS - 1)], edges[max(BINS - high, 1)]))
        return kept.to(whole.device)


class HistogramMse(Histogram):
    """Range, widened to include 0, whose int8 quantiser minimises the squared error over the histogram."""

    def ends(self) -> Tensor | None:
        whole = self.whole()
        if whole is None or not whole.isfinite().all():
            return whole
        values = _middles(whole)
        ends = torch.stack((whole[0].clamp(max=0), whole[1].clamp(min=0)))
        parts = torch.linspace(1.0, _SMALLEST_PART, _PARTS, device=whole.device)
        # One end after the other, twice: each end's best depends little on where the other is.
        for end in (1, 0, 1, 0):
            candidates = ends.repeat(_PARTS, 1)
            candidates[:, end] = (whole[end].clamp(max=0) if end == 0 else whole[end].clamp(min=0)) * parts
            errors = ((_restored(values, candidates) - values).double().square() * self.counts).sum(1)
            ends = candidates[int(errors.argmin())]
        return ends


def _middles(ends: Tensor) -> Tensor:
    return ends[0] + (ends[1] - ends[0]) * ((torch.arange(BINS, device=ends.device) + 0.5) / BINS)


def _bins(values: Tensor, ends: Tensor) -> Tensor:
    width = (ends[1] - ends[0]).clamp(min=torch.finfo(torch.float32).tiny)
    return ((values - ends[0]) / width * BINS).to(torch.int64).clamp_(0, BINS - 1)


def _restored(values: Tensor, ends: Tensor) -> Tensor:
    """``[C, V]``: the values quantised and dequantised with each of C ranges, which include 0."""
    scale = ((ends[:, 1:] - ends[:, :1]) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    zero = torch.round(-128 - ends[:, :1] / scale)
    return (torch.clamp(torch.round(values / scale) + zero, -128, 127) - zero) * scale


OBSERVERS: dict[str, Callable[[], Observer]] = {"min-max": MinMax, "percentile": Percentile, "mse": HistogramMse}


def quantizer(ends: Tensor, *, symmetric: bool = False) -> tuple[Tensor, Tensor | None]:
    """Scale (float32) and zero point (int32) for a range, as computed by `epiloq.quantize_int8`."""
    _, scale, zero_point = epiloq.quantize_int8(ends.unsqueeze(0), symmetric=symmetric)
    return scale, zero_point


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode without gradients; each module's mode is restored afterwards.

    Samples then change no running statistics, and dropout does not affect the inputs of layers.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            # Not by `eval()`, which some models refuse or extend.
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def watched(layers: Mapping[str, nn.Module], note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``note(name, input)`` whenever one of the layers runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda module, args, kwargs: note(name, args[0] if args else kwargs["input"])

    with ExitStack() as handles:
        for name, layer in layers.items():
            handles.enter_context(layer.register_forward_pre_hook(hook(name), with_kwargs=True))
        yield


@torch.no_grad()
def input_quantizers(
    layers: Mapping[str, nn.Module],
    run: Callable[[], object],
    observer: Callable[[], Observer],
    *,
    symmetric: bool = False,
) -> list[dict[str, Any]]:
    """Input scale and zero point of each layer by name, from the range of its inputs during `run`.

    Raises ValueError for a layer that received no input, or one that is not finite or has no values (on meta).
    """
    observers = {name: observer() for name in layers}

    def note(name: str, x: Tensor) -> None:
        if x.is_meta:
            raise ValueError(
                f"quantize_: calibrate: expected inputs of {name!r} with values, got tensors on the device meta: load "
                "the model's weights first, or choose a scheme without static scales"
            )
        observers[name].add(x)

    with watched(layers, note):
        run()
    return [_parameters(name, seen.ends(), symmetric) for name, seen in observers.items()]


def _parameters(name: str, ends: Tensor | None, symmetric: bool) -> dict[str, Any]:
    if ends is None:
        raise ValueError(
            f"quantize_: calibrate: expected every chosen layer to run, but {name!r} saw no input; "
            "widen the sample inputs, or leave it out with filter_fn"
        )
    if not ends.isfinite().all():
        raise ValueError(f"quantize_: calibrate: expected finite inputs of {name!r}, got a range of {ends.tolist()}")
    # The two ends have the range of all inputs, so their quantiser parameters are those of all inputs.
    scale, zero_point = quantizer(ends, symmetric=symmetric)
    return {"input_scale": scale, "input_zero_point": zero_point}
