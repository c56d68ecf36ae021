"""FP8 matrix multiplication with scales per group, as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, expect_tensors, mark_written
from epiloq._torch.checks import bound_arguments, expect_flags
from epiloq._torch.library import empty_product, register_product
from epiloq._torch.threads import threads_for
from epiloq.weights.tensor_checks import refuse

RECIPES = ((1, 128, 128), (128, 128, 128), (1, 1, 128))
GROUPED_RECIPES = ((1, 128, 128), (1, 1, 128), (1, 1, -1))

_DENSE = (
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "int rows_per_scale=1, int columns_per_scale=128, bool constant_b=False"
)


def groupwise_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: tuple[int, int, int] = (1, 128, 128),
    out_dtype: torch.dtype = torch.bfloat16,
    constant_b: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``sum over blocks i of 128 along K of scale_a[m, i] * scale_b[i, n] * (a_i @ b_i)[m, n] + bias[n]``.

    Each block's product is promoted to fp32, so long sums stay accurate. This is DeepSeek-V3's definition (report,
    section 3.3.2). The last blocks of K and N may be partial.

    Args:
        a: float8_e4m3fn ``[…, M, K]``, contiguous rows that do not overlap, 16-byte aligned (as are ``b`` and ``out``);
            leading dimensions must collapse into one.
        b: float8_e4m3fn ``[K, N]``, column-major: ``weight.t()`` of a contiguous weight ``[N, K]``.
        scale_a: float32 ``[…, M, ceil(K / 128)]``, any strides; the rows may be flattened (`quantize_fp8` with
            granularity "group" returns either layout, and neither is copied; column-major is faster at large M on
            SM90); with recipe (128, 128, 128) ``[ceil(M / 128), ceil(K / 128)]``. One scale per token may be expanded
            along K; with recipe (1, 1, 128) SM90 then has faster kernels for many tokens, which multiply by it last,
            so that sums without it must not overflow float32.
        scale_b: float32 ``[ceil(K / 128), ceil(N / 128)]``, any strides: ``weight_scale_inv.t()``; with recipe
            (1, 1, 128) ``[ceil(K / 128), N]``. If K and N have the same number of blocks, a missing ``.t()`` is not
            detected.
        bias: ``[N]`` in the output's dtype, added in fp32.
        recipe: rows of ``a``, columns of ``b`` and elements of K that share a scale: (1, 128, 128), (128, 128, 128) or
            (1, 1, 128).
        out_dtype: bfloat16, float16 or float32; ``out``'s dtype if ``out`` is given.
        constant_b: ``b`` is a model's weight, as for `epiloq.scaled_mm`. Unsafe if a preceding kernel that triggers
            programmatic dependent launch may still be writing ``b``.
        out: ``[…, M, N]``, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]``; docs/numerics.md has the bound.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: this build has no CUDA kernels; or in a backward pass, as there is no derivative.
    """
    rows, columns = granularity_of("groupwise_mm", recipe)
    expect_flags("groupwise_mm", constant_b=constant_b)
    if not direct((a, b, scale_a, scale_b), (bias, out)):
        required = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
        arguments = (a, b, scale_a, scale_b, bias, rows, columns, constant_b)
        return dispatched("groupwise_mm", required, {"bias": bias, "out": out}, arguments, out_dtype=out_dtype)
    return _run(a, b, scale_a, scale_b, bias, rows, columns, constant_b, out_dtype=out_dtype, out=out)


def granularity_of(
    operation: str, recipe: tuple[int, int, int], recipes: tuple[tuple[int, int, int], ...] = RECIPES
) -> tuple[int, int]:
    if not isinstance(recipe, (tuple, list)) or tuple(recipe) not in recipes:  # JSON has no tuples
        known = ", ".join(map(str, recipes))
        wanted = f"one of {known} (rows of a, columns of b and elements of K to a scale)"
        refuse(operation, "recipe", wanted, repr(recipe))
    return recipe[0], recipe[1]


def _run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    rows_per_scale: int = 1,
    columns_per_scale: int = 128,
    constant_b: bool = False,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    result = empty_product("groupwise_mm", a, b, out_dtype) if out is None else out
    call = (result, a, b, scale_a, scale_b, bias, rows_per_scale, columns_per_scale)
    if a.is_cuda:
        _core.groupwise_mm(*call, None, None, 128, constant_b)
    else:
        _core.groupwise_mm_on_host(*call, None, None, 128, False, threads_for(a))
    if out is not None:
        mark_written(out)
    return result


def explain(operation: Callable[..., Tensor], *args: Any, terms: bool = False, **kwargs: Any) -> str:
    """`epiloq.explain` for `groupwise_mm` and `grouped_mm`, given the arguments of a call; with `terms`, the terms of
    the cost model for the chosen kernel and the runner-up."""
    name, call = operation.__name__, bound_arguments(operation, *args, **kwargs)
    recipe = call.pop("recipe")
    rows, columns = granularity_of(name, recipe, GROUPED_RECIPES if name == "grouped_mm" else RECIPES)
    scales = {"rows_per_scale": rows, "columns_per_scale": columns, "depth_per_scale": recipe[2]}
    call.pop("constant_b", None)  # does not affect the choice
    out, out_dtype = call.pop("out"), call.pop("out_dtype")
    required = {key: call[key] for key in ("a", "b", "scale_a", "scale_b")}
    expect_tensors(name, required, {key: call[key] for key in call if key not in required}, writes=False)
    if out is None:
        out = empty_product(name, call["a"], call["b"], out_dtype)
    ask = _core.explain_groupwise_mm_terms if terms else _core.explain_groupwise_mm
    return ask(out, **call, **scales)


def fake_of(operation: str) -> Callable[..., Tensor]:
    def shapes(a: Tensor, b: Tensor, *_: Any, out_dtype: torch.dtype) -> Tensor:
        if a.ndim < 1 or b.ndim < 2:
            raise ValueError(f"epiloq.{operation}: b: expected […, K, N], got {b.ndim} dimensions")
        torch._check_value(
            a.shape[-1] == b.shape[-2],
            lambda: f"epiloq.{operation}: b: expected […, {a.shape[-1]}, N], got {list(b.shape)}",
        )
        return empty_product(operation, a, b, out_dtype)

    return shapes


register_product("groupwise_mm", _DENSE, _run, fake_of("groupwise_mm"), "ScalarType out_dtype")
