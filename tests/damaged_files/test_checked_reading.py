"""Damaged and hostile model directories: one sentence that names the file and the tensor, and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import epiloq
from command_line import run
from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import INDEX, SINGLE, Checkpoint, Writer
from epiloq.formats.io.safetensors_file import DTYPES, read_header
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from tiny_teacher import tiny_model

Header = dict[str, Any]
UP = "model.layers.0.mlp.up_proj"


def write(file: Path, header: object, data: bytes, length: int | None = None) -> Path:
    """A file of a header, as it is, and bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry(0, 8), "b": entry(8, 24)}, 20, r"b: damaged .* bytes 8 to 24 of tensors, got 20 bytes"),
        ({"a": entry(0, 8), "b": entry(2**40, 2**40 + 8)}, 16, r"b: .*expected bytes 1099511627776"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b: expected its bytes from 8 on, got 4"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "b: expected its bytes from 8 on, got 12"),
        ({"a": entry(0, 8)}, 12, "expected 8 bytes of tensors, got 12"),
        ({"a": entry(8, 0, [2])}, 8, "a: .*expected bytes 8 to 0"),
        ({"a": entry(-8, 0, [2])}, 8, "a: expected a type, a shape and two offsets"),
        ({"a": entry(0, 8, [3])}, 8, r"a: expected 12 bytes for F32 \[3\], got 8"),
        ({"a": entry(0, 8, [2**62, 2**62])}, 8, "a: expected .* bytes"),
        ({"a": entry(0, 8, [-2])}, 8, "a: expected a type, a shape"),
        ({"a": entry(0, 8, [2], "F4")}, 8, "a: expected a type among .*, got 'F4'"),
        ({"a": entry(0, 8) | {"dtype": ["F32"]}}, 8, "a: expected a type among"),
        ({"a": entry(0, 8) | {"data_offsets": [0, 4, 8]}}, 8, "a: expected a type, a shape and two offsets"),
        ({"a": entry(0, 8) | {"data_offsets": [0, 8.0]}}, 8, "a: expected a type, a shape and two offsets"),
        ({"a": 3}, 0, "a: expected a type, a shape and two offsets, got 3"),
        ([1], 0, "header: expected a JSON object"),
        (b'{"a": ', 0, "damaged safetensors file: header"),
        (b'{"a": 1, "a": 2}', 0, "each name once, got 'a' twice"),
        (b"\xff\xfe{}", 0, "damaged safetensors file: header"),
        (b"[" * 100_000, 0, "damaged safetensors file: header"),
    ],
)
def test_bad_headers(tmp_path: Path, header: object, size: int, message: str) -> None:
    file = write(tmp_path / SINGLE, header, bytes(size))
    with pytest.raises(FormatError, match=message) as caught:
        read_header(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 8, (200).to_bytes(8, "little") + b"{}"])
def test_files_too_short_for_their_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(FormatError, match="its header does not fit"):
        read_header(tmp_path / SINGLE)


ENTRIES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.builds(
        entry,
        st.integers(0, 16),
        st.integers(0, 24),
        st.lists(st.integers(0, 3), max_size=2),
        st.sampled_from(["F32", "U8", "BF16"]),
    ),
    max_size=3,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=ENTRIES, size=st.integers(0, 24))
def test_header_checks_agree_with_safetensors(tmp_path: Path, header: Header, size: int) -> None:
    file = write(tmp_path / SINGLE, header, bytes(size))
    try:
        found = read_header(file)
    except FormatError:
        with pytest.raises(SafetensorError):
            safe_open(file, framework="pt")
    else:
        with safe_open(file, framework="pt") as theirs:
            assert set(theirs.keys()) == set(found)
            for name in found:
                assert list(theirs.get_tensor(name).shape) == list(found[name].shape)


def test_written_files_are_safetensors(seed: int, tmp_path: Path) -> None:
    """Every type, sizes that would leave others unaligned, a scalar, nothing, a view."""
    tensors = {}
    for name, dtype in DTYPES.items():
        values = torch.randint(0, 2, (3, 5)).to(torch.uint8).repeat_interleave(dtype.itemsize, 1)
        tensors[name] = values.view(dtype)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3, dtype=torch.int16)}
    tensors["view"] = torch.randn(4, 6).t()[1:]
    writer = Writer(tmp_path / "out", largest_shard=200)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close({})
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert {file.name for file in (tmp_path / "out").iterdir()} == {f.name for f in files} | {"config.json", INDEX}
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, found[name]))
        assert torch.equal(ours, theirs), name
        assert torch.equal(Checkpoint(tmp_path / "out").tensor(name).contiguous().reshape(-1).view(torch.uint8), ours)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model in several shards."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    epiloq_modules.save(epiloq.quantize_(tiny_model(), "w8a8-int8"), folder, largest_shard=60_000)
    return folder


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())  # type: ignore[no-any-return]


