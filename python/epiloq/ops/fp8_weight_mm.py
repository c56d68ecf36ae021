"""Products of floating-point activations with FP8 weights, as checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import (
    direct,
    dispatched,
    expect_tensors,
    mark_written,
    refuse_batch_invariant,
)
from epiloq._torch.checks import Arguments, explanation_of, is_int32
from epiloq._torch.dense import multiply_by_rows, multiply_dense
from epiloq._torch.library import register_product
from epiloq._torch.threads import threads_for

_NAME = "fp8_weight_mm"
_BY_M = "its kernels, and torch's product beyond 64 rows, are chosen by M, which changes the order of sums"
# Weights that a CPU dequantises at once: 4 MiB of float32, which caches hold.
_AT_ONCE = 1 << 20
# Rows of x up to which the weight is not rounded to x's dtype, on either device.
_MOST_EXACT = 64


def fp8_weight_mm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int] = (1, -1),
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with ``W[i, j] = weight[i, j] * scale[i // rows, j // columns]`` and (rows, columns) = block.

    For FP8 checkpoints on GPUs without FP8 tensor cores, and for decode with 16-bit activations. On the CPU, and on
    CUDA for up to 64 rows of x, products of x and the FP8 values are not rounded, sums and scales are fp32, and the
    result is rounded once: if on CUDA x has 16 bits, K is a multiple of 16, and ``columns`` a multiple of 64 (or -1);
    on the CPU, if ``rows`` is a power of two and ``columns`` 128 times one (or -1). Otherwise W is dequantised and
    multiplied by torch (a few rows at a time on the CPU), for more than 64 rows of x rounded to x's dtype.
    `epiloq.explain` names the method; docs/numerics.md has the bounds.

    Args:
        x: ``[…, M, K]`` float16, bfloat16 or float32, contiguous rows.
        weight: float8_e4m3fn ``[N, K]``, contiguous rows. NaN makes its output channel NaN.
        scale: float32 ``[ceil(N / rows), ceil(K / columns)]``; the second dimension may be omitted if it is 1.
        bias: ``[N]`` of x's dtype, added in fp32.
        block: rows and columns of the weight that share a scale, -1 for all: ``(1, -1)`` is a scale per output channel,
            ``(-1, -1)`` one for the tensor, ``(128, 128)`` DeepSeek's blocks.
        out: ``[…, M, N]`` of x's dtype, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]`` of x's dtype.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: with batch invariance; or in a backward pass, as the operation has no derivative
            (`epiloq.nn.Fp8WeightOnlyLinear` has gradients of input and bias).
    """
    rows, columns = _sizes(block)
    if direct((x, weight, scale), (bias, out)):
        return run(x, weight, scale, bias, rows, columns, out=out)
    tensors = {"x": x, "weight": weight, "scale": scale}
    return dispatched(_NAME, tensors, {"bias": bias, "out": out}, (x, weight, scale, bias, rows, columns))


def _sizes(block: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(block, (tuple, list)) or len(block) != 2 or not all(map(is_int32, block)):
        raise ValueError(f"epiloq.{_NAME}: block: expected rows and columns below 2^31, -1 for all, got {block!r}")
    return block[0], block[1]


def run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    rows: int,
    columns: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`fp8_weight_mm` for plain tensors."""
    refuse_batch_invariant(f"epiloq.{_NAME}", _BY_M)
    result = _empty(x, weight) if out is None else out
    if not _core.fp8_weight_mm(result, x, weight, scale, bias, rows, columns, threads_for(x)):
        multiply = _dense_product if x.is_cuda else _by_chunks
        multiply(result, x, (weight, scale), bias, (rows, columns))
    if out is not None:
        mark_written(out)
    return result


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    if x.ndim == 0:
        raise ValueError(f"epiloq.{_NAME}: x: expected at least one dimension, got a scalar")
    if weight.ndim != 2:
        raise ValueError(f"epiloq.{_NAME}: weight: expected [N, K], got {list(weight.shape)}")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _by_chunks(
    out: Tensor, x: Tensor, weight: tuple[Tensor, Tensor], bias: Tensor | None, block: tuple[int, int]
) -> None:
    if out.numel() == 0:
        return
    n, k = weight[0].shape
    dtype = torch.float32 if out.numel() // n <= _MOST_EXACT else x.dtype

    def rows_of(rows: slice) -> Tensor:
        dense = x.new_empty((rows.stop - rows.start, k), dtype=dtype)
        _core.dequantize_fp8(dense, *weight, *block, rows.start, threads_for(x))
        return dense

    multiply_by_rows(out, x.to(dtype), None if bias is None else bias.to(dtype), _AT_ONCE, rows_of)


def _dense_product(
    out: Tensor, x: Tensor, weight: tuple[Tensor, Tensor], bias: Tensor | None, block: tuple[int, int]
) -> None:
    """Multiply on CUDA without the decode kernel, with W dequantised to memory in x's dtype."""
    dense = x.new_empty(weight[0].shape)
    _core.dequantize_fp8(dense, *weight, *block)
    multiply_dense(out, x, dense, bias)


@explanation_of(fp8_weight_mm)
def explain(call: Arguments) -> str:
    refuse_batch_invariant(f"epiloq.{_NAME}", _BY_M)
    rows, columns = _sizes(call.block)
    x, weight, scale, bias, out = call.x, call.weight, call.scale, call.bias, call.out
    expect_tensors(_NAME, {"x": x, "weight": weight, "scale": scale}, {"bias": bias, "out": out}, writes=False)
    result = _empty(x, weight) if out is None else out
    return _core.explain_fp8_weight_mm(result, x, weight, scale, bias, rows, columns)


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    result = _empty(x, weight)
    columns_of_x, k = x.shape[-1], weight.shape[1]
    torch._check_value(columns_of_x == k, lambda: f"epiloq.{_NAME}: x: expected {k} columns, got {list(x.shape)}")
    return result


register_product(_NAME, "Tensor x, Tensor weight, Tensor scale, Tensor? bias, int rows, int columns", run, _fake)
