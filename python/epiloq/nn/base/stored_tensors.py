"""StoredTensors: stored parameters, and the tensors that kernels read, derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq import _core
from epiloq._torch.calls import PLAIN, is_transformed
from epiloq._torch.parameters import FrozenParameter
from epiloq.nn.base.averages import leave_out_of_averages

_Layer = TypeVar("_Layer", bound="StoredTensors")

_STALE = -1  # no tensor's version
_WRITTEN: Any = ("", _STALE, None)  # a source that no layer has


class _Made(NamedTuple):
    """Tensors derived from the stored ones."""

    sources: tuple[tuple[str, Tensor | None, int | None], ...]
    """The name, tensor and version of each stored one; another one if it may have been written to since."""
    value: Any
    own: frozenset[int]
    """The ids of tensors in `value` that share no memory with stored ones."""
    follows: bool
    """Whether `value` consists of tensors that share memory with stored ones, and so follows writes to them."""
    tensors: tuple[tuple[str, Tensor | None], ...]
    """The name of each stored one, and the tensor."""
    fresh: bool = True
    """Whether graphs may use `value`: not after a write that it does not follow."""


class Reader(Protocol):
    """Something that keeps tensors derived from those of several layers."""

    def renew(self) -> None: ...


class StoredTensors(nn.Module):
    """A module whose state dict consists of parameters without gradients.

    They may be loaded, copied or assigned individually and in any order, also onto "meta". The tensors derived from
    them for the kernels, `_made`, are updated automatically. Casts convert only `FOLLOWS`; integers, float8 and
    scales keep their types and strides.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Maps names in files, and in state dicts of earlier versions, to names of parameters."""

    FOLLOWS: ClassVar[frozenset[str]] = frozenset({"bias"})
    """Parameters whose dtype is changed by casts and loading."""

    _reader: Reader | None = None
    """Told after the layer's tensors were loaded, moved or replaced."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = torch.get_default_dtype() if dtype is None else dtype
        self._held: _Made | None = None
        self._names: frozenset[str] = frozenset()

    def _store(self, name: str, tensor: Tensor | None) -> None:
        self._names |= {name}
        self.register_parameter(name, None if tensor is None else FrozenParameter(tensor.detach()))

    def _stored(self, name: str) -> Tensor | None:
        parameters = self._parameters
        # A parameter that torch.nn.utils or other code has removed may be a plain attribute.
        return parameters[name] if name in parameters else cast("Tensor | None", getattr(self, name))

    def _all_stored(self, names: tuple[str, ...]) -> list[Any]:
        parameters = self._parameters
        try:
            return [parameters[name] for name in names]
        except KeyError:
            return [self._stored(name) for name in names]

    def file_state(self) -> dict[str, Tensor]:
        """The state dict with the names and in the form used in files; loading accepts either."""
        names = {name: given for given, name in self.RENAMED.items()}
        return {names.get(name, name): t.detach() for name, t in self._parameters.items() if t is not None}

    def _make(self) -> Any:
        """Derive the kernels' tensors from the stored ones: a tensor or other value, or a tuple of these."""
        return None

    @property
    def _made(self) -> Any:
        """The kernels' tensors, recomputed if a stored tensor has changed."""
        held = self._held
        if is_compiling():
            # A graph uses the derived tensors if they were derived from these sources, and otherwise derives them. It
            # does not compare versions, so copies of a tensor that is trained are made in the graph.
            usable = (
                held is not None
                and held.fresh
                and all(
                    self._stored(name) is tensor and not (held.own and tensor is not None and tensor.requires_grad)
                    for name, tensor in held.tensors
                )
            )
            return cast(_Made, held).value if usable else self._make()
        if held is not None and _core.are_unchanged(self._parameters, held.sources):
            return held.value
        return self._made_anew()

    def _made_anew(self) -> Any:
        sources = [(name, self._stored(name)) for name in self._parameters]
        present = {name: tensor for name, tensor in sources if tensor is not None}
        if len({tensor.device for tensor in present.values()}) > 1:
            where = ", ".join(f"{name} on {tensor.device}" for name, tensor in present.items())
            raise ValueError(f"{type(self).__name__}: expected all tensors on one device, got {where}")
        # Inference tensors are avoided, because they could not be used in training later.
        with torch.no_grad(), torch.inference_mode(False):
            value = self._make()
            if is_transformed() or not all(type(tensor) in PLAIN for tensor in present.values()):
                return value
            if not self._names <= self._parameters.keys():
                # Others have replaced parameters by attributes, whose changes cannot be seen: replicas of
                # DataParallel, FSDP's views of flat parameters, parametrisations, hooks that compute a tensor.
                self._held = None
                return value
            stored = {tensor.untyped_storage()._cdata for tensor in present.values()}
            own = _apart_from(stored, value)
            if self._held is not None and own:
                value = _in_place(self._held, value, own)
                own = _apart_from(stored, value)
        follows = isinstance(value, tuple) and not own and all(part is None or _is_tensor(part) for part in value)
        versions = tuple((name, tensor, self._watch(tensor, follows)) for name, tensor in sources)
        self._held = _Made(versions, value, own, follows, tuple(sources))
        return value

    def _watch(self, tensor: Tensor | None, follows: bool) -> int | None:
        """Watch a stored tensor for writes. Returns its version; `_STALE` if it may be written to unseen; None if its
        writes need not be counted, or are not."""
        if tensor is None:
            return None
        if isinstance(tensor, FrozenParameter):
            tensor.report_to(self)
        elif tensor.requires_grad and not follows:
            return _STALE
        return None if follows else _version_of(tensor)

    def _mark_stale(self, replaced: bool = False) -> None:
        """Derive the kernels' tensors anew in the next call, in the same memory, unless they follow writes and no
        stored tensor's memory was `replaced`. Until a call in eager mode has done so, graphs derive them."""
        held = self._held
        if held is not None and held.fresh and (replaced or not held.follows):
            self._held = held._replace(sources=(_WRITTEN, *held.sources), fresh=False)

    def _mark_aliased(self) -> None:
        """Derive them anew in the next call in eager mode: others have a tensor's memory, and may write to it."""
        held = self._held
        if held is not None and not held.follows and held.sources[0] is not _WRITTEN:
            self._held = held._replace(sources=(_WRITTEN, *held.sources))

    def _settle(self) -> str | None:
        """Called after tensors were replaced: keep them as frozen parameters, and update the derived tensors.

        If all tensors are present this is done immediately, so that captured and compiled graphs see it too. Returns
        an error text if their values are invalid.
        """
        for name, parameter in self._parameters.items():
            if type(parameter) is nn.Parameter and not parameter.requires_grad:
                self._parameters[name] = FrozenParameter(parameter.data)
        wrong = self._derive()
        if self._reader is not None:
            self._reader.renew()
        return wrong

    def _derive(self) -> str | None:
        """Derive the kernels' tensors if all stored ones are present. Returns an error text if values are invalid."""
        tensors = [tensor for tensor in self._parameters.values() if tensor is not None]
        there = all(type(tensor) in PLAIN and not tensor.is_meta for tensor in tensors)
        if not there or len({tensor.device for tensor in tensors}) > 1:
            self._held = None
            return None
        try:
            self._made_anew()
        except ValueError as error:  # uninitialised memory may contain any value
            self._held = None
            return str(error)
        return None

    def _apply(self: _Layer, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Layer:
        tensors = {name: tensor for name, tensor in self._parameters.items() if tensor is not None}
        kept = {id(tensor) for name, tensor in tensors.items() if name not in self.FOLLOWS}

        def keeping(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            if id(tensor) in kept and (new.dtype != tensor.dtype or new.stride() != tensor.stride()):
                new = tensor.to(new.device)
            # If torch swaps tensors, it makes a parameter of the result, which must not be one already.
            return new.detach() if isinstance(new, FrozenParameter) else new

        super()._apply(keeping, recurse)  # type: ignore[no-untyped-call]
        for tensor in tensors.values():
            dtype = fn(torch.empty(0, dtype=self._dtype, device=tensor.device)).dtype
            self._dtype = dtype if dtype.is_floating_point else self._dtype
            break
        self._settle()
        return self

    def _fitting(self, name: str, given: Tensor, held: Tensor) -> Tensor | str:
        """A tensor to load, in the layer's type; or the text of an error."""
        if given.shape != held.shape or not _same_kind(given.dtype, held.dtype):
            return expected(held, given)
        return given if name in self.FOLLOWS else given.to(held.dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for old, new in self.RENAMED.items():
            if prefix + old in state_dict and prefix + new not in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)  # load_state_dict passes a copy
        fitting: dict[str, Tensor] = {}
        for name, held in self._parameters.items():
            given = state_dict.get(prefix + name)
            if held is None or given is None:
                continue
            found = self._fitting(name, given, held)
            if isinstance(found, str):
                error_msgs.append(f"{type(self).__name__}: {prefix}{name}: {found}")
                return
            fitting[prefix + name] = _aligned(found)
        state_dict.update(fitting)
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        wrong = self._settle()
        if wrong is not None and not missing:
            error_msgs.append(wrong)
        missing_keys += missing

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._derive()  # so that a graph need not, which could not read numbers

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by ``torch.jit.script`` for every module of a model."""
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script does not support it: use torch.compile, torch.export or "
            "torch.jit.trace"
        )


leave_out_of_averages(StoredTensors)


def expected(held: Tensor, given: Tensor) -> str:
    """Describes the expected and the given tensor, for an error message."""
    return f"expected {held.dtype} {list(held.shape)}, got {given.dtype} {list(given.shape)}"


def _same_kind(given: torch.dtype, held: torch.dtype) -> bool:
    """Whether a tensor may be loaded: one-byte weights with the same dtype, other floating-point values with any."""
    return given == held or (given.is_floating_point and held.is_floating_point and held.itemsize > 1)


def _aligned(tensor: Tensor) -> Tensor:
    """Make a tensor contiguous and 16-byte aligned, which tensors of a safetensors file need not be."""
    if type(tensor) not in PLAIN or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _version_of(tensor: Tensor) -> int | None:
    """A tensor's version; None if it has none, as in inference mode, or after a cast outside it of one made there."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def _is_tensor(part: Any) -> bool:
    return isinstance(part, Tensor)


def _apart_from(stored: set[int], value: Any) -> frozenset[int]:
    parts = value if isinstance(value, tuple) else (value,)
    return frozenset(id(p) for p in parts if _is_tensor(p) and p.untyped_storage()._cdata not in stored)


def _in_place(held: _Made, new: Any, own: frozenset[int]) -> Any:
    """`new`, copied into the existing memory if it fits, because captured CUDA graphs keep its address."""
    if not isinstance(new, tuple) or len(new) != len(held.value):
        return new
    return tuple(
        a.copy_(b) if id(a) in held.own and id(b) in own and not a.is_inference() and _alike(a, b) else b
        for a, b in zip(held.value, new, strict=True)
    )


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
