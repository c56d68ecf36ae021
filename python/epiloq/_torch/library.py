"""Registration with torch: one library of operators, their shapes and gradients, and what implementations allocate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from epiloq._torch import dtype_numbers, flops

# define/impl rather than custom_op, which costs 10 us a call.
LIBRARY = torch.library.Library("epiloq", "DEF")

DIFFERENTIABLE: set[str] = set()
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
            DIFFERENTIABLE.add(operation)
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
        raise_no_gradient(operation)

    def fake(dy: Tensor, size: list[int], dtype: torch.dtype, operation: str) -> Tensor:
        return dy.new_empty(size, dtype=dtype)

    LIBRARY.define("refused_gradient(Tensor dy, SymInt[] size, ScalarType dtype, str operation) -> Tensor")
    for device in ("CPU", "CUDA"):
        LIBRARY.impl("refused_gradient", raise_error, device)
    _register_fake("epiloq::refused_gradient", fake)


def raise_no_gradient(operation: str) -> NoReturn:
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
