"""Describes a GGUF file, and how epiloq runs each kind of block, without running the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from epiloq.formats.io.gguf_file import GgufFile, Stored
from epiloq.formats.io.gguf_model import load, outline
from epiloq.formats.layouts.gguf_blocks import KINDS
from epiloq.nn.base.packed_linear import few_bits_note


def inspect(path: Path, check: bool = False) -> dict[str, Any]:
    """Return the facts, ready for JSON. With `check`, every value is decoded too.

    kinds
        For each kind of block: how many tensors of how many bytes, and how they run.

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
            {"kind": kind, "tensors": len(found), "bytes": sum(len(stored.data) for stored in found), "runs": runs}
            for (kind, runs), found in sorted(kinds.items())
        ],
    }


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
