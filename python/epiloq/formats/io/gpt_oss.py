"""The stacked MXFP4 experts of GPT-OSS's own checkpoints, presented as one matrix per projection and expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

from torch import Tensor

from epiloq.formats.configs.mxfp4 import METHOD
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.safetensors_file import DTYPES, Entry
from epiloq.formats.layouts.base import FormatError

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_BLOCK_BYTES = 16


class _Part(NamedTuple):
    """A tensor of a stack: the end of its name, the name in a linear layer, its dimensions, and its form there."""

    end: str
    name: str
    ndim: int
    form: Callable[[Tensor], Tensor]


# Blocks of 16 bytes follow one another in a row; an even column is in the low half of a byte.
_PARTS = (
    _Part("_blocks", "weight", 4, lambda rows: rows.flatten(1)),
    _Part("_scales", "weight_scale", 3, lambda rows: rows),
    _Part("_bias", "bias", 2, lambda rows: rows),
)
# Rows of a stack by the matrix to which they belong: gates and ups alternate.
_ROWS = {_GATE_UP: {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}, _DOWN: {_DOWN: slice(None)}}


def split_experts_(checkpoint: Checkpoint) -> None:
    """Make a checkpoint of GPT-OSS return the tensors of each expert's linear layers instead of stacks.

    Others are not changed. Raises FormatError, which names file and tensor, for missing tensors, and for other types or
    shapes.
    """
    if (checkpoint.quantization or {}).get("quant_method") != METHOD:
        return
    marker = f".{_GATE_UP}{_PARTS[0].end}"
    for name in [name for name in checkpoint.files if name.endswith(marker)]:
        for stack in _ROWS:
            for part in _PARTS:
                _split(checkpoint, name.removesuffix(marker), stack, part)


def _split(checkpoint: Checkpoint, experts: str, stack: str, part: _Part) -> None:
    source = f"{experts}.{stack}{part.end}"
    entry = checkpoint.entries.get(source)
    if entry is None:
        raise FormatError(f"{checkpoint.folder}: {source}: expected a tensor, found none")
    dtype = DTYPES[entry.dtype]
    right = dtype.is_floating_point if part.name == "bias" else entry.dtype == "U8"
    if not right or len(entry.shape) != part.ndim or (part.ndim == 4 and entry.shape[3] != _BLOCK_BYTES):
        wanted = "floating point" if part.name == "bias" else f"uint8 of {part.ndim} dimensions, blocks of 16 bytes"
        raise FormatError(f"{checkpoint.where(source)}: expected {wanted}, got {entry.dtype} {list(entry.shape)}")
    file, count, rows = checkpoint.files[source], entry.shape[0], entry.shape[1]
    rest = (prod(entry.shape[2:]),) if part.ndim == 4 else entry.shape[2:]
    stored = checkpoint.stored.get(source, source)

    def of(expert: int, chosen: slice) -> Tensor:
        return part.form(checkpoint.read(file, stored)[expert, chosen]).contiguous()

    del checkpoint.entries[source], checkpoint.files[source]
    for expert in range(count):
        for matrix, chosen in _ROWS[stack].items():
            shape = (len(range(*chosen.indices(rows))), *rest)
            target = f"{experts}.{expert}.{matrix}.{part.name}"
            checkpoint.entries[target] = Entry(entry.dtype, shape, prod(shape) * dtype.itemsize)
            checkpoint.files[target] = file
            checkpoint.computed[target] = partial(of, expert, chosen)
