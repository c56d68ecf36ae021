"""GGUF blocks of 32 values (Q4_0, Q4_1, Q8_0), and files of them, read through the gguf package.

Defined by ggml (``ggml-common.h``, ``block_q4_0`` and on), drawn in docs/weight_layouts.md. The integers and their
parameters are taken as they are, so that nothing goes through floating point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.formats.layouts.base import FormatError, sizes
from epiloq.weights.block_quant_weight import BlockQuantWeight, pack_pairs
from epiloq.weights.packed_weight import PackedWeight, pack_weight

BLOCK = 32


@dataclass(frozen=True)
class Kind:
    """One type of block: bits of a value, and whether an offset ("m") follows the scale ("d"), both float16."""

    bits: int
    offset: bool

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.parameters + BLOCK * self.bits // 8

    @property
    def parameters(self) -> int:
        """Bytes of its scale and offset."""
        return 4 if self.offset else 2


KINDS: Mapping[str, Kind] = {"Q4_0": Kind(4, False), "Q4_1": Kind(4, True), "Q8_0": Kind(8, False)}


def to_packed(weight: Tensor, *, kind: str, shape: tuple[int, int] | None = None) -> PackedWeight:
    """The weight ``[N, K]`` of rows of blocks, on their device: ``d q`` or ``d q + m``, exactly.

    Args:
        weight: uint8 ``[N, K / 32 * bytes of a block]``, as the gguf package gives a tensor's data.
        kind: "Q4_0", "Q4_1" or "Q8_0".
        shape: [N, K], to be compared with what the bytes make.

    Raises:
        FormatError: a ValueError, which names what does not fit.
    """
    q, scale, offset = _parts(weight, kind, shape)
    if offset is None and KINDS[kind].bits == 4:
        q = q.view(torch.int8) - 8
    return pack_weight(q, scale, offset=offset, bits=KINDS[kind].bits, group_size=BLOCK)


def to_online(weight: Tensor, *, kind: str, shape: tuple[int, int] | None = None) -> BlockQuantWeight:
    """As `to_packed`, for ``epiloq.online_quant_mm``: integers times integers, activations in the same blocks.

    Its 4-bit values are signed, so that Q4_1 has the offset ``m + 8 d``, rounded once to float32.
    """
    q, scale, offset = _parts(weight, kind, shape)
    bits, scale = KINDS[kind].bits, scale.float()
    offset = None if offset is None else torch.add(offset.float(), scale, alpha=8)
    if bits == 4:
        q = pack_pairs(q.view(torch.int8) - 8)
    return epiloq.online_quant_weight(q, scale, offset, group_size=BLOCK, bits=bits)


def from_packed(packed: PackedWeight) -> dict[str, Tensor]:
    """``{"weight": uint8 blocks}``, byte for byte those that `to_packed` took; `kind_of` tells their kind.

    Raises FormatError for what no kind of block holds.
    """
    kind = KINDS[kind_of(packed)]
    q, scale, offset = packed.unpack()
    n, blocks = scale.shape
    parameters = torch.stack((scale,) if offset is None else (scale, offset), dim=-1).view(torch.uint8)
    if kind.bits == 4:
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
    wanted = Kind(packed.bits, packed.offset is not None)
    for name, kind in KINDS.items():
        if kind == wanted:
            return name
    raise FormatError(f"gguf: expected {', '.join(KINDS)}, got {packed.bits} bits with offsets: {wanted.offset}")


def _parts(weight: Tensor, kind: str, shape: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """q ``[N, K]``, uint8 from 0 to 15 or int8, d and m float16 ``[N, K / 32]``."""
    if kind not in KINDS:
        raise FormatError(f"gguf: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    found = KINDS[kind]
    n, width = sizes("weight", weight)
    if weight.dtype != torch.uint8 or width % found.nbytes:
        wanted = f"uint8 rows of {kind} blocks of {found.nbytes} bytes"
        raise FormatError(f"weight: expected {wanted}, got {weight.dtype} {list(weight.shape)}")
    k = width // found.nbytes * BLOCK
    if shape is not None and tuple(shape) != (n, k):
        raise FormatError(f"weight: expected blocks of a layer {list(shape)}, got those of {[n, k]}")
    blocks = weight.reshape(n, k // BLOCK, found.nbytes)
    parameters = blocks[..., : found.parameters].contiguous().view(torch.float16)
    values = blocks[..., found.parameters :]
    # Byte j holds values j and j + 16.
    values = torch.cat((values & 15, values >> 4), dim=-1) if found.bits == 4 else values.view(torch.int8)
    scale = parameters[..., 0].contiguous()
    return values.reshape(n, k), scale, parameters[..., 1].contiguous() if found.offset else None


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its kind ("Q4_0", "F32", ..), its shape in torch's order, and a view of its bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Any

    def blocks(self) -> Tensor:
        """A copy of the rows of blocks, uint8, of a matrix of one of `KINDS`."""
        return torch.from_numpy(self.data.copy())

    def dequantize(self) -> Tensor:
        """The values in float32, of any kind that the gguf package knows."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(self.data, GGMLQuantizationType[self.kind]).copy()).view(self.shape)


class GgufFile:
    """A GGUF file opened for reading: ``tensors`` by name, and ``architecture``.

    Raises FormatError for what is no whole GGUF file, or whose tensors' sizes and bytes disagree.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader, GGUFValueType

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise FormatError(f"{path}: not a whole GGUF file: {error}") from error
        field = reader.fields.get("general.architecture")
        if field is None or field.types[0] != GGUFValueType.STRING:
            raise FormatError(f"{path}: general.architecture: expected a name, found none")
        self.architecture: str = field.contents()
        self.tensors: dict[str, Stored] = {}
        for tensor in reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            kind = tensor.tensor_type.name
            if kind in KINDS and tensor.data.nbytes * BLOCK != KINDS[kind].nbytes * int(tensor.n_elements):
                raise FormatError(f"{path}: {tensor.name}: expected bytes of {kind} {list(shape)}")
            self.tensors[tensor.name] = Stored(tensor.name, kind, shape, tensor.data)
