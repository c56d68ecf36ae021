"""int8 and float8 matrix multiplication for a mixture of experts, with scales per group or per row."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, mark_written
from epiloq._torch.library import empty_product, register_product
from epiloq._torch.threads import threads_for
from epiloq.ops.groupwise_mm import GROUPED_RECIPES, fake_of, granularity_of

_GROUPED = (
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? offs=None, Tensor? masked_m=None, "
    "int columns_per_scale=128, int depth_per_scale=128"
)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 128, 128),
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`groupwise_mm`, or `scaled_mm`, for a mixture of experts: each row of ``a`` times its expert's matrix, in one
    launch.

    Nothing is read back to the host: ``offs`` and ``masked_m`` are read on the device, so their values are not checked
    on CUDA. ``offs`` must be ascending, and both must not exceed M. Experts without rows cost nothing.

    Args:
        a: float8_e4m3fn, or int8 with scales per row: with ``offs`` ``[M, K]``, rows sorted by expert; with
            ``masked_m`` ``[E, M, K]``. 16-byte aligned, like ``b`` and ``out``.
        b: ``[E, K, N]`` of ``a``'s kind, each column-major: ``weights.transpose(1, 2)`` of contiguous ``[E, N, K]``.
        scale_a: float32 ``[M, ceil(K / 128)]`` or ``[E, M, ceil(K / 128)]``, any strides with evenly spaced rows; with
            recipe (1, 1, -1) ``[M, 1]`` or ``[E, M, 1]``.
        scale_b: float32 ``[E, ceil(K / 128), ceil(N / 128)]``, any strides; with recipe (1, 1, 128)
            ``[E, ceil(K / 128), N]``, with (1, 1, -1) ``[E, 1, N]``. For scales from `quantize_fp8` or a checkpoint
            pass ``scale.transpose(1, 2)``; if they are square, a missing transpose is not detected.
        offs: int32 ``[E]``, the ends of the experts' rows, as in ``torch._grouped_mm``.
        masked_m: int32 ``[E]``, the number of valid rows of each expert.
        recipe: rows of ``a``, columns of ``b`` and elements of K that share a scale: (1, 128, 128) or (1, 1, 128), or
            (1, 1, -1) for all of K, like `scaled_mm` with one scale per token and per channel.
        out_dtype, out: as for `groupwise_mm`.

    Returns:
        ``[M, N]`` or ``[E, M, N]``. Rows that belong to no expert are not written. With int8 each expert's rows equal
        the result of `scaled_mm` bit for bit.

    Raises:
        ValueError: an argument is invalid (int8: ``K`` is at most 131071), or not exactly one of ``offs`` and
            ``masked_m`` is given.
        TypeError, NotImplementedError: as for `groupwise_mm`.
    """
    _, columns = granularity_of("grouped_mm", recipe, GROUPED_RECIPES)
    depth = recipe[2]
    if (offs is None) == (masked_m is None):
        given = "neither" if offs is None else "both"
        raise ValueError(f"epiloq.grouped_mm: offs: expected either offs or masked_m, got {given}")
    if not direct((a, b, scale_a, scale_b), (offs, masked_m, out)):
        required = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
        optional = {"offs": offs, "masked_m": masked_m, "out": out}
        arguments = (a, b, scale_a, scale_b, offs, masked_m, columns, depth)
        return dispatched("grouped_mm", required, optional, arguments, out_dtype=out_dtype)
    return _run(a, b, scale_a, scale_b, offs, masked_m, columns, depth, out_dtype=out_dtype, out=out)


def _run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    columns_per_scale: int = 128,
    depth_per_scale: int = 128,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    result = empty_product("grouped_mm", a, b, out_dtype) if out is None else out
    call = (result, a, b, scale_a, scale_b, None, 1, columns_per_scale, offs, masked_m, depth_per_scale)
    if a.is_cuda:
        _core.groupwise_mm(*call)
    else:
        _core.groupwise_mm_on_host(*call, threads=threads_for(a))
    if out is not None:
        mark_written(out)
    return result


register_product("grouped_mm", _GROUPED, _run, fake_of("grouped_mm"), "ScalarType out_dtype")
