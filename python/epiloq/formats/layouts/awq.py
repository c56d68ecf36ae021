"""The AutoAWQ layouts, four bits each: ``gemm`` packs output channels, ``gemv`` and ``gemv_fast`` input channels.

Defined by AutoAWQ (``awq/modules/linear/{gemm,gemv,gemv_fast}.py``), drawn in docs/guide/weight_layouts.md. Below them
are the integers of AMD's Quark: in groups they are transposed like ``gemm``'s, and words of 4 bits have its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epiloq.formats.description import Description
from epiloq.formats.layouts.base import (
    Codes,
    Expected,
    FormatError,
    check_multiple,
    check_shape,
    group_length,
    groups_of,
    require,
    sizes,
)
from epiloq.formats.layouts.words import pack, unpack
from epiloq.formats.weights import OffsetWeight, Weight, narrowest, on_grid
from epiloq.weights.grid import Grid, InputGrid, QuantizedWeight
from epiloq.weights.packed_weight import PackedWeight, pack_weight

BITS = 4
PER_WORD = 8
# gemm: nibble i of a word holds this one of its eight columns.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# gemv_fast: rows and columns of a packed tile.
INTERLEAVE, SPAN = 4, 64


def to_packed(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    version: str = "gemm",
    shape: tuple[int, int] | None = None,
) -> PackedWeight:
    """The weight ``[N, K]`` of a layer's tensors, on their device.

    Zero points stay integers (none, if all are 8), those of ``gemv_fast`` real offsets. With G = K / group_size and W
    as `padded_groups` says, the tensors are:

    ==========  =======================  =========================  ================
    version     qweight                  qzeros                     scales
    ==========  =======================  =========================  ================
    gemm        int32 ``[K, N / 8]``     int32 ``[G, N / 8]``       ``[G, N]``
    gemv        int32 ``[N, K / 8]``     int32 ``[N, W / 8]``       ``[N, W]``
    gemv_fast   int16 ``[N / 4, K]``     the scales' ``[W, N]``     ``[W, N]``
    ==========  =======================  =========================  ================

    Scales have 16 or 32 bits, and keep their dtype. The padding from G to W is not read, and written as 0.

    Args:
        group_size: -1 for one group.
        version: "gemm", "gemv" or "gemv_fast".
        shape: [N, K], checked against the tensors' shapes.

    Raises:
        FormatError: a ValueError, which names the tensor that does not fit.
    """
    layout = _layout(version)
    found = layout.shape(*sizes("qweight", qweight))
    check_shape("awq", found, shape)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    require(tensors, layout.expected(*found, group_size))
    return layout.read(tensors, group_size, found)


def from_packed(packed: PackedWeight, *, version: str = "gemm") -> dict[str, Tensor]:
    """The inverse of `to_packed`, byte for byte; scales keep their dtype.

    For ``gemv_fast`` a zero point becomes the offset ``-(scale * zero)``, rounded once to the scales' dtype.

    Raises FormatError for bits other than 4, activation order, sizes that do not fill words or groups, and real offsets
    except in ``gemv_fast``.
    """
    _groups(packed.n, packed.k, packed.group_size)
    if packed.bits != BITS or packed.perm is not None:
        raise FormatError("awq: expected 4 bits and groups in the order of the channels")
    return _layout(version).write(packed)


def to_tensors(weight: Weight, version: str = "gemm") -> dict[str, Tensor]:
    """A layer's tensors in a checkpoint: integers on a grid with scales of float16, or of a wider type if they need it;
    real offsets in ``gemv_fast``."""
    layout = _layout(version)
    if layout.words is None:
        if not isinstance(weight, OffsetWeight):
            raise FormatError(f"awq: version: {version} has real offsets, which this weight does not have")
        return from_packed(weight.packed, version=version)
    value = on_grid(weight, "awq")
    if value.bits != BITS:
        raise FormatError(f"awq: cannot represent {value.bits} bits, only {BITS} bits")
    if value.perm is not None:
        raise FormatError("awq: cannot represent groups in activation order (act-order)")
    rows, columns = value.q.shape
    _groups(rows, columns, value.group_size)
    tensors = layout.words(Codes.of(value))
    return tensors | {"scales": narrowest(tensors["scales"])}


def from_tensors(tensors: Mapping[str, Tensor], group_size: int, version: str, shape: tuple[int, int]) -> Weight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    layout = _layout(version)
    require(tensors, layout.expected(*shape, group_size))
    if layout.codes is None:
        return OffsetWeight.of(layout.read(tensors, group_size, shape))
    return layout.codes(tensors, group_size, shape).quantized(Grid(BITS, group_size, symmetric=False))


def padded_groups(columns: int, group_size: int) -> int:
    """The number of groups for which ``gemv`` and ``gemv_fast`` store parameters: G rounded up to a multiple of 8, 16
    or 32.

    Raises FormatError for groups other than 32, 64, and 128 or more.
    """
    length = group_length(group_size, columns)
    words = 1 if length >= 128 else {64: 2, 32: 4}.get(length)
    if words is None:
        raise FormatError(f"awq: group_size: expected 32, 64, or at least 128 for gemv, got {length}")
    return -(-(columns // length) // (PER_WORD * words)) * PER_WORD * words


@dataclass(frozen=True)
class _Layout:
    """One version: the layer's shape from that of qweight, its expected tensors, reading and writing them.

    codes, words
        Reading and writing of a layer's integers, for versions with integer zero points.
    """

    shape: Callable[[int, int], tuple[int, int]]
    expected: Callable[[int, int, int], Expected]
    read: Callable[[Mapping[str, Tensor], int, tuple[int, int]], PackedWeight]
    write: Callable[[PackedWeight], dict[str, Tensor]]
    codes: Callable[[Mapping[str, Tensor], int, tuple[int, int]], Codes] | None = None
    words: Callable[[Codes], dict[str, Tensor]] | None = None


def _groups(rows: int, columns: int, group_size: int) -> int:
    groups = groups_of(columns, group_size, "awq")
    check_multiple("in_features", columns, group_length(group_size, columns), "awq")
    check_multiple("out_features", rows, PER_WORD, "awq")
    return groups


def _gemm_expected(rows: int, columns: int, group_size: int) -> Expected:
    words, groups = rows // PER_WORD, _groups(rows, columns, group_size)
    return {
        "qweight": (torch.int32, (columns, words)),
        "qzeros": (torch.int32, (groups, words)),
        "scales": (None, (groups, rows)),
    }


def _gemm_codes(tensors: Mapping[str, Tensor], group_size: int, shape: tuple[int, int]) -> Codes:
    q, zero = (unpack(tensors[name], BITS, shape[0], ORDER).t() for name in ("qweight", "qzeros"))
    return Codes(q.contiguous(), tensors["scales"].t(), zero.int(), None, BITS, group_size)


def _gemm_words(codes: Codes) -> dict[str, Tensor]:
    return {
        "qweight": pack(codes.q.t(), BITS, ORDER),
        "qzeros": pack(codes.zero.t(), BITS, ORDER),
        "scales": codes.scale.t().contiguous(),
    }


def _gemv_expected(rows: int, columns: int, group_size: int) -> Expected:
    _groups(rows, columns, group_size)
    check_multiple("in_features", columns, PER_WORD, "awq")
    padded = padded_groups(columns, group_size)
    return {
        "qweight": (torch.int32, (rows, columns // PER_WORD)),
        "qzeros": (torch.int32, (rows, padded // PER_WORD)),
        "scales": (None, (rows, padded)),
    }


def _gemv_codes(tensors: Mapping[str, Tensor], group_size: int, shape: tuple[int, int]) -> Codes:
    columns = shape[1]
    groups = columns // group_length(group_size, columns)
    q, scales = unpack(tensors["qweight"], BITS, columns), tensors["scales"]
    zero = unpack(tensors["qzeros"], BITS, scales.shape[1])[:, :groups].int()
    return Codes(q, scales[:, :groups], zero, None, BITS, group_size)


def _gemv_words(codes: Codes) -> dict[str, Tensor]:
    columns = codes.q.shape[1]
    check_multiple("in_features", columns, PER_WORD, "awq")
    missing = padded_groups(columns, codes.group_size) - codes.scale.shape[1]
    scales, zero = (torch.nn.functional.pad(t, (0, missing)) for t in (codes.scale, codes.zero))
    return {"qweight": pack(codes.q, BITS), "qzeros": pack(zero, BITS), "scales": scales}


def _fast_expected(rows: int, columns: int, group_size: int) -> Expected:
    _groups(rows, columns, group_size)
    check_multiple("in_features", columns, SPAN, "awq gemv_fast")
    parameters = (padded_groups(columns, group_size), rows)
    return {
        "qweight": (torch.int16, (rows // INTERLEAVE, columns)),
        "qzeros": (None, parameters),
        "scales": (None, parameters),
    }


def _fast_read(tensors: Mapping[str, Tensor], group_size: int, shape: tuple[int, int]) -> PackedWeight:
    rows, columns = shape
    groups = columns // group_length(group_size, columns)
    # A tile's words, by row, half, b and c, hold column 32 half + 8 a + 2 b + c in nibble a.
    words = tensors["qweight"].view(rows // INTERLEAVE, columns // SPAN, INTERLEAVE, 2, 4, 2)
    nibbles = torch.stack([words >> 4 * a & 15 for a in range(4)], dim=4).to(torch.uint8)  # row, tile, r, half, a, b, c
    q = nibbles.transpose(1, 2).reshape(rows, columns)
    scale, offset = (tensors[name][:groups].t().contiguous() for name in ("scales", "qzeros"))
    return pack_weight(q, scale, offset=offset, bits=BITS, group_size=group_size)


def _fast_write(packed: PackedWeight) -> dict[str, Tensor]:
    check_multiple("in_features", packed.k, SPAN, "awq gemv_fast")
    q, scale, offset = packed.unpack()
    if packed.offset is None:
        codes = Codes.of_packed(packed, "awq gemv_fast")
        q, offset = codes.q, -(scale.float() * codes.zero).to(scale.dtype)
    assert offset is not None
    missing = padded_groups(packed.k, packed.group_size) - scale.shape[1]
    scales, qzeros = (torch.nn.functional.pad(t, (0, missing)).t().contiguous() for t in (scale, offset))
    # Values above 32767 are negative in int16; mask them to 16 bits in int32.
    tiles = q.view(-1, INTERLEAVE, packed.k // SPAN, 2, 4, 4, 2).transpose(1, 2).int()
    words = sum((tiles.select(4, a) << 4 * a for a in range(1, 4)), tiles.select(4, 0))
    return {"qweight": words.to(torch.int16).reshape(-1, packed.k), "qzeros": qzeros, "scales": scales}


def _integers(
    name: str,
    shape: Callable[[int, int], tuple[int, int]],
    expected: Callable[[int, int, int], Expected],
    codes: Callable[[Mapping[str, Tensor], int, tuple[int, int]], Codes],
    words: Callable[[Codes], dict[str, Tensor]],
) -> _Layout:
    return _Layout(
        shape,
        expected,
        lambda tensors, group_size, shape: codes(tensors, group_size, shape).packed(),
        lambda packed: words(Codes.of_packed(packed, f"awq {name}")),
        codes,
        words,
    )


_LAYOUTS = {
    "gemm": _integers(
        "gemm", lambda columns, words: (words * PER_WORD, columns), _gemm_expected, _gemm_codes, _gemm_words
    ),
    "gemv": _integers("gemv", lambda rows, words: (rows, words * PER_WORD), _gemv_expected, _gemv_codes, _gemv_words),
    "gemv_fast": _Layout(lambda tiles, columns: (tiles * INTERLEAVE, columns), _fast_expected, _fast_read, _fast_write),
}


VERSIONS = tuple(_LAYOUTS)


def _layout(version: str) -> _Layout:
    if version not in _LAYOUTS:
        raise FormatError(f"awq: version: expected one of {', '.join(_LAYOUTS)}, got {version!r}")
    return _LAYOUTS[version]


def parts_of_quark(described: Description) -> frozenset[str]:
    """Every tensor that a layer of Quark may have other than its bias, by the last part of its name."""
    inputs = ("input_scale", "input_zero_point") if described.is_static else ()
    return frozenset({"weight", "weight_scale", "weight_zero_point", *inputs})


def check_quark(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> None:
    """Raise FormatError for tensors of other types and shapes than a layer's of Quark."""
    (rows, columns), bits = shape, described.bits
    grouped = described.strategy == "group"
    values: tuple[int, ...] = (columns, rows) if grouped else shape
    parameters: tuple[int, ...] = () if described.strategy == "tensor" else (rows,)
    if grouped:
        check_multiple("in_features", columns, described.group_size, described.layout)
        parameters = (columns // described.group_size, rows)
    require(tensors, {"weight_scale": (None, parameters)})
    if bits == BITS:
        check_multiple("out_features" if grouped else "in_features", values[-1], PER_WORD, described.layout)
        check_multiple("out_features", rows, PER_WORD, described.layout)
        values, parameters = ((*each[:-1], each[-1] // PER_WORD) for each in (values, parameters))
    names = {"weight": values} | ({"weight_zero_point": parameters} if "weight_zero_point" in tensors else {})
    for name, wanted in names.items():
        found = tensors.get(name)
        kinds = (torch.int32,) if bits == BITS else (torch.int8, torch.uint8, torch.int32)
        require(tensors, {name: (found.dtype if found is not None and found.dtype in kinds else kinds[0], wanted)})
    if described.is_static:
        require(tensors, {"input_scale": (None, ())})


def from_quark(
    tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int], signed: bool, in_awqs: bool
) -> QuantizedWeight:
    """The weight of a layer of Quark, whose integers are `signed`, and those of 4 bits in words in AWQ's order or one
    after the other. Raises FormatError for inconsistent tensors."""
    tensors = {name: t.reshape(()) if t.shape == (1,) else t for name, t in tensors.items()}
    check_quark(tensors, described, shape)
    (rows, columns), grid = shape, described.grid
    assert grid is not None
    middle, grouped = 1 << (grid.bits - 1), described.strategy == "group"
    groups = columns // described.group_size if grouped else 1

    def fields(name: str, last: int) -> Tensor:
        """Integers from 0, with the layer's rows first."""
        found = tensors[name]
        if grid.bits == BITS:
            found = unpack(found, BITS, last, ORDER if in_awqs else None)
            found = found ^ middle if signed else found
        else:
            found = found.int() + (middle if signed else 0)
        return found.t() if grouped else found

    q = fields("weight", rows if grouped else columns).to(torch.uint8).contiguous()
    scale = tensors["weight_scale"].float()
    scale = scale.t() if grouped else scale.reshape(-1, 1).expand(rows, 1)
    if "weight_zero_point" in tensors:
        zero = fields("weight_zero_point", rows).int()
        zero = zero if grouped else zero.reshape(-1, 1).expand(rows, 1)
    elif grid.symmetric:
        zero = torch.full((rows, groups), middle, dtype=torch.int32, device=q.device)
    else:
        raise FormatError("weight_zero_point: expected a tensor, found none")
    made = Codes(q, scale.contiguous(), zero.contiguous(), None, grid.bits, described.group_size).quantized(grid)
    if not described.is_static:
        return made
    shift = tensors.get("input_zero_point")
    shift = torch.zeros(1, dtype=torch.int32, device=q.device) if shift is None else shift.reshape(1).int()
    return replace(made, inputs=InputGrid(tensors["input_scale"].float().reshape(1), shift))
