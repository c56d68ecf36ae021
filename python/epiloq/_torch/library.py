"""Registration with torch: one library, and direct calls where the dispatcher is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from epiloq import _core
from epiloq._torch import dtype_numbers, flops, threads
from epiloq._torch.parameters import FrozenParameter

# define/impl rather than custom_op, which costs 10 us a call.
LIBRARY = torch.library.Library("epiloq", "DEF")

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


_DIFFERENTIABLE: set[str] = set()
"""Operations that have a gradient."""


class Gradient(NamedTuple):
    """Functions of ``torch.library.register_autograd``."""

    backward: Callable[..., Any]
    setup_context: Callable[..., None]


def register(
    operation: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Gradient | None = None,
) -> None:
    """Define one ``torch.ops.epiloq.<name>`` of an operation: one implementation for CPU and CUDA, its shapes, and its
    gradient, without which a backward pass raises."""
    if dtype_numbers.NEEDED:
        schema, (implementation, fake) = dtype_numbers.with_numbers(schema, implementation, fake)
    name = LIBRARY.define(schema).removeprefix("epiloq::")
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, implementation, device)

    def on_one_device(*args: Any, **kwargs: Any) -> Any:
        # Where one tensor is on meta and another is not, the dispatcher comes here, and nothing would be computed.
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in given:
            if isinstance(value, Tensor) and value.device != args[0].device:
                arguments = getattr(torch.ops.epiloq, name).default._schema.arguments
                argument = arguments[place].name if isinstance(place, int) else place
                raise ValueError(
                    f"epiloq.{operation}: {argument}: expected a tensor on {args[0].device}, got one on {value.device}"
                )
        return fake(*args, **kwargs)

    _register_fake(f"epiloq::{name}", on_one_device)
    if "!" not in schema:
        if gradient is not None:
            _DIFFERENTIABLE.add(operation)
        _register_gradient(name, gradient or _refusal(operation))


def _refusal(operation: str) -> Gradient:
    """A gradient that raises, also in a graph, from which torch would drop it silently.

    The error is an operation of the graph: compiling a function whose backward is never called is no error.
    """

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.given = [(value.shape, value.dtype) if isinstance(value, Tensor) else None for value in inputs]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Tensor | None, ...]:
        there = next((each for each in dy if each is not None), None)
        refused = torch.ops.epiloq.refused_gradient
        return tuple(
            refused(there, *given, operation) if there is not None and given is not None and needed else None
            for given, needed in zip(ctx.given, ctx.needs_input_grad, strict=False)  # compilers omit defaults
        )

    return Gradient(backward, remember)


def _define_refusal() -> None:
    def raise_error(dy: Tensor, size: list[int], dtype: torch.dtype, operation: str) -> Tensor:
        _raise_no_gradient(operation)

    def fake(dy: Tensor, size: list[int], dtype: torch.dtype, operation: str) -> Tensor:
        return dy.new_empty(size, dtype=dtype)

    LIBRARY.define("refused_gradient(Tensor dy, SymInt[] size, ScalarType dtype, str operation) -> Tensor")
    for device in ("CPU", "CUDA"):
        LIBRARY.impl("refused_gradient", raise_error, device)
    _register_fake("epiloq::refused_gradient", fake)


def _raise_no_gradient(operation: str) -> NoReturn:
    raise NotImplementedError(
        f"epiloq.{operation} has no gradient; call it under torch.no_grad() or on detached tensors"
    )


def _register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Register a fake implementation. `torch.library.register_fake` would also look up its caller's source line,
    which takes a quarter of an import's time."""
    try:
        entry = torch._library.simple_registry.singleton.find(name)
        entry.fake_impl.register(fake, __name__, lib=LIBRARY)
    except (AttributeError, TypeError):  # not torch's public interface
        torch.library.register_fake(name, fake, lib=LIBRARY)


def _register_gradient(name: str, gradient: Gradient) -> None:
    """`torch.library.register_autograd`, whose classes are made at an operation's first call: those of all operations
    take a quarter of an import's time."""
    private = getattr(torch._library, "autograd", None)
    if not (hasattr(private, "make_autograd_impl") and hasattr(private, "Info")):
        torch.library.register_autograd(
            f"epiloq::{name}", gradient.backward, setup_context=gradient.setup_context, lib=LIBRARY
        )
        return

    @cache
    def made() -> Callable[..., Any]:
        return private.make_autograd_impl(getattr(torch.ops.epiloq, name).default, private.Info(*gradient))  # type: ignore[no-any-return, union-attr]

    def differentiate(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return made()(keyset, *args, **kwargs)

    LIBRARY.impl(name, differentiate, "Autograd", with_keyset=True)


_define_refusal()


def register_product(
    name: str,
    arguments: str,
    run: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    allocating: str = "",
    depth: Callable[..., int] | None = flops.columns,
    gradient: Gradient | None = None,
) -> None:
    """Define ``name``, which returns ``run(*arguments)``, and ``name_out``, which is ``run(*arguments, out=out)``.

    ``allocating``: arguments by name that only the first has, such as the type of what it allocates.
    ``depth``: of the arguments, the number of products that add up to an element, for torch's counter of operations;
    None for an elementwise function.
    """

    def write(*args: Any, out: Tensor) -> None:
        run(*args, out=out)

    register(name, f"{name}({arguments}{allocating and ', *, ' + allocating}) -> Tensor", run, fake, gradient)
    register(name, f"{name}_out({arguments}, *, Tensor(a!) out) -> ()", write, fake_out)
    if depth is not None:
        flops.count(name, depth)


def fake_out(*_: Any, **out: Tensor) -> None:
    """The fake implementation of an operator that writes into its arguments."""


def empty_product(operation: str, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """An uninitialised ``a @ b``. Raises ValueError for a dtype that products of quantised operands do not write."""
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"epiloq.{operation}: out_dtype: expected torch.bfloat16, float16 or float32, got {out_dtype!r}"
        )
    # Shapes are checked with everything else, once, in C++; here they only must not break the allocation.
    return a.new_empty((*a.shape[:-1], *b.shape[-1:]), dtype=out_dtype)


def empty_rows(operation: str, x: Tensor, n: int) -> Tensor:
    """An uninitialised product of ``x`` and a weight of ``n`` rows. Raises ValueError for a scalar ``x``."""
    if x.ndim == 0:
        raise ValueError(f"epiloq.{operation}: x: expected at least one dimension, got a scalar")
    return x.new_empty(*x.shape[:-1], n)


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
        elif value.requires_grad and operation not in _DIFFERENTIABLE and is_transformed() and torch.is_grad_enabled():
            _raise_no_gradient(operation)
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
        _raise_no_gradient(operation)

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
