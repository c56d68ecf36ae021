"""A model as a chain of blocks, found by structure, and the inputs of each block without running the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from epiloq.layer_filter import Filter
from epiloq.quantize.calibration.inputs import PROBE_TOKENS
from epiloq.quantize.calibration.on_text import needing_more_than_text, run_on_text


def block_lists(model: nn.Module, takes: Filter) -> list[str]:
    """Names of the outermost ``ModuleList``s that contain weights to quantise, ordered by the number of weights, then
    by length; of ``Sequential``s if no ``ModuleList`` contains any. Raises ValueError if there is none.
    """
    found = _lists(model, takes)
    if not found:
        raise ValueError(
            "calibrate: model: expected linear layers to quantise inside a ModuleList or Sequential of repeated "
            "blocks, found none; epiloq.quantize_ and save_pretrained quantise layers anywhere, without calibration"
        )
    return found


def _lists(model: nn.Module, takes: Filter) -> list[str]:
    return _outermost(model, nn.ModuleList, takes) or _outermost(model, nn.Sequential, takes)


def other_lists(model: nn.Module, takes: Filter, used: Iterable[str]) -> str:
    """The lists of blocks other than those in use, for messages: "decoder.layers (6 blocks)"; "" if there are none."""
    lists = [name for name in _lists(model, takes) if name not in set(used)]
    return ", ".join(f"{name} ({_counted(model.get_submodule(name))})" for name in lists)


def _counted(blocks: Any) -> str:
    return "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"


def _outermost(model: nn.Module, kind: type[nn.ModuleList | nn.Sequential], takes: Filter) -> list[str]:
    lists = {n: m for n, m in model.named_modules() if n and isinstance(m, kind)}
    weights = {n: _weights(m, n, takes) for n, m in lists.items()}
    ordered = sorted(lists, key=lambda n: (weights[n], len(lists[n])), reverse=True)
    found: list[str] = []
    for name in ordered:
        apart = all(not name.startswith(f"{other}.") and not other.startswith(f"{name}.") for other in found)
        if weights[name] and apart:
            found.append(name)
    return found


def find_blocks(model: nn.Module, takes: Filter, names: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, in order.

    They are the children of the first of `block_lists`.
    `names` overrides the choice. Raises ValueError if there is none, or if blocks share modules or weights.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    if names is None:
        names = block_lists(model, takes)[:1]
    blocks: dict[str, nn.Module] = {}
    for name in [names] if isinstance(names, str) else names:
        if name not in lists:
            there = other_lists(model, takes, ()) or "none"
            raise ValueError(
                f"calibrate: blocks: expected the name of a ModuleList, got {name!r}; those with layers to quantise: "
                f"{there}"
            )
        children = {f"{name}.{child}": module for child, module in lists[name].named_children()}
        parameters = Counter(id(p) for block in children.values() for p in block.parameters())
        if len(children) < len(lists[name]) or any(count > 1 for count in parameters.values()):
            raise ValueError(
                f"calibrate: blocks: expected blocks of their own weights, but some in {name!r} share them; "
                f"{_instead(model, takes, [name])}"
            )
        blocks |= children
    return blocks


def _instead(model: nn.Module, takes: Filter, used: Iterable[str]) -> str:
    """What to do if the blocks in use cannot be calibrated."""
    others = other_lists(model, takes, used)
    if not others:
        return "epiloq.quantize_ and save_pretrained quantise layers anywhere, without calibration"
    return f"name another list by epiloq quantize --blocks, whose layers alone are then quantised: {others}"


@contextmanager
def naming_other_lists(model: nn.Module, takes: Filter, blocks: Iterable[str]) -> Iterator[None]:
    """Add to a `NotAChain` of these blocks, given by name, which other lists there are."""
    try:
        yield
    except NotAChain as error:
        used = {block.rpartition(".")[0] for block in blocks}
        raise NotAChain(f"{error} ({', '.join(sorted(used))}); {_instead(model, takes, used)}") from None


class NotAChain(ValueError):
    """Blocks that do not run in order, each on the output of the one before."""


def linears_of(block: nn.Module, prefix: str, takes: Filter) -> dict[str, nn.Linear]:
    """The linear layers of a block to quantise, by their names in the model."""
    named = ((f"{prefix}.{name}" if name else prefix, module) for name, module in block.named_modules())
    return {name: module for name, module in named if isinstance(module, nn.Linear) and takes(module, name)}


def _weights(module: nn.Module, name: str, takes: Filter) -> int:
    return sum(layer.weight.numel() for layer in linears_of(module, name, takes).values())


class _Hidden:
    """Placeholder for the hidden states among a block's arguments."""


HIDDEN = _Hidden()


@dataclass(frozen=True)
class Call:
    """A block's arguments other than its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def filled(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with hidden states, on their device."""

        def fill(value: Any) -> Any:
            if value is HIDDEN:
                return hidden
            return value.to(hidden.device) if isinstance(value, Tensor) else value

        return tuple(tree_map(fill, arg) for arg in self.args), {k: tree_map(fill, v) for k, v in self.kwargs.items()}

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """The block's output hidden states."""
        args, kwargs = self.filled(hidden)
        return first(block(*args, **kwargs))


def first(output: Any) -> Tensor:
    """The hidden states among a block's outputs."""
    return output if isinstance(output, Tensor) else output[0]


@dataclass
class Recorded:
    """Arguments of a model's blocks: hidden states of the first block, all other arguments of every block."""

    hidden: list[Tensor]
    """One for each window, on the CPU."""
    calls: list[list[Call]]
    """``calls[block][window]``, on the CPU; equal tensors are stored once."""
    forms: Sequence[Any] = ()
    """Each block's output on a few tokens."""


