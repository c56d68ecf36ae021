"""Static activation scales: one scale for all tokens of a layer's input, and the choice of layers that tolerate it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

import epiloq
from epiloq.observers import quantizer, watched
from epiloq.quantize.calibration.ranks import Ranks
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.grid import InputGrid
from epiloq.weights.rounding import check_finite

AUTO = "auto"
LARGEST_ERROR = 0.1
"""`AUTO` keeps an input dynamic if one scale for all tokens causes a larger relative output error than this (root mean
square over tokens). With a scale per token the error is 0.01 to 0.02."""
SAMPLED_WINDOWS = 4


@dataclass(frozen=True)
class Static:
    """Settings for static int8 inputs with a zero point.

    keep_dynamic
        Layers that get a scale per token instead: a shell-style pattern of their names; `AUTO` for layers whose error
        with one scale exceeds `LARGEST_ERROR` and layers that no input reached, such as unused experts; None for no
        layer.
    """

    keep_dynamic: str | None = None

    def keeps(self, names: Sequence[str], error: float) -> bool:
        """Whether layers that share an input keep a scale per token."""
        if self.keep_dynamic == AUTO:
            return error > LARGEST_ERROR
        return self.keep_dynamic is not None and any(fnmatchcase(name, self.keep_dynamic) for name in names)


@dataclass(frozen=True)
class InputErrors:
    """Output error caused by quantising a layer's input with a static or a dynamic scale; see `token_error`."""

    static: float
    dynamic: float
    kept_dynamic: bool


def input_grid(low: Tensor, high: Tensor) -> InputGrid:
    """Scale and zero point for inputs in a range, as chosen by ``epiloq.quantize_int8``."""
    ends = torch.stack([low, high]).float()
    check_finite("inputs", ends)
    scale, zero = quantizer(ends)
    assert zero is not None
    return InputGrid(scale.reshape(1), zero.reshape(1))


def static_int8(x: Tensor, grid: InputGrid) -> Tensor:
    """Round tokens ``[T, K]`` to int8 and back with one scale and zero point."""
    q, scale, zero = epiloq.quantize_int8(x.float(), scale=grid.scale, azp=grid.zero, symmetric=False)
    return _widened(q, scale, zero)


def dynamic_int8(x: Tensor, symmetric: bool = False) -> Tensor:
    """Round tokens ``[T, K]`` to int8 and back with a scale per token and, unless symmetric, a zero point."""
    return _widened(*epiloq.quantize_int8(x.float(), symmetric=symmetric))


def _widened(q: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    return (q.float() if zero is None else q.float() - zero) * scale


def token_error(x: Tensor, quantised: Tensor, weight: Tensor) -> float:
    """The root mean square, over tokens, of each token's relative output error ``|(x' - x) W^T| / |x W^T|``.

    Every token has the same weight. In language models a few tokens are a thousand times larger than the others; in a
    plain norm they would hide that a scale wide enough for them rounds all others to zero.

    Args:
        x, quantised: ``[T, K]``.
        weight: ``[N, K]``, the stacked weights of all layers that read x.
    """
    exact = (x.float() @ weight.t()).square().sum(-1)
    lost = ((quantised - x) @ weight.t()).square().sum(-1)
    some = exact > 0
    return float((lost[some] / exact[some]).mean().sqrt()) if some.any() else 0.0


class InputWatch:
    """The range of every distinct input of a block's layers, and the inputs of a few windows."""

    def __init__(self, groups: Sequence[Sequence[str]], layers: Mapping[str, nn.Linear]) -> None:
        self.groups = {names[0]: list(names) for names in groups}
        self.layers = {name: layers[name] for name in self.groups}
        self.ends: dict[str, tuple[Tensor, Tensor]] = {}
        self.samples: dict[str, list[Tensor]] = {name: [] for name in self.groups}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record the inputs of the layers."""
        with watched(self.layers, self._note):
            yield

    def _note(self, name: str, x: Tensor) -> None:
        if not x.numel():
            return
        self._widen(name, *x.detach().aminmax())
        if len(self.samples[name]) < SAMPLED_WINDOWS:
            self.samples[name].append(x.detach().reshape(-1, x.shape[-1]).float())

    def _widen(self, name: str, low: Tensor, high: Tensor) -> None:
        before = self.ends.get(name, (low, high))
        self.ends[name] = torch.minimum(low.to(before[0]), before[0]), torch.maximum(high.to(before[1]), before[1])

    def collect(self, ranks: Ranks) -> None:
        """Collect the records of all ranks on the first: all ranges, and the inputs of the first windows."""
        counts = {name: len(samples) for name, samples in self.samples.items()}
        seen = ranks.gather(({n: (low.cpu(), high.cpu()) for n, (low, high) in self.ends.items()}, counts))
        for source, (ends, counts) in enumerate(seen[1:], 1):
            for name, (low, high) in ends.items():
                self._widen(name, low, high)
            for name, count in counts.items():
                lacking = SAMPLED_WINDOWS - sum(of_rank[name] for _, of_rank in seen[:source])
                for number in range(min(lacking, count)):
                    own = self.samples[name][number] if source == ranks.rank else None
                    sample = ranks.move(own, source, 0)
                    if ranks.rank == 0 and sample is not None:
                        self.samples[name].append(sample)

    def freeze(
        self, weights: Mapping[str, Calibrated], settings: Static
    ) -> tuple[dict[str, InputGrid], dict[str, InputErrors]]:
        """The scales of layers that become static, and the errors of all layers.

        Raises ValueError for non-finite inputs, and for a layer without inputs that may not stay dynamic.
        """
        grids: dict[str, InputGrid] = {}
        errors: dict[str, InputErrors] = {}
        for first, names in self.groups.items():
            if first not in self.ends:
                if not settings.keeps(names, float("inf")):
                    raise ValueError(
                        f"calibrate: {', '.join(names)}: expected inputs to calibrate static scales, got none: "
                        f"give more text, or keep such layers dynamic (--keep-dynamic {AUTO})"
                    )
                errors |= dict.fromkeys(names, InputErrors(0.0, 0.0, kept_dynamic=True))
                continue
            try:
                grid = input_grid(*self.ends[first])
            except ValueError as error:
                raise ValueError(f"calibrate: {', '.join(names)}: {error}") from error
            x = torch.cat(self.samples[first])
            weight = torch.cat([weights[name].dequantize() for name in names])
            roundings = (partial(static_int8, grid=grid), dynamic_int8)
            found = [token_error(x, quantise(x), weight) for quantise in roundings]
            kept = settings.keeps(names, found[0])
            errors |= dict.fromkeys(names, InputErrors(found[0], found[1], kept))
            # Copies, because safetensors refuses tensors that share memory.
            grids |= {} if kept else {name: InputGrid(grid.scale.clone(), grid.zero.clone()) for name in names}
        return grids, errors
