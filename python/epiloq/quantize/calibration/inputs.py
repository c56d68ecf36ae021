"""The producers of linear layers' inputs, found by running the model rather than from class names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from epiloq.observers import evaluating, watched
from epiloq.quantize.calibration.ranks import Ranks, balanced
from epiloq.quantize.calibration.statistics import InputStatistics
from epiloq.weights.tensor_checks import identity

if TYPE_CHECKING:
    from epiloq.quantize.calibration.guide import TokenWeights

Calibrate = Callable[[nn.Module], object]
PROBE_TOKENS = 16


@dataclass
class Observed:
    """A model's run on sample inputs."""

    amax: dict[str, Tensor] = field(default_factory=dict)
    """The largest magnitude in each input channel of each linear layer, float32 ``[in_features]``."""
    feeds: dict[str, list[str]] = field(default_factory=dict)
    """Candidates for folding: a norm or linear layer, and the linear layers that appear to read its output."""
    probe: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments of the model's first call, with token sequences shortened."""


class _Watch:
    """Hooks that fill an `Observed`. Candidates are found in the model's first call."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen, self.calls = model, Observed(), 0
        self.made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.last_linear: dict[int, str] = {}

    def before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls += 1
        if self.seen.probe is None:
            self.seen.probe = tree_map(_shortened, args), tree_map(_shortened, kwargs)

    def before_linear(self, name: str, linear: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if x.numel():
            amax = x.detach().abs().reshape(-1, x.shape[-1]).amax(0).float()
            self.seen.amax[name] = torch.maximum(self.seen.amax[name], amax) if name in self.seen.amax else amax
        if self.calls > 1 or any(name in consumers for consumers in self.seen.feeds.values()):
            return
        made, producer = self.made.get(id(x), (None, ""))
        if made is None or made() is not x:
            # Not directly a norm's output; possibly a gated product with the last linear layer of this width.
            producer = self.last_linear.get(linear.in_features, "")
        if producer:
            self.seen.feeds.setdefault(producer, []).append(name)

    def after_linear(self, name: str, linear: nn.Linear, args: object, output: object) -> None:
        self.last_linear[linear.out_features] = name

    def after_norm(self, name: str, norm: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            self.made[id(output)] = weakref.ref(output), name

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as handles:
            keep = handles.enter_context
            keep(self.model.register_forward_pre_hook(self.before_model, with_kwargs=True))
            for name, module in self.model.named_modules():
                weight = getattr(module, "weight", None)
                if isinstance(module, nn.Linear):
                    keep(module.register_forward_pre_hook(partial(self.before_linear, name), with_kwargs=True))
                    keep(module.register_forward_hook(partial(self.after_linear, name)))
                elif isinstance(weight, Tensor) and weight.ndim == 1:
                    keep(module.register_forward_hook(partial(self.after_norm, name)))
            yield


def _shortened(value: object) -> object:
    is_tokens = isinstance(value, Tensor) and not value.is_floating_point() and value.ndim == 2
    return value[:, :PROBE_TOKENS] if is_tokens else value  # type: ignore[index]


def observe(model: nn.Module, calibrate: Calibrate) -> Observed:
    """Run ``calibrate(model)`` and record each linear layer's inputs and their apparent producers."""
    watch = _Watch(model)
    with evaluating(model), watch.attached():
        calibrate(model)
    return watch.seen


def outputs(model: nn.Module, seen: Observed) -> list[Tensor]:
    """The floating-point tensors that the model returns for the probe."""
    if seen.probe is None:
        raise ValueError("calibrate: expected a function that calls the model, but the model was not called")
    args, kwargs = seen.probe
    with evaluating(model):
        found = tree_leaves(model(*args, **kwargs))
    return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@torch.no_grad()
def last_inputs(layers: Mapping[str, nn.Linear], run: Callable[[], object]) -> dict[str, Tensor]:
    """The last input of each layer in a run."""
    found: dict[str, Tensor] = {}
    with watched(layers, found.__setitem__):
        run()
    return found


@dataclass
class InputGroup:
    """Layers that share an input.

    owner
        The rank that quantises the layers.
    statistics
        Statistics of their input in all windows; None on other ranks than the owner.
    """

    names: list[str]
    owner: int
    statistics: InputStatistics | None


