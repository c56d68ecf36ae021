"""The GPTQ layout: ``qweight`` packed along the input channels, transposed; ``gptq_v2`` stores zero points as they are,
``gptq`` stores them less one, which has no word for 0 but has one for 2^bits.

Defined by AutoGPTQ and GPTQModel (``qlinear_cuda_old``, ``qlinear_torch``), drawn in docs/weight_layouts.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.layouts.base import (
    Codes,
    FormatError,
    Quantization,
    agrees,
    divides,
    flag,
    full,
    groups_of,
    order_of,
    require,
    sizes,
)
from epiloq.formats.layouts.words import BITS, pack, period, unpack, words_of
from epiloq.formats.weights import Weight
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.packed_weight import PackedWeight

VERSIONS = ("gptq", "gptq_v2")


def to_packed(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    group_size: int,
    bits: int = 4,
    checkpoint_format: str = "gptq",
    shape: tuple[int, int] | None = None,
) -> PackedWeight:
    """The weight ``[N, K]`` of a layer's tensors, on their device; symmetric if every zero point is in the middle.

    Args:
        qweight: int32 ``[K bits / 32, N]``.
        qzeros: int32 ``[G, N bits / 32]``, G = ceil(K / group_size).
        scales: ``[G, N]`` of 16 or 32 bits, whose dtype stays.
        g_idx: int32 ``[K]``, the group of each channel; None for channels in order. Activation order becomes ``perm``.
        group_size: -1 for one group.
        bits: 2, 3, 4 or 8.
        checkpoint_format: "gptq" (zero points less one) or "gptq_v2".
        shape: [N, K], to be compared with what the tensors make.

    Raises:
        FormatError: a ValueError, which names the tensor that does not fit.
    """
    _check(checkpoint_format, bits)
    words, rows = sizes("qweight", qweight)
    found = (rows, words * 32 // bits)
    agrees("gptq", found, shape)
    if g_idx is None:
        g_idx = torch.arange(found[1], dtype=torch.int32, device=qweight.device) // full(group_size, found[1])
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
    return _read(tensors, bits, group_size, checkpoint_format, found).packed()


def from_packed(packed: PackedWeight, *, checkpoint_format: str = "gptq") -> dict[str, Tensor]:
    """The tensors that `to_packed` takes, byte for byte those that it took; scales keep their dtype.

    Raises FormatError for sizes that do not fill words, real offsets, or a zero point that the version cannot say.
    """
    return _write(Codes.of_packed(packed, "gptq"), checkpoint_format)


def to_tensors(weight: Weight, version: str) -> dict[str, Tensor]:
    """As `from_packed`, of a calibrated weight; scales are written in float16."""
    if not isinstance(weight, QuantizedWeight):
        raise FormatError("gptq: expected integers on a grid")
    tensors = _write(Codes.of(weight), version)
    return tensors | {"scales": tensors["scales"].to(torch.float16)}


def from_tensors(tensors: Mapping[str, Tensor], grid: Grid, version: str, shape: tuple[int, int]) -> QuantizedWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    _check(version, grid.bits)
    return _read(tensors, grid.bits, grid.group_size, version, shape).quantized(grid)


def _write(codes: Codes, version: str) -> dict[str, Tensor]:
    _check(version, codes.bits)
    rows, columns = codes.q.shape
    divides("in_features", columns, period(codes.bits), "gptq")
    divides("out_features", rows, period(codes.bits), "gptq")
    zero = codes.zero
    if version == "gptq":
        if not zero.all():
            raise FormatError("gptq: zero points: expected at least 1, got 0, which needs the version gptq_v2")
        zero = zero - 1
    return {
        "qweight": pack(codes.in_order().q, codes.bits).t().contiguous(),
        "qzeros": pack(zero.t(), codes.bits),
        "scales": codes.scale.t().contiguous(),
        "g_idx": codes.group_index(),
    }


def _read(tensors: Mapping[str, Tensor], bits: int, group_size: int, version: str, shape: tuple[int, int]) -> Codes:
    rows, columns = shape
    divides("in_features", columns, period(bits), "gptq")
    divides("out_features", rows, period(bits), "gptq")
    groups = groups_of(columns, group_size, "gptq")
    require(
        tensors,
        {
            "qweight": (torch.int32, (words_of(columns, bits), rows)),
            "qzeros": (torch.int32, (groups, words_of(rows, bits))),
            "scales": (None, (groups, rows)),
            "g_idx": (torch.int32, (columns,)),
        },
    )
    q = unpack(tensors["qweight"].t(), bits, columns)
    zero = unpack(tensors["qzeros"], bits, rows).int() + (version == "gptq")
    perm = order_of(tensors["g_idx"], full(group_size, columns), "gptq")
    return Codes(q if perm is None else q[:, perm], tensors["scales"].t(), zero.t(), perm, bits, group_size)


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
    _check(version)
    flag(found, "desc_act", False, "gptq")  # Groups say themselves whether they are in activation order.
    if found.get("bits") is None or found.get("group_size") is None:
        raise FormatError("gptq: quantization_config: expected bits and group_size")
    return Quantization(Grid(found["bits"], found["group_size"], flag(found, "sym", True, "gptq"))), version


def _check(version: str, bits: int = 4) -> None:
    if bits not in BITS:
        raise FormatError(f"gptq: bits: expected one of {BITS}, got {bits}")
    if version not in VERSIONS:
        raise FormatError(f"gptq: checkpoint_format: expected one of {', '.join(VERSIONS)}, got {version!r}")
