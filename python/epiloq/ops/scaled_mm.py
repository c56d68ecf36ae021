"""int8 and FP8 matrix multiplication with a fused dequantising epilogue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, expect_tensors, mark_written
from epiloq._torch.checks import bound_arguments, expect_flags
from epiloq._torch.library import empty_product, register_product
from epiloq._torch.threads import threads_for

_OPERANDS = "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b"


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    constant_b: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``scale_a * scale_b * (a @ b) + bias``: int32 or fp32 sums, one fp32 epilogue, one rounding.

    In CUTLASS's terms this is ScaledEpilogue, or ScaledEpilogueBias with ``bias``.

    Args:
        a: int8 or float8 (e4m3fn, e5m2) ``[…, M, K]``, contiguous rows that do not overlap, 16-byte aligned (as are
            ``b`` and ``out``); leading dimensions must collapse into one.
        b: ``[K, N]`` of ``a``'s kind, column-major: ``weight.t()`` of a contiguous weight ``[N, K]``.
        scale_a: float32, contiguous, one element or one per row of ``a``: ``[M]``, ``[M, 1]`` or ``[…, M, 1]``.
        scale_b: float32, contiguous, one element or one per column of ``b``: ``[N]``, ``[1, N]``, or ``[N, 1]`` as
            returned by quantising the weight's rows.
        bias: ``[N]`` in the output's dtype, contiguous, added in fp32.
        out_dtype: float16 or bfloat16, on the CPU also float32; ``out``'s dtype if ``out`` is given.
        fast_accum: FP8 on a GPU: allows whole sums to be accumulated by the tensor cores, whose accumulators have about
            14 bits on Hopper. This is used for M > 128 where it is faster; otherwise, and without ``fast_accum``, sums
            are promoted to fp32 every 128 of K.
        constant_b: ``b`` is a model's weight, written long before the call. On SM90 the kernel then loads its first
            tiles of ``b`` before the preceding kernel has finished: up to 5 % faster at small M. Unsafe if a preceding
            kernel that triggers programmatic dependent launch may still be writing ``b``. epiloq's kernels do so, eager
            torch's do not; one of epiloq's quantisers in between makes it safe (docs/numerics.md).
        out: ``[…, M, N]``, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]``; int8 within one unit in the last place of the exact result, FP8 as docs/numerics.md states.

    Raises:
        ValueError: an argument is invalid; the message names it. For int8 ``K`` is at most 131071, where int32 stays
            exact.
        TypeError: an argument is not a tensor.
        NotImplementedError: this build has no kernel for the device (float8 needs compute capability 8.9); or in a
            backward pass, as there is no derivative (a compiled graph stops the gradient instead).
    """
    expect_flags("scaled_mm", fast_accum=fast_accum, constant_b=constant_b)
    if not direct((a, b, scale_a, scale_b), (bias, out)):
        required = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
        arguments = (a, b, scale_a, scale_b, bias, fast_accum, constant_b)
        return dispatched("scaled_mm", required, {"bias": bias, "out": out}, arguments, out_dtype=out_dtype)
    return run(a, b, scale_a, scale_b, bias, fast_accum, constant_b, out_dtype=out_dtype, out=out)


def scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    constant_b: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``scale_a * scale_b * (a @ b - azp * azp_adj) + bias``: `scaled_mm` for activations with a zero point.

    The difference is exact in int32. With ``azp`` this is ScaledEpilogueAzpPerToken; without it ScaledEpilogueAzp,
    for static activations with a single zero point that was multiplied into ``azp_adj`` beforehand.

    Args:
        azp_adj: int32 ``[N]``, contiguous, the column sums of ``b`` (``weight.sum(1, dtype=torch.int32)``), times the
            zero point if ``azp`` is None.
        azp: int32, contiguous, one element or one per row of ``a``, in ``scale_a``'s shapes; values in [-128, 127],
            as returned by `quantize_int8`.
        constant_b: as for `scaled_mm`. Unsafe if a preceding kernel that triggers programmatic dependent launch may
            still be writing ``b``.
        a, b, scale_a, scale_b, bias, out_dtype, out: as for `scaled_mm`; int8 operands only.

    Raises:
        ValueError: as for `scaled_mm`; ``K`` is at most 65793.
    """
    expect_flags("scaled_mm_azp", constant_b=constant_b)
    if not direct((a, b, scale_a, scale_b, azp_adj), (azp, bias, out)):
        required = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "azp_adj": azp_adj}
        optional = {"azp": azp, "bias": bias, "out": out}
        arguments = (a, b, scale_a, scale_b, azp_adj, azp, bias, constant_b)
        return dispatched("scaled_mm_azp", required, optional, arguments, out_dtype=out_dtype)
    return _run_azp(a, b, scale_a, scale_b, azp_adj, azp, bias, constant_b, out_dtype=out_dtype, out=out)


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    constant_b: bool = False,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`scaled_mm` for plain tensors."""
    result = empty_product("scaled_mm", a, b, out_dtype) if out is None else out
    _launch((result, a, b, scale_a, scale_b, bias, None, None), fast_accum, constant_b)
    if out is not None:
        mark_written(out)
    return result


def _run_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
    constant_b: bool = False,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    result = empty_product("scaled_mm_azp", a, b, out_dtype) if out is None else out
    _launch((result, a, b, scale_a, scale_b, bias, azp_adj, azp), False, constant_b)
    if out is not None:
        mark_written(out)
    return result


_Call = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _launch(call: _Call, fast_accum: bool, constant_b: bool) -> None:
    if call[0].is_cuda:
        _core.scaled_mm(*call, fast_accum, constant_b)
    else:  # the CPU sums in fp32 and has no PDL, so neither option matters
        _core.scaled_mm_on_host(*call, threads_for(call[0]))


def explain(operation: Callable[..., Tensor], *args: Any, terms: bool = False, **kwargs: Any) -> str:
    """`epiloq.explain` for a product, given the arguments of a call; with `terms`, the terms of the cost model for the
    chosen kernel and the runner-up."""
    name, given = operation.__name__, bound_arguments(operation, *args, **kwargs)
    out_dtype, fast_accum = given.pop("out_dtype"), given.pop("fast_accum", False)
    given.pop("constant_b")  # does not affect the choice
    required = {key: given[key] for key in given if key in ("a", "b", "scale_a", "scale_b", "azp_adj")}
    expect_tensors(name, required, {key: given[key] for key in given if key not in required}, writes=False)
    out = given.pop("out")
    if out is None:
        out = empty_product(name, given["a"], given["b"], out_dtype)
    ask = _core.explain_scaled_mm_terms if terms else _core.explain_scaled_mm
    return ask(out, **given, fast_accum=fast_accum)


def _fake(operation: str, a: Tensor, b: Tensor, *_: Any, out_dtype: torch.dtype) -> Tensor:
    if a.ndim < 1 or b.ndim != 2:
        raise ValueError(f"epiloq.{operation}: b: expected [K, N], with a […, K]; got {b.ndim} and {a.ndim} dimensions")
    torch._check_value(
        a.shape[-1] == b.shape[0], lambda: f"epiloq.{operation}: b: expected [{a.shape[-1]}, N], got {list(b.shape)}"
    )
    return empty_product(operation, a, b, out_dtype)


for _name, _arguments, _function in (
    ("scaled_mm", f"{_OPERANDS}, Tensor? bias=None, bool fast_accum=False, bool constant_b=False", run),
    (
        "scaled_mm_azp",
        f"{_OPERANDS}, Tensor azp_adj, Tensor? azp=None, Tensor? bias=None, bool constant_b=False",
        _run_azp,
    ),
):
    register_product(_name, _arguments, _function, partial(_fake, _name), "ScalarType out_dtype")
