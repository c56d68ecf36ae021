"""Files of an interrupted run that are damaged, files of the source that vanish during one, and files half written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers
from safetensors.torch import load_file

from command_line import ROUND, quantize, run, teacher_and_text, text
from epiloq.evaluation.text import load_tokenizer
from epiloq.files import write_text
from epiloq.formats.io import checkpoint
from epiloq.quantize import job as jobs

GPTQ = ("--scheme", "w4a16-g32", "--algorithm", "gptq")
W8 = ("--scheme", "w8a16", "--algorithm", "rtn")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_and_text(tmp_path_factory.mktemp("teacher"), ROUND)


@pytest.fixture(scope="module")
def quantised(teacher: Path) -> Path:
    assert quantize(teacher, teacher.with_name("quantised"), *W8).exit_code == 0
    return teacher.with_name("quantised")


def interrupted(teacher: Path, output: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> Path:
    """What a run keeps that ended when all blocks were finished."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "save", full)
        assert quantize(teacher, output, *options).exit_code == 1
    return output.with_name(f".{output.name}.partial")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "options", "kept"),
    [
        ("model.layers.1.safetensors", GPTQ, 0.5),
        ("model.layers.0.safetensors", GPTQ, 0),
        ("schemes.json", ("--bits", 5.2), 0.5),
        ("schemes.json", ("--bits", 5.2), 0),
    ],
)
def test_incomplete_blocks_are_recomputed(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, options: tuple[object, ...], kept: float
) -> None:
    """As a power failure leaves a file whose content was not on the disk yet."""
    assert quantize(teacher, tmp_path / "whole", *options).exit_code == 0
    aside = interrupted(teacher, tmp_path / "out", monkeypatch, *options)
    content = (aside / file).read_bytes()
    (aside / file).write_bytes(content[: int(kept * len(content))])
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not aside.exists()


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_settings_that_cannot_be_read_are_named(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    aside = interrupted(teacher, tmp_path / "out", monkeypatch, *W8)
    (aside / "settings.json").write_text(content)
    before = {file: file.read_bytes() for file in aside.iterdir()}
    result = quantize(teacher, tmp_path / "out", *W8)
    assert result.exit_code == 2, result.output
    assert f"{aside / 'settings.json'}: expected" in result.output
    assert f"{aside} contains an interrupted run: delete it" in result.output
    assert {file: file.read_bytes() for file in aside.iterdir()} == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "more/notes.txt"])
@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_deleted_source_file_is_reported(
    teacher: Path, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, file: str
) -> None:
    """After the checks and before the copying: no directory appears that lacks it."""
    source = shutil.copytree(teacher if command == "quantize" else quantised, tmp_path / "model")
    (source / "more").mkdir()
    (source / "more" / "notes.txt").write_text("notes")
    close = checkpoint.Writer.close

    def then_vanish(writer: checkpoint.Writer, config: Any) -> None:
        close(writer, config)
        (source / file).unlink()

    monkeypatch.setattr(checkpoint.Writer, "close", then_vanish)
    if command == "quantize":
        result = run("quantize", source, "--output", tmp_path / "out", *W8)
    else:
        result = run("convert", source, tmp_path / "out", "--format", "epiloq")
    assert result.exit_code == 2 and f"{source / file}: was there when the run began" in result.output, result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "more/notes.txt"])
@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_a_source_file_that_may_not_be_read(
    teacher: Path, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, file: str
) -> None:
    """Found before the work, at the end of which it would be copied. The tests' user may be one who may read all."""
    source = shutil.copytree(teacher if command == "quantize" else quantised, tmp_path / "model")
    (source / "more").mkdir()
    (source / "more" / "notes.txt").write_text("notes")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != source / file and access(path, mode))
    if command == "quantize":
        result = run("quantize", source, "--output", tmp_path / "out", *W8)
    else:
        result = run("convert", source, tmp_path / "out", "--format", "epiloq")
    assert result.exit_code == 2, result.output
    assert result.output.splitlines()[-1] == f"epiloq {command}: {source / file}: Permission denied"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert run("inspect", source).exit_code == 0  # which does not copy it


def test_input_that_may_not_be_read(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is invalid input, rather than a failed disk, and leaves no blocks to continue from."""

    def refused(self: Path, *_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refused)
    result = run("quantize", teacher, "--output", tmp_path / "out", *W8)
    assert result.exit_code == 2, result.output
    assert result.output.splitlines()[-1] == f"epiloq quantize: {teacher / 'config.json'}: Permission denied"


MADE_UP = [transformers.Qwen3Config, transformers.GemmaConfig, transformers.T5Config, transformers.BertConfig]


@pytest.mark.parametrize("config", MADE_UP, ids=lambda config: config.__name__)
def test_default_tokenizer_of_transformers_is_refused(config: Any, tmp_path: Path) -> None:
    """It has special tokens alone, so that every word is the unknown one."""
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: no tokenizer: expected its files"):
        load_tokenizer(tmp_path)


def test_a_model_saved_without_its_tokenizer_is_not_evaluated(teacher: Path, tmp_path: Path) -> None:
    model = shutil.copytree(teacher, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    config = json.loads((model / "config.json").read_text()) | {"model_type": "qwen2", "architectures": None}
    (model / "config.json").write_text(json.dumps(config))
    result = run("eval", model, "--text", text(teacher))
    assert result.exit_code == 2 and f"{model}: no tokenizer" in result.output, result.output


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """The kernel refuses to let a file of this process grow beyond so many bytes."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("old", [None, "old"])
def test_failed_write_keeps_the_old_file(tmp_path: Path, old: str | None) -> None:
    file = tmp_path / "figures.json"
    if old is not None:
        file.write_text(old)
    with files_of_at_most(10), pytest.raises(OSError, match="too large"):
        write_text(file, "x" * 11)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == ({} if old is None else {file.name: old})


def test_nested_model_directory_is_not_copied(teacher: Path, tmp_path: Path) -> None:
    """What an earlier run wrote into the model's own folder; other folders are."""
    model = shutil.copytree(teacher, tmp_path / "model")
    assert quantize(teacher, model / "int8" / "first", *W8).exit_code == 0
    (model / "int8" / "notes.txt").write_text("notes")
    assert run("quantize", model, "--output", tmp_path / "out", *W8).exit_code == 0
    below = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {name for name in below if "/" in name} == {"int8/notes.txt"}


def test_second_of_two_concurrent_conversions_keeps_the_first(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = checkpoint.Writer.close

    def meanwhile(writer: checkpoint.Writer, config: Any) -> None:
        close(writer, config)
        monkeypatch.undo()
        assert run("convert", quantised, tmp_path / "out", "--format", "epiloq").exit_code == 0

    monkeypatch.setattr(checkpoint.Writer, "close", meanwhile)
    result = run("convert", quantised, tmp_path / "out", "--format", "gptq")
    assert result.exit_code == 1 and f"{tmp_path / 'out'} was created in the meantime" in result.output, result.output
    message = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert message["format"] == "epiloq" and [path.name for path in tmp_path.iterdir()] == ["out"]