@torch.no_grad()
def input_groups(
    layers: Mapping[str, nn.Linear],
    strands: Sequence[Sequence[Callable[[], object]]],
    ranks: Ranks | None = None,
    guide: Sequence[TokenWeights] | None = None,
) -> list[InputGroup]:
    """Group layers by the input that they share in the first run, with the statistics of all runs of all ranks.

    Args:
        strands: this rank's runs. Statistics are summed within each strand, then over strands, in order.
        guide: weights of tokens for each of this rank's runs; each layer's weights are a weighting of its input.

    Raises:
        ValueError: inputs that are NaN, infinite, or so large that their squares overflow; the message names the
            layers.
    """
    ranks = ranks or Ranks()
    names = ranks.share(shared(layers, strands[0][0]) if ranks.rank == 0 else None)
    sizes = [(layers[group[0]].in_features, sum(layers[name].out_features for name in group)) for group in names]
    owners = balanced([k * k * (k + n) for k, n in sizes], ranks.world)
    sums: list[list[InputStatistics]] = [[] for _ in names]
    of_runs = iter(guide or ())
    for strand in strands:
        weights = [
            [torch.cat([of_run[name] for name in group], 1) for group in names]
            for of_run in islice(of_runs, len(strand))
        ]
        found = [_statistics(layers[g[0]], weights[0][i].shape[1] if weights else 0) for i, g in enumerate(names)]
        _fill({group[0]: statistics for group, statistics in zip(names, found, strict=True)}, layers, strand, weights)
        for own, statistics in zip(sums, found, strict=True):
            # The first rank's strands come first in the sum, so they can be accumulated directly.
            if own and ranks.rank == 0:
                own[0].merge(statistics)
            else:
                own.append(statistics)
    counts = ranks.gather([[statistics.tokens for statistics in own] for own in sums])
    groups = [
        InputGroup(group, owner, _collected(sums, index, owner, counts, ranks))
        for index, (group, owner) in enumerate(zip(names, owners, strict=True))
    ]
    with ranks.together():
        for group in groups:
            if group.statistics is not None:
                with naming(group.names):
                    group.statistics.check_finite()
    return groups


@contextmanager
def naming(layers: Sequence[str]) -> Iterator[None]:
    """Name the layers in the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"calibrate: {', '.join(layers)}: {error}") from error


def _statistics(layer: nn.Linear, weightings: int) -> InputStatistics:
    return InputStatistics(layer.in_features, device=layer.weight.device, weightings=weightings)


def _fill(
    found: Mapping[str, InputStatistics],
    layers: Mapping[str, nn.Linear],
    runs: Sequence[Callable[[], object]],
    weights: Sequence[Sequence[Tensor]],
) -> None:
    of_run: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        found[name].add(x, of_run.get(name))

    with watched({name: layers[name] for name in found}, note):
        for index, run in enumerate(runs):
            if weights:
                of_run = dict(zip(found, weights[index], strict=True))
            run()


def _collected(
    sums: list[list[InputStatistics]], index: int, owner: int, counts: Sequence[list[list[int]]], ranks: Ranks
) -> InputStatistics | None:
    """On the owner, the sum of one input's statistics over all ranks, in order. Those that were sent are released."""
    own, sums[index] = sums[index], []
    total: InputStatistics | None = None
    for source, of_rank in enumerate(counts):
        for number, tokens in enumerate(of_rank[index]):
            part = own[number] if source == ranks.rank else None
            if total is not None and not tokens:
                continue
            part = ranks.move(part, source, owner)
            if ranks.rank == owner and part is not None:
                if total is None:
                    total = part
                else:
                    total.merge(part)
    return total


@torch.no_grad()
def shared(layers: Mapping[str, nn.Linear], run: Callable[[], object]) -> list[list[str]]:
    """Group layers by the input that they share in a run."""
    seen: dict[str, list[object]] = {name: [] for name in layers}
    alive: list[Tensor] = []  # keeps ids unique

    def note(name: str, x: Tensor) -> None:
        alive.append(x)
        seen[name].append((identity(x), x._version))

    with watched(layers, note):
        run()
    # A layer that the first call did not reach (such as an expert) forms its own group.
    groups: dict[object, list[str]] = {}
    for name, inputs in seen.items():
        groups.setdefault(tuple(inputs) or name, []).append(name)
    return list(groups.values())
