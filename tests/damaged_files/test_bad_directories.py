"""Directories with special files, sizes that no tensor has and broken parts: one sentence, soon, in little memory."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import foreign_checkpoints
from command_line import ROUND, letters, run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import INDEX, SINGLE
from epiloq.formats.layouts.base import FormatError
from tiny_teacher import save, tiny_model

RTN = ("--algorithm", "rtn", "--scheme")
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in floating point with a tokenizer, one in two files, one of GPTQ's with the tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("folders")
    found = {"float": save(folder / "float", tiny_model(**ROUND))}
    found["gptq"] = folder / "gptq"
    foreign_checkpoints.write(found["gptq"], tiny_model(**ROUND), "gptq", shards=1)
    found["fp8"] = folder / "fp8"
    foreign_checkpoints.write(found["fp8"], tiny_model(**ROUND), "fp8", shards=1)
    found["sharded"] = folder / "sharded"
    foreign_checkpoints.write(found["sharded"], tiny_model(**ROUND), "awq", shards=2)
    for file in found["float"].glob("tokenizer*"):
        shutil.copy(file, found["gptq"])
        shutil.copy(file, found["fp8"])
        shutil.copy(file, found["sharded"])
    (folder / "text.txt").write_text(letters(2100))
    return found


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A mistake ends in a MemoryError rather than in all of the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def config(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | changes))

    return change


def quantization(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        found["quantization_config"] |= changes
        (folder / "config.json").write_text(json.dumps(found))

    return change


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def huge(file: Path) -> None:
    """A sparse file of ten gigabytes."""
    with file.open("wb") as stream:
        stream.truncate(10 << 30)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(target)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / SINGLE, {"format": "pt"})

    return damage


def names_in_index(file: str) -> Damage:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = file
        (folder / INDEX).write_text(json.dumps(index))

    return damage


UP = "model.layers.1.mlp.up_proj"
# What is damaged, how, and what the sentence has to say.
WHEN_OPENED: dict[str, tuple[str, Damage, str]] = {
    "layers": ("float", config(num_hidden_layers=3_000_000), "num_hidden_layers: expected at most 65,536 .* 3,000,000"),
    "layers in thousands": ("gptq", config(num_hidden_layers=60_000), "more than .* modules and parameters"),
    "vocabulary": (
        "float",
        config(vocab_size=8_000_000),
        r"embed_tokens.weight: .*\[8000000, 64\], got F32 \[256, ",
    ),
    "quantised vocabulary": ("gptq", config(vocab_size=8_000_000), r"embed_tokens.weight: .*\[8000000, 64\]"),
    "sharded vocabulary": ("sharded", config(vocab_size=8_000_000), r"embed_tokens.weight: .*\[8000000, 64\]"),
    "hidden": ("float", config(hidden_size=1 << 33), "embed_tokens.weight: .*8589934592"),
    "labels": ("float", config(num_labels=10**9), "num_labels: expected at most"),
    "feed-forward": ("gptq", config(intermediate_size=1 << 40), "config.json: "),
    "beyond integers": ("float", config(hidden_size=1 << 80), "config.json: "),
    "negative": ("float", config(hidden_size=-64), "config.json: "),
    "no heads": ("float", config(num_attention_heads=0), "config.json: "),
    "tie": ("float", config(tie_word_embeddings=1), "tie_word_embeddings"),
    "quantised tie": ("gptq", config(tie_word_embeddings=1), "tie_word_embeddings"),
    "activation": ("float", config(hidden_act="abc"), "config.json: .*abc"),
    "quantised activation": ("gptq", config(hidden_act="abc"), "config.json: .*abc"),
    "activation list": ("float", config(hidden_act=["silu"]), "config.json: "),
    "type": ("float", config(dtype="uint8"), "config.json: "),
    "type list": ("float", config(dtype=["float32"]), "config.json: "),
    "model type": ("float", config(model_type=["llama"]), "config.json: "),
    "architecture": ("float", config(architectures=["T5ForConditionalGeneration"]), "config.json: "),
    "code of its own": (
        "float",
        config(auto_map={"AutoConfig": "x.Y"}, model_type="own"),
        "config.json: auto_map: epiloq runs no ",
    ),
    "group": ("gptq", quantization(group_size=1 << 40), "group"),
    "block": ("fp8", quantization(weight_block_size=[128, 1 << 63]), "groups and blocks of less than 2.31, got 9223"),
    "bits list": ("gptq", quantization(bits=[4]), "bits: expected"),
    "group list": ("gptq", quantization(group_size=[32]), "group_size: expected"),
    "order list": ("gptq", quantization(desc_act=[False]), "desc_act: expected"),
    "symmetry list": ("gptq", quantization(sym=[1]), "sym: expected"),
    "method list": ("gptq", quantization(quant_method=["gptq"]), "quant_method: expected"),
    "version list": ("sharded", quantization(version=["gemm"]), "version: expected"),
    "zero list": ("sharded", quantization(zero_point=[]), "zero_point: expected"),
    "fifo": ("float", instead("config.json", os.mkfifo), "config.json: expected a regular file, found a FIFO"),
    "device": ("float", instead("config.json", link_to("/dev/zero")), "config.json: .* found a character device"),
    "directory": ("float", instead("config.json", os.mkdir), "config.json: expected a regular file, found a directory"),
    "dangling": (
        "float",
        instead("config.json", link_to("nowhere")),
        "config.json: .* link to nowhere, which is missing",
    ),
    "circle": ("float", instead("config.json", link_to("config.json")), "config.json: expected a file"),
    "huge": ("float", instead("config.json", huge), "config.json: expected at most .* bytes of JSON"),
    "index fifo": ("sharded", instead(INDEX, os.mkfifo), "index.json: expected a regular file, found a FIFO"),
    "index device": ("sharded", instead(INDEX, link_to("/dev/zero")), "index.json: .* found a character device"),
    "index dangling": ("sharded", instead(INDEX, link_to("nowhere")), "index.json: .* missing"),
    "huge index": ("sharded", instead(INDEX, huge), "index.json: expected at most .* bytes of JSON"),
    "index outside": ("sharded", names_in_index("../float/model.safetensors"), "next to it, got '../float"),
    "index of nothing": ("sharded", names_in_index("model-00009.safetensors"), "model-00009.safetensors: missing"),
    "one file beside shards": (
        "sharded",
        lambda folder: shutil.copy(next(folder.glob("model-*.safetensors")), folder / SINGLE),
        "expected model.safetensors or model.safetensors.index.json .*, found both",
    ),
    "weights fifo": ("float", instead(SINGLE, os.mkfifo), "model.safetensors: .* found a FIFO"),
    "weights device": ("float", instead(SINGLE, link_to("/dev/zero")), "model.safetensors: .* character device"),
    "huge weights": ("float", instead(SINGLE, huge), "model.safetensors: "),
    "generation": ("float", instead("generation_config.json", os.mkfifo), "generation_config.json: .* FIFO"),
    "tokenizer fifo": ("float", instead("tokenizer.json", os.mkfifo), "tokenizer.json: .* FIFO"),
    "quantize_config": ("gptq", instead("quantize_config.json", os.mkfifo), "quantize_config.json: .* FIFO"),
}


def checked(tmp_path: Path, folder: Path, call: Callable[[], str]) -> str:
    """What a call says, after its time, its memory and the disk were looked at."""
    before, start = sorted(tmp_path.rglob("*")), time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = call()
    assert time.process_time() - start < 5 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000
    assert sorted(tmp_path.rglob("*")) == before and "\n" not in message.strip() and "Traceback" not in message
    return message


def refused(*arguments: object) -> str:
    result = run(*arguments)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    assert result.exit_code == 2, result.output
    # Beside the sentence there may be how far the command got.
    return "\n".join(line for line in result.stderr.splitlines() if not re.match(r"[a-z ]+: \d+/\d+, ", line))


@pytest.mark.parametrize("how", WHEN_OPENED)
def test_unreadable_files_are_reported_in_one_sentence(folders: dict[str, Path], tmp_path: Path, how: str) -> None:
    name, damage, message = WHEN_OPENED[how]
    folder, text = tmp_path / "bad", folders["float"].with_name("text.txt")
    shutil.copytree(folders[name], folder)
    damage(folder)

    def opened() -> str:
        with pytest.raises(FormatError, match=message) as caught:
            models.from_directory(folder)
        return str(caught.value)

    checked(tmp_path, folder, opened)
    for command in (("inspect", folder, "--check"), ("convert", folder, tmp_path / "out", "--format", "epiloq")):
        if command[0] == "inspect" or name != "float":
            assert str(folder) in checked(tmp_path, folder, lambda command=command: refused(*command))  # type: ignore[misc]
    checked(tmp_path, folder, lambda: refused("eval", folder, "--text", text))
    checked(tmp_path, folder, lambda: refused("compare", folders[name], folder))
    checked(
        tmp_path,
        folder,
        lambda: refused("quantize", folder, *RTN, "w8a16", "--output", tmp_path / "out"),
    )


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "tokenizer.json").read_text())
        change(found)
        (folder / "tokenizer.json").write_text(json.dumps(found))

    return damage


WHEN_RUN: dict[str, tuple[Damage, str]] = {
    "NaN": (config(rms_norm_eps=float("nan")), "config.json: expected JSON: expected numbers, got NaN"),
    "no tokenizer": (lambda f: [file.unlink() for file in f.glob("tokenizer*")], "no tokenizer"),
    "broken": (lambda f: (f / "tokenizer.json").write_text("{"), "no tokenizer"),
    "empty": (lambda f: (f / "tokenizer.json").write_text("{}"), "no tokenizer"),
    "list": (lambda f: (f / "tokenizer.json").write_text("[]"), "no tokenizer"),
    "bytes": (lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe\x00"), "no tokenizer"),
    "config": (lambda f: (f / "tokenizer_config.json").write_text("[1]"), "no tokenizer"),
    "broken config": (lambda f: (f / "tokenizer_config.json").write_text("{"), "no tokenizer"),
    "class": (lambda f: (f / "tokenizer_config.json").write_text('{"tokenizer_class": ["a"]}'), "no tokenizer"),
    "model": (tokenizer(lambda t: t.update(model={"type": "none"})), "no tokenizer"),
    "vocabulary list": (tokenizer(lambda t: t["model"].update(vocab=["a"])), "no tokenizer"),
    "ids": (
        tokenizer(lambda t: t["model"].update(vocab={k: v + 4000 for k, v in t["model"]["vocab"].items()})),
        "expected a tokenizer with ids below 256, the model's vocab_size, got 4[0-9]*",
    ),
    "fifo": (instead("tokenizer_config.json", os.mkfifo), "tokenizer_config.json: .* FIFO"),
    "heads": (config(num_key_value_heads=3, head_dim=16, num_attention_heads=4), "expected|cannot run"),
}


@pytest.mark.parametrize("how", WHEN_RUN)
def test_contradictory_configurations_are_reported_in_one_sentence(
    folders: dict[str, Path], tmp_path: Path, how: str
) -> None:
    damage, message = WHEN_RUN[how]
    folder, text = tmp_path / "bad", folders["float"].with_name("text.txt")
    shutil.copytree(folders["float"], folder)
    damage(folder)
    request = ("--scheme", "w4a16-g32", "--algorithm", "gptq", "--calibration", text, "--output", tmp_path / "out")
    for command in (
        ("eval", folder, "--text", text),
        ("compare", folder, folders["float"], "--text", text),
        ("quantize", folder, *request),
    ):
        output = checked(tmp_path, folder, lambda command=command: refused(*command))  # type: ignore[misc]
        assert re.search(message, output), output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_name_the_layer(folders: dict[str, Path], tmp_path: Path, value: float) -> None:
    def poison(t: torch.Tensor) -> torch.Tensor:
        return t.index_fill(0, torch.tensor([1]), value)

    shutil.copytree(folders["float"], tmp_path / "float")
    tensor(f"{UP}.weight", poison)(tmp_path / "float")
    shutil.copytree(folders["gptq"], tmp_path / "gptq")
    tensor(f"{UP}.scales", poison)(tmp_path / "gptq")
    text = folders["float"].with_name("text.txt")
    for name in ("float", "gptq"):
        output = refused("inspect", tmp_path / name, "--check")
        assert f"{UP}" in output and "NaN or infinity" in output, output
    before = sorted(tmp_path.rglob("*"))
    for scheme in ("w4a16-g32", "w8a8-int8", "fp8-token", "w8a8-block"):
        output = refused(
            "quantize", tmp_path / "float", "--scheme", scheme, "--algorithm", "rtn", "--output", tmp_path / "out"
        )
        assert UP in output and "NaN or infinity" in output, output
    output = refused(
        *("quantize", tmp_path / "float", "--scheme", "w4a16-g32", "--algorithm", "gptq"),
        *("--calibration", text, "--output", tmp_path / "out"),
    )
    assert UP in output, output
    assert sorted(tmp_path.rglob("*")) == before


def test_special_files_below_a_directory_are_found_before_the_work(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("float", "gptq"):
        shutil.copytree(folders[name], tmp_path / name)
        (tmp_path / name / "notes").mkdir()
        os.mkfifo(tmp_path / name / "notes" / "fifo")
    before = sorted(tmp_path.rglob("*"))
    for command in (
        ("quantize", tmp_path / "float", *RTN, "w8a16", "--output", tmp_path / "out"),
        ("convert", tmp_path / "gptq", tmp_path / "out", "--format", "epiloq"),
    ):
        assert "notes/fifo: expected a regular file, found a FIFO" in refused(*command)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_that_vanishes_is_named(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are mapped, so that only what is copied last notices."""
    from epiloq.formats import convert

    folder = Path(shutil.copytree(folders["gptq"], tmp_path / "gptq"))
    prepare = convert.prepare

    def prepared(*arguments: Any) -> Any:
        found = prepare(*arguments)
        for name in found.layers.checkpoint.names():
            found.layers.checkpoint.tensor(name)
        shutil.rmtree(folder)
        return found

    monkeypatch.setattr(convert, "prepare", prepared)
    message = refused("convert", folder, tmp_path / "out", "--format", "compressed-tensors")
    assert f"{folder}/" in message and "was there when the run began" in message
    assert not list(tmp_path.iterdir())
