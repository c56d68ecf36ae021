"""Describes a GGUF file, and how epiloq runs each kind of block, without running the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from epiloq.formats.io.gguf_file import GgufFile, Stored
from epiloq.formats.io.gguf_model import load, outline
from epiloq.formats.layouts.gguf_blocks import KINDS
from epiloq.nn.base.packed_linear import few_bits_note

# Prefix of the names of a block's tensors: "blk.7.".
_BLOCK = re.compile(r"^blk\.\d+\.")


def inspect(path: Path, check: bool = False) -> dict[str, Any]:
    """Return the facts, ready for JSON. With `check`, every value is decoded too.

    kinds
        For each kind of block: how many tensors of how many bytes, its bits per weight including scales, and how they
        run.
    layers
        Tensors that share the last part of their name, shape and kind of block: a row each.

    Raises FormatError for a file that is bad, in an architecture that is not read, or that disagrees with itself.
    """
    file = GgufFile(path)
    model, places = outline(file, "meta", torch.float32)
    if check:
        load(path)
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    kinds: dict[tuple[str, str], list[Stored]] = {}
    for name, stored in places.items():
        kinds.setdefault((stored.kind, how(stored.kind, name in linears)), []).append(stored)
    return {
        "model": str(path),
        "format": "gguf",
        "architecture": file.architecture,
        "architectures": [type(model).__name__],
        "tensors": len(file.tensors),
        "bytes": sum(len(stored.data) for stored in file.tensors.values()),
        "kinds": [
            {
                "kind": kind,
                "tensors": len(found),
                "bits": _bits(found),
                "bytes": sum(len(stored.data) for stored in found),
                "runs": runs,
            }
            for (kind, runs), found in sorted(kinds.items())
        ],
        "layers": _layers(file),
    }


def _bits(found: Sequence[Stored]) -> float:
    """Bits per weight, with scales."""
    return 8 * sum(len(stored.data) for stored in found) / sum(prod(stored.shape) for stored in found)


def _layers(file: GgufFile) -> list[dict[str, Any]]:
    """Every tensor of the file, those alike in one row."""
    rows: dict[tuple[str, tuple[int, ...], str], list[Stored]] = {}
    for name, stored in file.tensors.items():
        rows.setdefault((_BLOCK.sub("", name), stored.shape, stored.kind), []).append(stored)
    return [
        {
            "name": name,
            "tensors": len(found),
            "shape": list(shape),
            "kind": kind,
            "bits": _bits(found),
            "bytes": sum(len(stored.data) for stored in found),
        }
        for (name, shape, kind), found in sorted(rows.items())
    ]


def how(kind: str, linear: bool) -> str:
    """Return how epiloq runs tensors of a kind of block."""
    if kind == "F32":
        return "in floating point"
    if not linear or kind not in KINDS:
        return "dequantised, then rounded to the model's type (exact in float32)"
    found = KINDS[kind]
    zeros = "with offsets" if found.offset else "symmetric"
    parameters = "float32" if kind.endswith("_K") else "float16"
    note = few_bits_note(found.bits, found.size, found.group)
    text = f"on its integers, held in {found.bits} bits, groups of {found.group}, {zeros}, {parameters} scales: exact"
    return text if note is None else f"{text}; {note}"
