"""GGUF files: headers are checked completely, then the file is memory-mapped.

A file consists of "GGUF", a version, the numbers of tensors and keys, the keys with their values, the tensors' names,
sizes, kinds and offsets and, from the next multiple of the alignment, their bytes in the same order, with gaps only for
alignment (ggml, ``docs/gguf.md``). Only little-endian files are supported.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.io.safe_files import check_regular
from epiloq.formats.layouts.base import FormatError

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
LONGEST_NAME, MOST_DIMENSIONS = 1 << 16, 4
# indexed by ggml's gguf_type
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Array:
    """An array among a file's values; only short numeric arrays keep their items."""

    kind: str
    count: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its kind ("Q4_0", "F32", …), its shape in torch's order, and a view of its bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: memoryview

    def blocks(self) -> Tensor:
        """A copy of a matrix's rows of blocks, uint8."""
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(*self.shape[:-1], -1)

    def part(self, index: int) -> Stored:
        """One matrix of a stack."""
        size = len(self.data) // self.shape[0]
        data = self.data[index * size : (index + 1) * size]
        return Stored(f"{self.name}[{index}]", self.kind, self.shape[1:], data)

    def dequantize(self) -> Tensor:
        """The values in float32, for any kind supported by the gguf package.

        Raises FormatError for other kinds and for non-finite values.
        """
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = np.frombuffer(self.data, dtype=np.uint8).reshape(*self.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):
                values = dequantize(rows, GGMLQuantizationType[self.kind])
        except (NotImplementedError, ValueError) as error:
            raise FormatError(f"{self.name}: {self.kind}: the gguf package cannot dequantise it: {error}") from error
        found = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).copy()).view(self.shape)
        if not found.isfinite().all():
            raise FormatError(f"{self.name}: holds NaN or infinity")
        return found


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file rather than of a model directory, by its name."""
    return path.suffix == ".gguf"


class GgufFile:
    """A GGUF file opened for reading: ``tensors`` and ``values`` by name, and ``architecture``.

    Raises FormatError for incomplete or other files, for tensors that are misaligned, overlap, leave gaps or lie
    outside the file, and for invalid sizes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = check_regular(path).st_size
        if self.nbytes < 24:
            raise FormatError(f"{path}: damaged GGUF file: {self.nbytes} bytes")
        with path.open("rb") as stream:
            data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            self._read(_Cursor(data))
        except (ValueError, struct.error) as error:
            named = isinstance(error, FormatError)
            raise FormatError(f"{path}: {error}" if named else f"{path}: damaged GGUF file: {error}") from None
        parts = self.values.get("split.count", 1)
        if parts not in (0, 1):
            raise FormatError(
                f"{path}: split.count: expected a whole model, got one of {parts} files; join them by "
                "llama-gguf-split --merge"
            )
        architecture = self.values.get("general.architecture")
        if not isinstance(architecture, str):
            raise FormatError(f"{path}: general.architecture: expected a name, found {architecture!r}")
        self.architecture = architecture

    def _read(self, cursor: _Cursor) -> None:
        if cursor.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, keys = cursor.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version: expected 2 or 3 in little-endian order, got {version}")
        self.values: dict[str, Any] = {}
        for _ in range(cursor.count(keys, 13)):
            name = cursor.text(LONGEST_NAME)
            if name in self.values:
                raise ValueError(f"{name}: a second value")
            self.values[name] = _value(cursor, name)
        alignment = self.values.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise FormatError(f"general.alignment: expected a power of two, got {alignment!r}")
        described = list(_described(cursor, cursor.count(tensors, 24)))
        begin = -(-cursor.at // alignment) * alignment
        self.tensors: dict[str, Stored] = {}
        end = 0
        for name, kind, shape, nbytes, offset in described:
            wanted = -(-end // alignment) * alignment
            if offset != wanted:
                raise FormatError(f"{name}: expected its bytes at {wanted}, after those before it, got {offset}")
            end = offset + nbytes
            if begin + end > len(cursor.data):
                raise FormatError(f"{name}: damaged GGUF file: expected {begin + end} bytes, got {len(cursor.data)}")
            if name in self.tensors:
                raise FormatError(f"{name}: a second tensor of this name")
            self.tensors[name] = Stored(name, kind, shape, cursor.data[begin + offset : begin + end])


class _Cursor:
    """Sequential reader of bytes. Raises ValueError or struct.error at their end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"expected {count} bytes at {self.at}, got {len(self.data) - self.at}")
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def count(self, number: int, least: int) -> int:
        """Read a count of items; the remaining bytes must suffice for that many items of the given minimum size."""
        if number * least > len(self.data) - self.at:
            raise ValueError(f"expected at most {len(self.data) - self.at} bytes at {self.at}, for {number} entries")
        return number

    def text(self, most: int) -> str:
        (length,) = self.numbers("Q")
        if length > most:
            raise ValueError(f"expected at most {most} characters at {self.at}, got {length}")
        return self.take(length).decode("utf-8")

    def skip_texts(self, count: int) -> None:
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self.data, self.at)
            if length > len(self.data) - self.at - 8:
                raise ValueError(f"expected {length} bytes at {self.at + 8}, got fewer")
            self.at += 8 + length


def _value(cursor: _Cursor, name: str) -> Any:
    (kind,) = cursor.numbers("I")
    if kind in _SCALARS:
        return cursor.numbers(_SCALARS[kind])[0]
    if kind == _STRING:
        return cursor.text(len(cursor.data))
    if kind != _ARRAY:
        raise ValueError(f"{name}: expected a type of value from 0 to 12, got {kind}")
    kind, count = cursor.numbers("IQ")
    if kind == _STRING:
        cursor.skip_texts(cursor.count(count, 8))
        return Array("texts", count)
    if kind not in _SCALARS:
        raise ValueError(f"{name}: expected an array of numbers or texts, got one of type {kind}")
    code = _SCALARS[kind]
    cursor.count(count, struct.calcsize(code))
    if count <= 1024:
        return Array("numbers", count, cursor.numbers(f"{count}{code}"))
    cursor.at += count * struct.calcsize(code)
    return Array("numbers", count)


def _described(cursor: _Cursor, count: int) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Name, kind, shape in torch's order, size in bytes and offset of each tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kinds = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    for _ in range(count):
        name = cursor.text(LONGEST_NAME)
        (dimensions,) = cursor.numbers("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise FormatError(f"{name}: expected 1 to {MOST_DIMENSIONS} dimensions, got {dimensions}")
        sizes = cursor.numbers(f"{dimensions}Q")
        number, offset = cursor.numbers("IQ")
        if number not in kinds:
            raise FormatError(f"{name}: expected a kind of tensor that the gguf package supports, got {number}")
        kind, block, nbytes = kinds[number]
        shape = tuple(reversed(sizes))
        if not 0 < prod(sizes) < 1 << 63 or sizes[0] % block:
            raise FormatError(f"{name}: expected rows of whole blocks of {block} for {kind}, got {list(shape)}")
        yield name, kind, shape, prod(sizes) // block * nbytes, offset