def reindex(folder: Path, file: str) -> None:
    found = index_of(folder)
    found["weight_map"][f"{UP}.weight"] = file
    (folder / INDEX).write_text(json.dumps(found))


def damaged_shard(folder: Path) -> Path:
    return folder / str(index_of(folder)["weight_map"][f"{UP}.weight"])


def truncate(folder: Path) -> None:
    file = damaged_shard(folder)
    file.write_bytes(file.read_bytes()[:-9])


def without(folder: Path, name: str) -> None:
    file = folder / str(index_of(folder)["weight_map"][name])
    save_file({n: t for n, t in load_file(file).items() if n != name}, file)


def sized(folder: Path, **sizes: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))


def pickles(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04\x95 never opened")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: damaged_shard(f).unlink(), r"model-0000\d-of-0000\d.safetensors: missing"),
    "truncated": (truncate, r"model-0000\d-of-0000\d.safetensors: [a-z_.0-9]+: damaged safetensors file"),
    "missing tensor": (
        lambda f: without(f, f"{UP}.weight"),
        f"safetensors: {UP}.weight: expected a tensor, found none",
    ),
    "outside": (lambda f: reindex(f, "../model/model.safetensors"), "expected safetensors files next to it, got '../"),
    "absolute": (lambda f: reindex(f, "/etc/passwd"), "expected safetensors files next to it, got '/etc/passwd'"),
    "backslash": (lambda f: reindex(f, "..\\x.safetensors"), "expected safetensors files next to it"),
    "pickle in the index": (lambda f: reindex(f, "pytorch_model.bin"), "expected safetensors files next to it"),
    "index of numbers": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'), "names of files"),
    "index of nothing": (lambda f: (f / INDEX).write_text("[]"), "expected a JSON object"),
    "nested index": (lambda f: (f / INDEX).write_text("[" * 100_000), "expected JSON"),
    "pickles": (pickles, "expected model.safetensors or"),
    "other sizes": (lambda f: sized(f, intermediate_size=104), r"mlp.*: expected .*104"),
    "more layers": (lambda f: sized(f, num_hidden_layers=3), r"model\.layers\.2\..*: expected a tensor, found none"),
    "fewer layers": (lambda f: sized(f, num_hidden_layers=1), r"model\.layers\.1\."),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json: expected JSON"),
    "config not fetched": (
        lambda f: (f / "config.json").write_text(POINTER),
        "config.json: .* a pointer of Git LFS: run",
    ),
    "shard not fetched": (lambda f: damaged_shard(f).write_text(POINTER), "safetensors: .* a pointer of Git LFS: run"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_are_reported_in_one_sentence(saved: Path, tmp_path: Path, how: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "bad")
    damage, message = DAMAGE[how]
    damage(folder)
    with pytest.raises(FormatError, match=message) as caught:
        Layers(Checkpoint(folder)).weight(UP)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    before = sorted(path for path in tmp_path.rglob("*"))
    commands = (
        ("convert", folder, tmp_path / "out", "--format", "compressed-tensors"),
        ("inspect", folder, "--check"),
        ("compare", saved, folder),
    )
    for command in commands:
        result = run(*command)
        assert result.exit_code == 2, result.output
        assert re.search(message, result.output) and str(folder) in result.output, result.output
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_tensor_is_read_only_from_the_indexed_file(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "bad")
    other = next(file for file in sorted(folder.glob("*.safetensors")) if file != damaged_shard(folder))
    reindex(folder, other.name)
    with pytest.raises(FormatError, match=f"{other.name}: {UP}.weight: expected a tensor, found none"):
        Checkpoint(folder)


@pytest.mark.parametrize("layout", [deepseek_fp8, epiloq_modules])
def test_fp8_without_scales_is_no_weight(tmp_path: Path, layout: Any) -> None:
    """Its bytes have the shape of the layer's float weight, and another meaning."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    layout.save(epiloq.quantize_(tiny_model(**sizes), "fp8-block"), tmp_path / "in")
    file = tmp_path / "in" / SINGLE
    save_file({n: t for n, t in load_file(file).items() if n != f"{UP}.weight_scale_inv"}, file)
    with pytest.raises(FormatError, match=UP):
        models.load(Checkpoint(tmp_path / "in"))
    with pytest.raises(FormatError, match=UP):
        Layers(Checkpoint(tmp_path / "in")).weight(UP)
    result = run("inspect", tmp_path / "in", "--check")
    assert result.exit_code == 2 and UP in result.output, result.output
