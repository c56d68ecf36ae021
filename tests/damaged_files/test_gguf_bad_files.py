"""Damaged and hostile GGUF files: one sentence, soon, in little memory, from Python and from the command line."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("gguf")
pytest.importorskip("transformers")

from command_line import run
from epiloq.formats.io import gguf_model
from epiloq.formats.io.gguf_file import GgufFile
from epiloq.formats.layouts.base import FormatError
from gguf_files import reference, write

NORM, UP = "blk.0.ffn_norm.weight", "blk.0.ffn_up.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    kinds = {"attn_": "Q4_0", "ffn_": "Q4_K", "token_embd": "Q8_0", "output": "Q6_K"}
    write(path, reference("llama", num_hidden_layers=1), "llama", kinds, values={"block_count": 1})
    return path.read_bytes()


def info(data: bytes, name: str) -> int:
    """Where the description of a tensor begins, after its name."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def put(data: bytes, at: int, kinds: str, *values: float) -> bytes:
    packed = struct.pack(f"<{kinds}", *values)
    return data[:at] + packed + data[at + len(packed) :]


def place(data: bytes, name: str, change: Callable[[int], int]) -> bytes:
    at = info(data, name)
    (dimensions,) = struct.unpack_from("<I", data, at)
    at += 4 + 8 * dimensions + 4
    (offset,) = struct.unpack_from("<Q", data, at)
    return put(data, at, "Q", change(offset))