@torch.no_grad()
def record(model: nn.Module, blocks: Sequence[nn.Module], windows: Sequence[Tensor]) -> Recorded:
    """Run the model on windows of tokens, ``[1, n]`` each, with its blocks replaced by recorders.

    Raises NotAChain if a block's input is not the previous block's output, for example if the model computes something
    in between, or if blocks pass on more than hidden states, and ValueError if it does not run on text alone.
    """
    device = parameter_device(model)
    with without_cache(model):
        recorder = _Recorder(_probe(model, blocks, windows[0][:, :PROBE_TOKENS].to(device)))
        with _replaced(blocks, recorder.stand_in):
            for window in windows:
                with suppress(_LastBlockReached):
                    run_on_text(model, window.to(device))
                recorder.alive.clear()
    return recorder.found


def parameter_device(model: nn.Module) -> torch.device:
    """Device of the first parameter that has values."""
    return next(parameter.device for parameter in model.parameters() if not parameter.is_meta)


class _Recorder:
    """Replacement of a block that records its arguments and returns its hidden states unchanged."""

    def __init__(self, forms: Sequence[Any]) -> None:
        self.forms = forms
        self.found = Recorded([], [[] for _ in forms], forms)
        self.pool: list[Tensor] = []
        self.alive: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of this window, kept alive so that their ids stay unique, each with its stored copy."""

    def keep(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.alive:
            self.alive[id(value)] = value, _pooled(value.detach().cpu(), self.pool)
        return self.alive[id(value)][1]

    def stand_in(self, index: int, *args: Any, **kwargs: Any) -> Any:
        hidden, call = _split(args, kwargs)
        if index == 0:
            self.found.hidden.append(hidden.cpu())
        kept = Call(
            tuple(tree_map(self.keep, arg) for arg in call.args),
            {name: tree_map(self.keep, value) for name, value in call.kwargs.items()},
        )
        self.found.calls[index].append(kept)
        if index + 1 == len(self.forms):
            raise _LastBlockReached
        return _like(self.forms[index], hidden)


class _LastBlockReached(Exception):
    """Raised to end a run of the model after its last block."""


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Temporarily disable the key-value cache of a transformers model, which would grow with each run of a block."""
    config = getattr(model, "config", None)
    configs = [] if config is None else [config, getattr(config, "get_text_config", lambda: config)()]
    before = [getattr(c, "use_cache", None) for c in configs]
    for c in configs:
        c.use_cache = False
    try:
        yield
    finally:
        for c, value in zip(configs, before, strict=True):
            c.use_cache = value


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Temporarily compute no gradients of the model's own parameters."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.requires_grad_(False)
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)


@contextmanager
def bypassing_blocks(blocks: Sequence[nn.Module], forms: Sequence[Any], hidden: Tensor) -> Iterator[None]:
    """Run the model without its blocks: the last one returns `hidden`. `forms` as in `Recorded`."""

    def stand_in(index: int, *args: Any, **kwargs: Any) -> Any:
        return _like(forms[index], hidden if index + 1 == len(forms) else _split(args, kwargs)[0])

    with _replaced(blocks, stand_in):
        yield


def _like(form: Any, hidden: Tensor) -> Any:
    """Hidden states in the form in which a block returns them."""
    return hidden if isinstance(form, Tensor) else (hidden, *form[1:])


@contextmanager
def _replaced(blocks: Sequence[nn.Module], stand_in: Callable[..., Any]) -> Iterator[None]:
    with forwards_restored(blocks):
        for index, block in enumerate(blocks):
            block.forward = lambda *args, _index=index, **kwargs: stand_in(_index, *args, **kwargs)
        yield


@contextmanager
def forwards_restored(blocks: Collection[nn.Module]) -> Iterator[None]:
    """Afterwards blocks have the ``forward`` that they have now, be it their own or their class's."""
    before = [vars(block).get("forward") for block in blocks]
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """The hidden states, that is, the first tensor among the arguments, and the other arguments."""
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            return value, Call((*args[:position], HIDDEN, *args[position + 1 :]), kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return value, Call(args, {**kwargs, name: HIDDEN})
    raise ValueError("calibrate: blocks: expected blocks that are called with a tensor")


def _pooled(value: Tensor, pool: list[Tensor]) -> Tensor:
    for known in pool:
        if known.shape == value.shape and known.dtype == value.dtype and torch.equal(known, value):
            return known
    pool.append(value)
    return value


def _probe(model: nn.Module, blocks: Sequence[nn.Module], tokens: Tensor) -> list[Any]:
    """Each block's output on a few tokens, after checking that blocks form a chain."""
    seen: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
    with ExitStack() as handles:
        for index, block in enumerate(blocks):
            handles.enter_context(
                block.register_forward_hook(
                    lambda m, args, kwargs, out, index=index: seen.__setitem__(index, (args, kwargs, out)),
                    with_kwargs=True,
                )
            )
        handles.enter_context(needing_more_than_text(model))
        run_on_text(model, tokens)
    if list(seen) != list(range(len(blocks))):
        raise NotAChain("calibrate: blocks: expected every block to run, in order")
    for index in range(len(blocks) - 1):
        output = seen[index][2]
        hidden, call = _split(*seen[index + 1][:2])
        passed = {id(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)} - {id(hidden)}
        others = (id(leaf) for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor))
        same = torch.allclose(first(output), hidden, rtol=0, atol=0, equal_nan=True)
        if not same or passed & set(others):
            raise NotAChain(
                f"calibrate: blocks: expected a chain, but the input of block {index + 1} is not the output of block "
                f"{index} alone"
            )
    return [seen[index][2] for index in range(len(blocks))]
