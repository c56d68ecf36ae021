"""The AutoAWQ ``gemm`` layout: four bits, packed along the output channels in an interleaved order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.layouts import FormatError, Quantization, divides, from_unsigned, require, unsigned
from epiloq.formats.words import pack, unpack
from epiloq.quantize.grid import Grid, QuantizedWeight

BITS = 4
# Nibble i of a word holds this one of its eight columns.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def to_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """A layer's tensors: qweight int32 ``[K, N/8]``, qzeros int32 ``[G, N/8]``, scales float16 ``[G, N]``.

    Raises FormatError for other than 4 bits, sizes that do not fill words or groups, or groups in activation order.
    """
    rows, columns = weight.q.shape
    if weight.bits != BITS or weight.perm is not None:
        raise FormatError("awq: expected 4 bits and groups in the order of the channels")
    divides("in_features", columns, weight.grid.length(columns), "awq")
    divides("out_features", rows, len(ORDER), "awq")
    q, zero = unsigned(weight)
    return {
        "qweight": pack(q.t(), BITS, ORDER),
        "qzeros": pack(zero.t(), BITS, ORDER),
        "scales": weight.scale.t().contiguous().to(torch.float16),
    }


def from_tensors(tensors: Mapping[str, Tensor], grid: Grid, shape: tuple[int, int]) -> QuantizedWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    rows, columns = shape
    divides("in_features", columns, grid.length(columns), "awq")
    divides("out_features", rows, len(ORDER), "awq")
    groups = columns // grid.length(columns)
    require(
        tensors,
        {
            "qweight": (torch.int32, (columns, rows // len(ORDER))),
            "qzeros": (torch.int32, (groups, rows // len(ORDER))),
            "scales": (None, (groups, rows)),
        },
    )
    q = unpack(tensors["qweight"], BITS, rows, ORDER).t().contiguous()
    zero = unpack(tensors["qzeros"], BITS, rows, ORDER).t()
    return from_unsigned(q, tensors["scales"].t(), zero, grid)


def config(grid: Grid, ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config``."""
    return {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": grid.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(ignore),
    }


def parse(found: Mapping[str, Any]) -> Quantization:
    """What a ``quantization_config`` says. Raises FormatError for what epiloq does not read."""
    size = found.get("group_size", found.get("q_group_size"))
    if found.get("bits", found.get("w_bit")) != BITS or not isinstance(size, int):
        raise FormatError("awq: quantization_config: expected 4 bits and a group_size")
    if str(found.get("version", "gemm")).lower() != "gemm":
        raise FormatError(f"awq: version: expected gemm, got {found['version']!r}")
    return Quantization(Grid(BITS, size, symmetric=False))