def value(data: bytes, key: str, kinds: str, *values: float) -> bytes:
    """Replace what follows a key: its type and value."""
    return put(data, info(data, key), kinds, *values)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "damaged GGUF file"),
    "short": (lambda d: d[:40], "damaged GGUF file"),
    "half": (lambda d: d[: len(d) // 2], "damaged GGUF file"),
    "last bytes": (lambda d: d[:-400], "damaged GGUF file"),
    "magic": (lambda d: b"GGML" + d[4:], "does not begin with GGUF"),
    "version": (lambda d: put(d, 4, "I", 9), "version: expected 2 or 3"),
    "big endian": (lambda d: put(d, 4, "I", 3 << 24), "version: expected 2 or 3 in little-endian order"),
    "tensors": (lambda d: put(d, 8, "Q", 1 << 60), "for 1152921504606846976 entries"),
    "keys": (lambda d: put(d, 16, "Q", 1 << 60), "for 1152921504606846976 entries"),
    "one key more": (lambda d: put(d, 16, "Q", struct.unpack_from("<Q", d, 16)[0] + 1), "tiny.gguf: "),
    "name": (lambda d: put(d, 24, "Q", 1 << 50), "expected at most 65536 characters"),
    "name of two lines": (
        lambda d: value(d.replace(b"block_count", b"block\ncount"), "llama.block\ncount", "I", 77),
        r"llama.block\\ncount: expected a type of value",
    ),
    "overlap": (lambda d: place(d, NORM, lambda o: o - 64), f"{NORM}: expected its bytes at .*, got"),
    "same place": (lambda d: place(d, UP, lambda o: 0), f"{UP}: expected its bytes at"),
    "misaligned": (lambda d: place(d, NORM, lambda o: o + 4), f"{NORM}: expected its bytes at"),
    "gap": (lambda d: place(d, NORM, lambda o: o + 32), f"{NORM}: expected its bytes at"),
    "outside": (lambda d: place(d, UP, lambda o: 1 << 62), f"{UP}: expected its bytes at"),
    "dimensions": (lambda d: put(d, info(d, NORM), "I", 1 << 31), f"{NORM}: expected 1 to 4 dimensions"),
    "no dimensions": (lambda d: put(d, info(d, NORM), "I", 0), f"{NORM}: expected 1 to 4 dimensions"),
    "absurd": (lambda d: put(d, info(d, UP) + 4, "QQ", 1 << 40, 1 << 40), f"{UP}: expected rows of whole blocks"),
    "nothing": (lambda d: put(d, info(d, UP) + 4, "Q", 0), f"{UP}: expected rows of whole blocks"),
    "large": (lambda d: put(d, info(d, UP) + 4, "Q", 1 << 40), "expected its bytes at|damaged GGUF"),
    "part of a block": (lambda d: put(d, info(d, UP) + 4, "Q", 250), f"{UP}: expected rows of whole blocks of 256"),
    "kind": (lambda d: put(d, info(d, UP) + 20, "I", 999), f"{UP}: expected a kind of tensor"),
    "another kind": (lambda d: put(d, info(d, UP) + 20, "I", 3), "expected its bytes at"),
    "type": (lambda d: value(d, "llama.block_count", "I", 77), "llama.block_count: expected a type of value"),
    "layers": (lambda d: value(d, "llama.block_count", "II", 4, 3_000_000), "block_count: expected at most"),
    "array": (lambda d: value(d, "llama.block_count", "IIQ", 9, 4, 1 << 60), "entries"),
    "nested arrays": (lambda d: value(d, "llama.block_count", "IIQ", 9, 9, 1), "expected an array of numbers or texts"),
    "float": (lambda d: value(d, "llama.block_count", "If", 6, 1.0), "block_count: expected int, got 1.0"),
    "no heads": (lambda d: value(d, "llama.attention.head_count", "II", 4, 0), "head_count: expected 1 to"),
    "heads": (lambda d: value(d, "llama.attention.head_count", "II", 4, 3), "tiny.gguf: "),
    "context": (lambda d: value(d, "llama.context_length", "II", 4, 1 << 31), "context_length: expected 1 to"),
    "hidden": (lambda d: value(d, "llama.embedding_length", "II", 4, 1 << 30), r"token_embd.weight: expected \[160, "),
    "epsilon": (lambda d: value(d, "llama.attention.layer_norm_rms_epsilon", "If", 6, -1.0), "expected a number above"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_are_reported_in_one_sentence(whole: bytes, tmp_path: Path, how: str) -> None:
    damage, message = DAMAGE[how]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damage(whole))
    with pytest.raises(FormatError, match=message) as caught:
        gguf_model.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    result = run("inspect", path, "--check")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert str(path) in result.stderr and "\n" not in result.stderr.strip()
    assert path.read_bytes() == damage(whole)


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "device.gguf").symlink_to("/dev/zero")
    (tmp_path / "dangling.gguf").symlink_to("nowhere")
    (tmp_path / "folder.gguf").mkdir()
    for name, message in (
        ("fifo", "found a FIFO"),
        ("device", "found a character device"),
        ("dangling", "link to nowhere"),
        ("folder", "found a directory"),
        ("absent", "missing"),
    ):
        with pytest.raises(FormatError, match=message):
            GgufFile(tmp_path / f"{name}.gguf")
        result = run("inspect", tmp_path / f"{name}.gguf")
        assert result.exit_code == 2 and message in result.stderr, result.stderr


def test_inspect_says_how_each_kind_runs(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(whole)
    result = run("inspect", tmp_path / "tiny.gguf", "--check", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0, result.output
    message = " ".join(result.output.split())
    for part in (
        "LlamaForCausalLM, format gguf (llama)",
        "Q4_0: 4 tensors",
        "Q4_K: 3 tensors",
        "on its integers, held in 4 bits, groups of 32, with offsets, float32 scales: exact",
        "Q6_K: 1 tensors",
        "held in 8 bits, groups of 16, symmetric, float32 scales: exact",
        "Q8_0: 1 tensors",
        "dequantised, then rounded to the model's type (exact in float32)",
        "F32: 3 tensors",
    ):
        assert part in message, message
    facts = json.loads((tmp_path / "facts.json").read_text())
    # By ggml's blocks: 32 values in 18 or 34 bytes, 256 in 144 or 210.
    bits = {"Q4_0": 4.5, "Q8_0": 8.5, "Q4_K": 4.5, "Q6_K": 6.5625, "F32": 32}
    assert {row["kind"]: row["bits"] for row in facts["kinds"]} == bits
    for row in facts["layers"]:
        weights = row["tensors"] * math.prod(row["shape"])
        assert row["bits"] == bits[row["kind"]] and row["bytes"] * 8 == weights * row["bits"]
    assert sum(row["tensors"] for row in facts["layers"]) == facts["tensors"]
    assert sum(row["bytes"] for row in facts["layers"]) == facts["bytes"]
    assert {"attn_q.weight", "output_norm.weight"} <= {row["name"] for row in facts["layers"]}
    assert "6.5625 bits a weight" in message and "attn_q.weight" in message
