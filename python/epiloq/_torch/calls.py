"""Calls of operations: whether one may skip torch's dispatcher, and the checks of one that may not."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from epiloq import _core
from epiloq._torch import threads
from epiloq._torch.library import DIFFERENTIABLE, raise_no_gradient
from epiloq._torch.parameters import FrozenParameter

# Tensors whose values are their memory's, unlike lazily negated or conjugated ones.
PLAIN = frozenset({Tensor, Parameter, FrozenParameter})

_tracing_state = torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack
_increment_version = torch._C._increment_version


def _share_torch() -> None:
    """Pass C++ the objects of torch that it reads in each direct call, and torch's fastest functions for memory."""
    base, guards = torch._C.TensorBase, getattr(torch._C._dynamo, "guards", None)
    read = ("layout", "requires_grad", "dtype", "is_meta", "is_nested")
    _core.use_torch(
        {
            "plain": tuple(PLAIN),
            "strided": torch.strided,
            **{name: vars(base)[name] for name in read},
            "version": vars(base)["_version"],
            "is_neg": base.is_neg,
            "counts": (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack),
            "optional": (_transform, _tracing_state),
            "grad_enabled": torch.is_grad_enabled,
            "autocast_enabled": torch._C._is_any_autocast_enabled,
            "num_threads": torch.get_num_threads,
            # Not public, and not in every build.
            "empty_cpu": getattr(guards, "_empty_strided_cpu", None),
            "empty_cuda": getattr(guards, "_empty_strided_cuda", None),
            "cuda_device": getattr(torch._C, "_cuda_getDevice", None),
            "forward_derivatives": vars(forward_ad),
            "forks": vars(threads),
        }
    )


_share_torch()


def direct(required: tuple[Tensor, ...], optional: tuple[Tensor | None, ...] = ()) -> bool:
    """Whether a call may skip the dispatcher: plain, dense tensors; no compiler, mode, transform or gradient at work.

    The values of plain ones are their memory's: of a lazily negated one (``z.conj().imag``) it has the other sign.
    """
    if is_dynamo_compiling():
        return False
    if threads.forked:
        threads.use_own_threads()
    return _core.is_direct(required, optional)


def is_batch_invariant() -> bool:
    """Whether this thread's calls are to be batch invariant; in a graph, whether they were when it was traced."""
    return _core.batch_invariant()


# As torch.compiler.assume_constant_result marks it, which would import the compiler with epiloq.
is_batch_invariant._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Why many operations do not support batch invariance.
DENSE_PRODUCT = "torch's product of the dequantised weight sums K in an order that depends on M"


def refuse_batch_invariant(where: str, reason: str) -> None:
    """Raise NotImplementedError if batch invariance is on and `where` does not support it."""
    if is_batch_invariant():
        raise NotImplementedError(f"{where}: batch_invariant: {reason}")


def mark_written(*tensors: Tensor | None) -> None:
    """Increment the versions of tensors that were written to, so that autograd refuses those that it saved before.

    The schemas' ``Tensor(a!)`` does not: a kernel by the name of CPU or CUDA is not asked for one of ADInplaceOrView.
    """
    _increment_version([tensor for tensor in tensors if tensor is not None])


def is_traced() -> bool:
    """Whether torch.jit traces calls."""
    return not is_dynamo_compiling() and _tracing_state() is not None


def is_transformed() -> bool:
    """Whether torch.func's transforms are active: they do not expose a tensor's strides."""
    return not is_dynamo_compiling() and _transform() is not None


def reads_values(tensor: Tensor) -> bool:
    """Whether code may depend on a tensor's values: not in a graph, under torch.func's transforms, or of a fake one."""
    return not is_compiling() and not is_transformed() and type(tensor) in PLAIN


# Arguments of operations that write into them; some only read those that are given.
_WRITTEN = frozenset({"out", "scale", "azp", "offset", "sum", "residual_out"})


def expect_tensors(operation: str, required: Mapping[str, Any], optional: Mapping[str, Any], *, writes: bool) -> None:
    """Raise unless arguments are tensors (or None, if `optional`) on the first one's device: the dispatcher's own
    messages name neither the operation nor the argument, and a fake implementation knows the operator's names only.

    ``writes``: the call has outputs to write into, which as elsewhere in torch excludes gradients.
    """
    if not is_dynamo_compiling():
        threads.use_own_threads()
    for name, value in {**required, **optional}.items():
        if value is None and name in optional:
            continue
        if not isinstance(value, Tensor):
            if not hasattr(type(value), "__torch_function__"):
                raise TypeError(f"epiloq.{operation}: {name}: expected a tensor, got {type(value).__name__}")
        elif value.layout is not torch.strided or value.is_nested or value.is_quantized:
            kind = "nested" if value.is_nested else "torch's quantised" if value.is_quantized else str(value.layout)
            raise ValueError(
                f"epiloq.{operation}: {name}: expected a dense tensor (torch.strided), got a {kind} one, {value.dtype}"
            )
        elif writes and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"epiloq.{operation}: {name}: expected no tensor that requires grad with out, got one;"
                " call under torch.no_grad()"
            )
        # The dispatcher fails to write its values back; dynamo cannot trace the question.
        elif writes and name in _WRITTEN and not is_dynamo_compiling() and value.is_neg():
            raise ValueError(
                f"epiloq.{operation}: {name}: expected no lazily negated tensor with out, got one; call resolve_neg()"
            )
        # Transforms do not compose with `register_autograd`, whose gradient would raise.
        elif value.requires_grad and operation not in DIFFERENTIABLE and is_transformed() and torch.is_grad_enabled():
            raise_no_gradient(operation)
        elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(f"epiloq.{operation}: {name}: has a tangent, but there is no forward derivative")
    tensors = {name: value for name, value in {**required, **optional}.items() if isinstance(value, Tensor)}
    first = next(iter(tensors.values()), None)
    for name, tensor in tensors.items():
        if first is not None and tensor.device != first.device:
            raise ValueError(
                f"epiloq.{operation}: {name}: expected a tensor on {first.device}, got one on {tensor.device}"
            )


def parts_of(weight: Any, *names: str) -> dict[str, Any]:
    """Return tensors of a packed weight by their names in messages."""
    return {f"weight.{name}": getattr(weight, name) for name in names}


def refuse_backward(operation: str, output: Tensor) -> Tensor:
    """Return ``output`` such that a gradient that reaches it raises; torch alone only warns and drops it."""

    def refuse(_: Tensor) -> None:
        raise_no_gradient(operation)

    if isinstance(output, Tensor) and not is_dynamo_compiling() and output.requires_grad:
        output.register_hook(refuse)
    return output


def dispatched(
    operation: str, required: Mapping[str, Any], optional: Mapping[str, Any], arguments: tuple[Any, ...], **new: Any
) -> Tensor:
    """Call an operation without a derivative through the dispatcher, where `direct` says that it may not be skipped.

    ``required``, ``optional``: tensors by name for `expect_tensors`; ``out``, among the latter, is written and
    returned. ``new``: arguments that only a call without ``out`` has, such as the type of what it allocates.
    """
    out: Tensor | None = optional["out"]
    expect_tensors(operation, required, optional, writes=out is not None)
    if out is None:
        return refuse_backward(operation, getattr(torch.ops.epiloq, operation)(*arguments, **new))
    getattr(torch.ops.epiloq, f"{operation}_out")(*arguments, out=out)
    return out


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Disable autocast for products in an operation's own dtype; only if it is on, as this costs microseconds."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
