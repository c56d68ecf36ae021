"""GGUF blocks, of 32 values (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) and super-blocks of 256 (Q2_K to Q6_K), as weights.

How a block holds its values: `gguf_blocks`, and docs/guide/weight_layouts.md. Integers, scales and offsets are
converted exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.formats.layouts.base import FormatError, Quantization, sizes
from epiloq.formats.layouts.gguf_blocks import KINDS
from epiloq.formats.weights import OffsetWeight, Weight
from epiloq.weights.block_quant_weight import BlockQuantWeight, pack_pairs
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.packed_weight import PackedWeight, pack_weight

METHOD = "gguf"
BLOCK = 32
# Kinds that can be reconstructed byte for byte from the packed weight.
_WRITTEN = ("Q4_0", "Q4_1", "Q8_0")


def to_packed(weight: Tensor, *, kind: str, shape: tuple[int, int] | None = None) -> PackedWeight:
    """The weight ``[N, K]`` of rows of blocks, on their device: ``scale * q`` or ``scale * q + offset``, exactly.

    Q5_0, Q5_1, Q5_K and Q6_K are held in 8 bits a value. The K-quants' scales and offsets are products of two numbers,
    held in float32.

    Args:
        weight: uint8 ``[N, K / values of a block * bytes of a block]``, as the gguf package gives a tensor's data.
        kind: a key of ``gguf_blocks.KINDS``, such as "Q4_0" or "Q6_K".
        shape: [N, K], checked against the number of bytes.

    Raises:
        FormatError: a ValueError, which names what does not fit.
    """
    q, scale, offset = _parts(weight, kind, shape)
    return pack_weight(q, scale, offset=offset, bits=KINDS[kind].bits, group_size=KINDS[kind].group)


def to_online(weight: Tensor, *, kind: str, shape: tuple[int, int] | None = None) -> BlockQuantWeight:
    """Return the weight for ``epiloq.online_quant_mm``, which multiplies integers, with activations in the same groups.

    4-bit values become signed, so Q4_1 and Q4_K have the offset ``offset + 8 scale``, rounded once to float32.
    """
    q, scale, offset = _parts(weight, kind, shape)
    low, high = KINDS[kind].low, KINDS[kind].high
    scale, offset = scale.float(), None if offset is None else offset.float()
    bits = 4 if high - low <= 15 else 8
    if offset is not None and high == 15:
        q, offset = q.view(torch.int8) - 8, torch.add(offset, scale, alpha=8)
    q = q.view(torch.int8)
    return epiloq.online_quant_weight(
        pack_pairs(q) if bits == 4 else q, scale, offset, group_size=KINDS[kind].group, bits=bits
    )


def quantization_of(kind: str) -> Quantization | None:
    """How layers of a kind of block are quantised; None if groups have offsets."""
    found = KINDS[kind]
    return None if found.offset else Quantization(Grid(found.bits, found.group, symmetric=True))


def to_weight(weight: Tensor, *, kind: str, shape: tuple[int, int] | None = None) -> Weight:
    """The same weight for other formats. Raises FormatError as `to_packed` does, and for NaN and infinity."""
    quantization = quantization_of(kind)
    if quantization is None:
        packed = to_packed(weight, kind=kind, shape=shape)
        check_finite(packed.scale, packed.offset)
        return OffsetWeight.of(packed)
    q, scale, _ = _parts(weight, kind, shape)
    check_finite(scale)
    return QuantizedWeight(q, scale.float(), None, quantization.grid)


def check_finite(*parameters: Tensor | None) -> None:
    """Raise FormatError for scales or offsets that are NaN or infinite."""
    if not all(bool(parameter.isfinite().all()) for parameter in parameters if parameter is not None):
        raise FormatError("holds NaN or infinity")


def from_packed(packed: PackedWeight) -> dict[str, Tensor]:
    """``{"weight": uint8 blocks}``, the inverse of `to_packed` byte for byte; `kind_of` returns their kind.

    Raises FormatError for weights that no kind with blocks of 32 represents; 5-bit kinds and K-quants are not written.
    """
    kind = kind_of(packed)
    q, scale, offset = packed.unpack()
    n, blocks = scale.shape
    parameters = torch.stack((scale,) if offset is None else (scale, offset), dim=-1).view(torch.uint8)
    if KINDS[kind].bits == 4:
        codes = (q + 8 if offset is None else q).view(torch.uint8).view(n, blocks, 2, BLOCK // 2)
        values = codes[:, :, 0] | codes[:, :, 1] << 4
    else:
        values = q.view(torch.uint8).view(n, blocks, BLOCK)
    return {"weight": torch.cat((parameters, values), dim=-1).view(n, -1)}


def kind_of(packed: PackedWeight) -> str:
    """The kind of block that holds a weight: groups of 32, float16 scales, no zero points, no activation order."""
    if packed.group_size != BLOCK or packed.k % BLOCK or packed.perm is not None or packed.zero is not None:
        raise FormatError(f"gguf: expected whole groups of {BLOCK}, in order, without integer zero points")
    if packed.scale.dtype != torch.float16:
        raise FormatError(f"gguf: scale: expected float16, got {packed.scale.dtype}")
    wanted = (packed.bits, packed.offset is not None)
    for name in _WRITTEN:
        if (KINDS[name].bits, KINDS[name].offset) == wanted:
            return name
    raise FormatError(f"gguf: expected {', '.join(_WRITTEN)}, got {packed.bits} bits with offsets: {wanted[1]}")


def _parts(weight: Tensor, kind: str, shape: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """q ``[N, K]``, uint8 or int8, scale and offset ``[N, K / group]``, float16 or float32."""
    if kind not in KINDS:
        raise FormatError(f"gguf: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    found = KINDS[kind]
    n, width = sizes("weight", weight)
    if weight.dtype != torch.uint8 or width % found.nbytes:
        wanted = f"uint8 rows of {kind} blocks of {found.nbytes} bytes"
        raise FormatError(f"weight: expected {wanted}, got {weight.dtype} {list(weight.shape)}")
    k = width // found.nbytes * found.size
    if shape is not None and tuple(shape) != (n, k):
        raise FormatError(f"weight: expected blocks of a layer {list(shape)}, got those of {[n, k]}")
    q, scale, offset = found.decode(weight.reshape(-1, found.nbytes))
    groups = k // found.group
    return (
        q.reshape(n, k),
        scale.reshape(n, groups).contiguous(),
        None if offset is None else offset.reshape(n, groups).contiguous(),
    )
