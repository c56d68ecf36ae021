"""safetensors files: checked headers, and writing without keeping tensors in memory.

A file consists of the header's length (8 bytes, little endian), the header (JSON: dtype, shape and offsets of each
tensor), and the tensors' bytes without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from epiloq.formats.io.safe_files import check_regular, pointer
from epiloq.formats.layouts.base import FormatError

METADATA = "__metadata__"
# safetensors' own limit
LONGEST_HEADER = 100_000_000
COPIED = 1 << 20

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor's header entry: dtype as named by safetensors ("BF16"), shape, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def outline(self) -> Tensor:
        """A tensor with this dtype and shape on the meta device."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="meta")

    @property
    def is_float(self) -> bool:
        """Whether its values are in floating point of 16 bits or more, and so mean what they are."""
        return _is_float(DTYPES[self.dtype])

    def fits(self, target: Tensor) -> bool:
        """Whether this can be loaded into a model's tensor: equal shapes, and equal dtypes or both floating-point.

        FP8 values mean nothing without their scales, so they fit FP8 only.
        """
        dtype = DTYPES[self.dtype]
        both_float = _is_float(dtype) and _is_float(target.dtype)
        return target.shape == self.shape and (dtype == target.dtype or both_float)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def read_header(file: Path) -> dict[str, Entry]:
    """The header entries of a file's tensors by name; no tensor is read.

    Raises FormatError, naming file and tensor, for an incomplete or invalid header, an unknown dtype, sizes that
    disagree with the shape, tensors outside the file or overlapping, and bytes that belong to no tensor.
    """
    header, begins, size = _header(file)
    header.pop(METADATA, None)
    places = {name: _place(file, name, described, size - begins) for name, described in header.items()}
    end = 0
    for name, (begin, after) in sorted(places.items(), key=lambda item: item[1]):
        if begin != end:
            raise FormatError(f"{file}: {name}: expected its bytes from {end} on, got {begin}")
        end = after
    if end != size - begins:
        raise FormatError(f"{file}: expected {end} bytes of tensors, got {size - begins}")
    return {
        name: Entry(described["dtype"], tuple(described["shape"]), places[name][1] - places[name][0])
        for name, described in header.items()
    }


def read_metadata(file: Path) -> dict[str, str]:
    """The texts by name that a file has beside its tensors. Raises FormatError for an incomplete or invalid header."""
    found = _header(file)[0].get(METADATA)
    if found is not None and not (isinstance(found, dict) and all(isinstance(text, str) for text in found.values())):
        raise FormatError(f"{file}: {METADATA}: expected texts by name, got {found!r}")
    return found or {}


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    """A file's header as it is, where its tensors begin, and the size of the file."""
    size = check_regular(file).st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            damage = f"damaged safetensors file: its header does not fit {size} bytes"
            raise FormatError(f"{file}: {pointer(file) or damage}")
        try:
            header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_without_twins)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{file}: damaged safetensors file: header: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{file}: damaged safetensors file: header: expected a JSON object")
    return header, 8 + length, size


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"expected each name once, got {max(names, key=names.count)!r} twice")
    return found


def _place(file: Path, name: str, described: Any, available: int) -> tuple[int, int]:
    """Checked begin and end of a tensor's bytes."""
    fields = described if isinstance(described, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise FormatError(f"{file}: {name}: expected a type, a shape and two offsets, got {described!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{file}: {name}: expected a type among {', '.join(DTYPES)}, got {dtype!r}")
    begin, end = offsets
    if not begin <= end <= available:
        raise FormatError(
            f"{file}: {name}: damaged safetensors file: expected bytes {begin} to {end} of tensors, "
            f"got {available} bytes"
        )
    wanted = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != wanted:
        raise FormatError(f"{file}: {name}: expected {wanted} bytes for {dtype} {shape}, got {end - begin}")
    return begin, end


def _sizes(value: Any) -> list[int] | None:
    """A list of non-negative integers; None for anything else."""
    return value if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value) else None


class Shard:
    """A safetensors file being written: tensors immediately, the header on closing.

    Until then the data are in separate files, because the header precedes them and the widest dtypes come first, so
    that every tensor is aligned to its dtype.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.data = file.with_suffix(".data")
        self.stream: BinaryIO = self.data.open("wb")
        self.entries: dict[str, tuple[Tensor, int]] = {}
        """A tensor of no elements but the type and the shape, and where its bytes begin."""
        self.size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor's bytes."""
        self.entries[name] = (tensor.to("meta"), self.size)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self.size += self.stream.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Write the file."""
        self.stream.close()
        names = sorted(self.entries, key=lambda name: (-self.entries[name][0].itemsize, name))
        header: dict[str, Mapping[str, Any]] = {METADATA: {"format": "pt"}}
        end = 0
        for name in names:
            tensor, _ = self.entries[name]
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self.data.open("rb") as source, self.file.open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                tensor, begin = self.entries[name]
                source.seek(begin)
                _copy(source, target, tensor.nbytes)
        self.data.unlink()


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        chunk = source.read(min(count, COPIED))
        target.write(chunk)
        count -= len(chunk)
