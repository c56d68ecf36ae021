"""FrozenParameter: a parameter without gradient, for the tensors of quantised layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental import proxy_tensor

_DATA: Any = vars(torch._C.TensorBase)["data"]
_OPERATORS = frozenset(
    f"{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "div",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
)


class Deriving(Protocol):
    """Something that keeps tensors derived from parameters."""

    def _mark_stale(self, replaced: bool = False) -> None: ...

    def _mark_aliased(self) -> None: ...


class FrozenParameter(nn.Parameter):
    """A parameter that no optimiser changes: it has no gradient, and ``requires_grad_(True)`` leaves it without one.

    Fine-tuning can so call it on a whole model, although torch has no gradients of integers. Only setting
    ``requires_grad`` gives one to a bias; copies keep it.

    Layers that keep tensors derived from it, such as padded copies, are told of writes (`report_to`): by methods that
    write in place, whose change of the version compiled graphs do not see, and through ``data``, which changes none.
    They are told, too, when it is detached (by ``state_dict``, for one): NumPy and torch.distributed's collectives do
    not change the version of what they write to.
    """

    _derived_by: WeakSet[Deriving] | None = None

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> FrozenParameter:
        # torch makes a parameter of another one only if `detach` keeps its class.
        values = data.detach() if isinstance(data, FrozenParameter) else data
        return super().__new__(cls, values, requires_grad)

    def report_to(self, owner: Deriving) -> None:
        """Call ``owner._mark_stale()`` from now on when a method has written to it and when ``data`` is read,
        ``owner._mark_stale(replaced=True)`` when ``data`` is set, and ``owner._mark_aliased()`` when it is detached."""
        if self._derived_by is None:
            self._derived_by = WeakSet()
        self._derived_by.add(owner)

    @property
    def data(self) -> Tensor:
        """The values without autograd, as of any tensor."""
        self._report()
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.dtype != self.dtype and not (self.is_floating_point() and values.is_floating_point()):
            raise TypeError(
                f"FrozenParameter.data: expected {self.dtype}, as the layer stores it, got {values.dtype} (as from "
                "torch.nn.utils.vector_to_parameters: pass only parameters that are trained)"
            )
        self._report(replaced=True)
        _DATA.__set__(self, values)

    def _report(self, replaced: bool = False) -> None:
        if is_dynamo_compiling():  # which before torch 2.13 cannot trace what owners do
            return
        for owner in self._derived_by or ():
            owner._mark_stale(replaced)

    def detach(self) -> Tensor:
        """The values without autograd, as of any tensor."""
        if not is_dynamo_compiling():
            for owner in self._derived_by or ():
                owner._mark_aliased()
        return super().detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenParameter:
        copied = FrozenParameter(_DATA.__get__(self).clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def requires_grad_(self, requires_grad: bool = True) -> FrozenParameter:
        """Return the parameter unchanged: it never has a gradient."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenParameter, (super().detach(), self.requires_grad)


def _report_writes() -> None:
    """Make the methods of `FrozenParameter` that write in place report it."""
    no_writes = {"requires_grad_", "retain_grad_", "share_memory_", "rename_", "detach_", "data_ptr_"}
    assignments = {name for name in dir(Tensor) if name.startswith("__i") and name.removeprefix("__i") in _OPERATORS}
    in_place = {name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")}

    def reporting(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)
        replaces = name in ("set_", "resize_", "resize_as_")

        @wraps(method)
        def write(self: FrozenParameter, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            self._report(replaces)
            return result

        return write

    for name in {"__setitem__", *assignments, *in_place} - no_writes:
        setattr(FrozenParameter, name, reporting(name))


def _accept_in_fake_mode() -> None:
    """Make torch's fake mode, and so AOTInductor, accept `FrozenParameter` wherever it accepts `Parameter`.

    Before torch 2.13 it assumes that any other class overrides operations, and refuses it ("Multiple dispatch failed").
    """
    overrides_operations = getattr(fake_tensor, "_check_for_subclass_arg", None)
    if overrides_operations is not None and overrides_operations(FrozenParameter(torch.empty(0))):
        fake_tensor._check_for_subclass_arg = lambda x: type(x) is not FrozenParameter and overrides_operations(x)


def _accept_in_make_fx() -> None:
    """Make `torch.fx.experimental.proxy_tensor.make_fx`, and so ``torch.func.linearize``, accept `FrozenParameter`."""
    handled = getattr(proxy_tensor, "HANDLED_TYPES", None)
    if isinstance(handled, tuple) and FrozenParameter not in handled:
        proxy_tensor.HANDLED_TYPES = (*handled, FrozenParameter)


_report_writes()
_accept_in_fake_mode()
_accept_in_make_fx()
# ``torch.load(weights_only=True)`` of ``state_dict(keep_vars=True)``.
torch.serialization.add_safe_globals([FrozenParameter])
