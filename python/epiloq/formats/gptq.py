"""The GPTQ layout: ``qweight`` packed along the input channels, transposed; ``gptq_v2`` stores zero points as they are,
``gptq`` stores them less one, which has no word for 0 but has one for 2^bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.layouts import FormatError, Quantization, divides, from_unsigned, in_order, require, unsigned
from epiloq.formats.words import pack, per_word, unpack
from epiloq.quantize.grid import Grid, QuantizedWeight

VERSIONS = ("gptq", "gptq_v2")


def to_tensors(weight: QuantizedWeight, version: str) -> dict[str, Tensor]:
    """A layer's tensors: qweight int32 ``[K bits/32, N]``, qzeros int32 ``[G, N bits/32]``, scales float16 ``[G, N]``
    and g_idx int32 ``[K]``. Raises FormatError for sizes that do not fill words, or a zero that v1 cannot say."""
    _check_version(version)
    rows, columns = weight.q.shape
    divides("in_features", columns, per_word(weight.bits), "gptq")
    divides("out_features", rows, per_word(weight.bits), "gptq")
    q, zero = unsigned(in_order(weight))
    if version == "gptq":
        if not zero.all():
            raise FormatError("gptq: zero points: expected at least 1, got 0, which needs the version gptq_v2")
        zero = zero - 1
    groups = torch.arange(columns, dtype=torch.int32, device=q.device) // weight.grid.length(columns)
    return {
        "qweight": pack(q, weight.bits).t().contiguous(),
        "qzeros": pack(zero.t(), weight.bits),
        "scales": weight.scale.t().contiguous().to(torch.float16),
        "g_idx": groups if weight.perm is None else groups[weight.perm.argsort()],
    }


def from_tensors(tensors: Mapping[str, Tensor], grid: Grid, version: str, shape: tuple[int, int]) -> QuantizedWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    _check_version(version)
    rows, columns = shape
    count, length = per_word(grid.bits), grid.length(columns)
    divides("in_features", columns, count, "gptq")
    divides("out_features", rows, count, "gptq")
    groups = -(-columns // length)
    require(
        tensors,
        {
            "qweight": (torch.int32, (columns // count, rows)),
            "qzeros": (torch.int32, (groups, rows // count)),
            "scales": (None, (groups, rows)),
            "g_idx": (torch.int32, (columns,)),
        },
    )
    q = unpack(tensors["qweight"].t(), grid.bits, columns)
    zero = unpack(tensors["qzeros"], grid.bits, rows).int()
    if version == "gptq":
        zero = zero + 1
    perm = tensors["g_idx"].argsort(stable=True)
    expected = torch.arange(columns, dtype=torch.int32, device=q.device) // length
    if not torch.equal(tensors["g_idx"][perm], expected):
        raise FormatError(f"gptq: g_idx: expected {length} channels in each group")
    if torch.equal(tensors["g_idx"], expected):
        return from_unsigned(q, tensors["scales"].t(), zero.t(), grid)
    return from_unsigned(q[:, perm], tensors["scales"].t(), zero.t(), grid, perm)


def config(grid: Grid, version: str, desc_act: bool) -> dict[str, Any]:
    """The ``quantization_config``; `desc_act` says whether any layer's groups are in activation order."""
    return {
        "quant_method": "gptq",
        "bits": grid.bits,
        "group_size": grid.group_size,
        "sym": grid.symmetric,
        "desc_act": desc_act,
        "checkpoint_format": version,
    }


def parse(found: Mapping[str, Any]) -> tuple[Quantization, str]:
    """What a ``quantization_config`` says, and the version. Raises FormatError for what epiloq does not read."""
    version = found.get("checkpoint_format", "gptq")
    _check_version(version)
    try:
        return Quantization(Grid(int(found["bits"]), int(found["group_size"]), bool(found.get("sym", True)))), version
    except (KeyError, TypeError) as error:
        raise FormatError("gptq: quantization_config: expected bits and group_size") from error


def _check_version(version: str) -> None:
    if version not in VERSIONS:
        raise FormatError(f"gptq: checkpoint_format: expected one of {', '.join(VERSIONS)}, got {version!r}")
