"""The GPTQ layout: ``qweight`` packed along the input channels, transposed; ``gptq_v2`` stores zero points as they are,
``gptq`` stores them less one, which represents 2^bits but not 0.

Defined by AutoGPTQ and GPTQModel (``qlinear_cuda_old``, ``qlinear_torch``), drawn in docs/guide/weight_layouts.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epiloq.formats.layouts.base import (
    Codes,
    FormatError,
    check_multiple,
    check_shape,
    group_length,
    groups_of,
    order_of,
    require,
    sizes,
)
from epiloq.formats.layouts.words import BITS, pack, period, unpack, words_of
from epiloq.formats.weights import Weight, narrowest
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
        shape: [N, K], checked against the tensors' shapes.

    Raises:
        FormatError: a ValueError, which names the tensor that does not fit.
    """
    _check(checkpoint_format, bits)
    words, rows = sizes("qweight", qweight)
    found = (rows, words * 32 // bits)
    check_shape("gptq", found, shape)
    if g_idx is None:
        g_idx = torch.arange(found[1], dtype=torch.int32, device=qweight.device) // group_length(group_size, found[1])
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
    return _read(tensors, bits, group_size, checkpoint_format, found).packed()


def from_packed(packed: PackedWeight, *, checkpoint_format: str = "gptq") -> dict[str, Tensor]:
    """The inverse of `to_packed`, byte for byte; scales keep their dtype.

    Raises FormatError for sizes that do not fill words, real offsets, or zero points that the version cannot represent.
    """
    return _write(Codes.of_packed(packed, "gptq"), checkpoint_format)


def to_tensors(weight: Weight, version: str) -> dict[str, Tensor]:
    """Return the tensors of a calibrated weight; scales are written in float16, or in a wider type if they need it."""
    if not isinstance(weight, QuantizedWeight):
        raise FormatError("gptq: expected integers on a grid")
    tensors = _write(Codes.of(weight), version)
    return tensors | {"scales": narrowest(tensors["scales"])}


def from_tensors(
    tensors: Mapping[str, Tensor], grid: Grid, version: str, shape: tuple[int, int], ordered: bool = False
) -> QuantizedWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``; without ``g_idx`` its groups are in order.

    Raises FormatError for inconsistent tensors, or if ``g_idx`` is missing although `ordered`.
    """
    _check(version, grid.bits)
    if "g_idx" not in tensors:
        if ordered and grid.length(shape[1]) < shape[1]:
            raise FormatError("g_idx: expected a tensor with desc_act, found none")
        device = next(iter(tensors.values())).device
        index = torch.arange(shape[1], dtype=torch.int32, device=device)
        tensors = {**tensors, "g_idx": index // group_length(grid.group_size, shape[1])}
    return _read(tensors, grid.bits, grid.group_size, version, shape).quantized(grid)


def _write(codes: Codes, version: str) -> dict[str, Tensor]:
    _check(version, codes.bits)
    rows, columns = codes.q.shape
    check_multiple("in_features", columns, period(codes.bits), "gptq")
    check_multiple("out_features", rows, period(codes.bits), "gptq")
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
    check_multiple("in_features", columns, period(bits), "gptq")
    check_multiple("out_features", rows, period(bits), "gptq")
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
    perm = order_of(tensors["g_idx"], group_length(group_size, columns), "gptq")
    return Codes(q if perm is None else q[:, perm], tensors["scales"].t(), zero.t(), perm, bits, group_size)


def _check(version: str, bits: int = 4) -> None:
    if bits not in BITS:
        raise FormatError(f"gptq: bits: expected one of {BITS}, got {bits}")
    if version not in VERSIONS:
        raise FormatError(f"gptq: checkpoint_format: expected one of {', '.join(VERSIONS)}, got {version!r}")
