"""Models larger than memory: blocks are read from their files when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.io.architecture import renamed, skeleton_without_parameters, untie_
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load_float
from epiloq.formats.io.unused import check_types, check_unused
from epiloq.models.conv1d import transpose_
from epiloq.quantize.calibration.residence import Resident
from epiloq.quantize.calibration.store import Store
from epiloq.quantize.plan import unstack_experts_for_format_

_MAPPED = 1 << 26
"""Bytes of mapped files that are read before their pages are released."""


class Streamed(Resident):
    """Blocks that are read when they are processed and then released; the rest of the model is in memory.

    Parameters that are not loaded are on the meta device. If experts were unstacked or a layer transposed they are
    views of the file's tensor: the offset in the storage determines the part.
    """

    def __init__(
        self, model: nn.Module, source: Checkpoint, originals: Mapping[str, Tensor], lists: tuple[str, ...]
    ) -> None:
        self.model, self.source, self.originals = model, source, originals
        self.origins = {_storage(tensor): name for name, tensor in originals.items()}
        self.blocks = {
            f"{name}.{child}": block for name in lists for child, block in model.get_submodule(name).named_children()
        }
        self._read = 0
        inside = {id(parameter) for block in self.blocks.values() for parameter in block.parameters()}
        rest = {name: p for name, p in model.named_parameters() if id(p) not in inside}
        _replace(model, {id(p): self.value(name, p) for name, p in rest.items()})
        for name, buffer in _kept_buffers(model).items():
            buffer.copy_(self.value(name, buffer))
        self._forget()

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """A copy of a parameter's values from the files, in its type and memory order."""
        stored = self.origins.get(_storage(parameter), name)
        if stored in self.source.files:
            tensor = self.source.tensor(stored)
            offset = tensor.storage_offset() + parameter.storage_offset()
            tensor = tensor.as_strided(parameter.shape, parameter.stride(), offset)
        else:
            tensor = self.source.tensor(name)
        found = tensor.to(parameter.dtype, copy=True)
        self._read += found.nbytes
        if self._read > _MAPPED:
            self._forget()
        return found

    def values(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """See `Resident`; they are read one after the other."""
        for name, parameter in model.named_parameters():
            yield name, self.value(name, parameter) if parameter.is_meta else parameter

    @contextmanager
    def held(self, name: str, block: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
        """See `Resident`; what was done to the block is forgotten at the end."""
        place = torch.device(device or "cpu")
        absent = {id(p): p for p in block.parameters() if p.is_meta}
        found = {id(p): self.value(f"{name}.{n}", p).to(place) for n, p in block.named_parameters() if p.is_meta}
        present = _replace(block, found)
        self._forget()
        for module in block.modules():
            _move_buffers(module, place)
        try:
            yield place
        finally:
            _replace(block, {id(new): absent[old] for old, new in present.items()})
            for module in block.modules():
                _move_buffers(module, torch.device("cpu"))

    @contextmanager
    def on_demand(self) -> Iterator[None]:
        """See `Resident`: each block is read when it is called, and forgotten when it returns."""
        before = {
            name: {key: value for key, value in vars(block).items() if key == "forward"}
            for name, block in self.blocks.items()
        }
        try:
            for name, block in self.blocks.items():
                block.forward = self._reading(name, block)
            yield
        finally:
            for name, block in self.blocks.items():
                del block.forward
                vars(block).update(before[name])

    def _reading(self, name: str, block: nn.Module) -> Any:
        forward = block.forward

        def read_and_run(*args: Any, **kwargs: Any) -> Any:
            with self.held(name, block, None):
                return forward(*args, **kwargs)

        return read_and_run

    def _forget(self) -> None:
        """Release the pages of files that were read."""
        self.source.close()
        self._read = 0


def streamed(source: Checkpoint, layout: str, lists: tuple[str, ...]) -> Streamed | str:
    """A model whose blocks are streamed, with experts unstacked as the format needs; or the reason why the whole
    model must be in memory.

    Args:
        lists: names of the lists of blocks.

    Raises FormatError for a model that cannot be built, or that has fewer layers than its files.
    """
    model = skeleton_without_parameters(source)
    if model is None:
        return "config.json names no dtype"
    originals: dict[str, Tensor] = dict(model.named_parameters())
    origins = {_storage(tensor): name for name, tensor in originals.items()}
    model = transpose_(renamed(model, source))
    check_types(model, source)
    untie_(model, source)
    unstack_experts_for_format_(model, layout)
    wanted = {name: (origins.get(_storage(p), name), p.shape) for name, p in model.named_parameters()}
    wanted |= {name: (name, buffer.shape) for name, buffer in _kept_buffers(model).items()}
    used = set[str]()
    for name, (origin, shape) in wanted.items():
        stored = origin if origin in source.files else name
        if stored not in source.files:
            return f"transformers makes {name} of other tensors"
        expected = originals[origin].shape if stored == origin and origin in originals else shape
        if tuple(source.entries[stored].shape) != tuple(expected):
            return f"{name} has another shape in the files"
        used.add(stored)
    check_unused(model, source.files.keys() - used - model.state_dict().keys(), source)
    return Streamed(model, source, originals, lists)


def opened(source: Checkpoint, layout: str, lists: tuple[str, ...], whole: bool = False) -> tuple[nn.Module, Resident]:
    """Open the model with experts unstacked as the format needs, and with blocks left in the files if they can be
    read one by one.

    whole
        Whether the whole model must be in memory.
    """
    found = None if whole else streamed(source, layout, lists)
    if isinstance(found, Streamed):
        return found.model, found
    model = transpose_(renamed(load_float(source), source))
    unstack_experts_for_format_(model, layout)
    return model, Resident()


def kept_values(store: Store, blocks: Sequence[str]) -> Callable[[str], Tensor]:
    """Parameters and buffers of finished blocks other than quantised weights, by their names in the model."""

    @lru_cache(maxsize=1)
    def state(block: str) -> dict[str, Tensor]:
        return store.state(block)

    def value(name: str) -> Tensor:
        block = next(block for block in blocks if name.startswith(f"{block}."))
        return state(block)[name.removeprefix(f"{block}.")]

    return value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are stored in files."""
    state, parameters = model.state_dict(keep_vars=True), dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in state.items() if name not in parameters}


def _replace(module: nn.Module, by: Mapping[int, Tensor]) -> dict[int, nn.Parameter]:
    """Replace parameters, given by id, with tensors wherever they occur; returns the new parameters by the old ids."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for leaf, parameter in child._parameters.items():
            if parameter is not None and id(parameter) in by:
                value = by[id(parameter)]
                new = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
                child._parameters[leaf] = made.setdefault(id(parameter), new)
    return made


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for leaf, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[leaf] = buffer.to(device)
