"""Writing that fails midway, as on a full disk: one sentence that names the output, and no file that is half there.

The kernel's limit of a file's size stands for a full disk: it ends real writes in the middle, of any user.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import epiloq.formats.convert as conversion
import tiny_teacher
from command_line import run
from epiloq.files import write_text
from epiloq.formats.io import checkpoint
from epiloq.quantize import job as jobs

FULL = Path("/dev/full")
"""A device to which every write fails as on a full disk."""
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files cannot become larger than `size` bytes: a write beyond it raises OSError (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_teacher.save(
        root / "float",
        tiny_teacher.tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16),
    )
    command = ("quantize", root / "float", "--scheme", "w4a16-g32", "--algorithm", "rtn", "--output", root / "4bit")
    result = run(*command)
    assert result.exit_code == 0, result.output
    return root


@contextmanager
def full_after_the_weights(monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[None]:
    """As `largest_file`, from when the weights of a new directory are written."""
    before, close = resource.getrlimit(resource.RLIMIT_FSIZE), checkpoint.Writer.close

    def then_full(writer: checkpoint.Writer, config: Any) -> None:
        close(writer, config)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.Writer, "close", then_full)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sentence(output: str) -> str:
    """The one line that says why a command ended."""
    lines = [line for line in output.splitlines() if line.startswith("epiloq ")]
    assert len(lines) == 1 and "Traceback" not in output, output
    return lines[0]


@pytest.mark.parametrize("size", [100, 3000, 20_000])
def test_convert(quantised: Path, tmp_path: Path, size: int) -> None:
    out = tmp_path / "out"
    with largest_file(size):
        result = run("convert", quantised / "4bit", out, "--format", "gptq")
    assert result.exit_code == 1, result.output
    assert sentence(result.output) == f"epiloq convert: {out}: File too large"
    assert list(tmp_path.iterdir()) == []
    with largest_file(size), pytest.raises(OSError) as raised:
        conversion.perform(conversion.prepare(quantised / "4bit", out, "gptq"))
    assert raised.value.filename == str(out) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [100, 3000, 20_000, 40_000])
def test_quantize_goes_on(quantised: Path, tmp_path: Path, size: int) -> None:
    """What was finished is kept beside the output, and the same command then ends as if nothing had happened."""
    out = tmp_path / "out"
    command = ("quantize", quantised / "float", "--scheme", "w4a16-g32", "--algorithm", "rtn", "--output", out)
    with largest_file(size):
        result = run(*command)
    assert result.exit_code == 1, result.output
    where = rf"{tmp_path}/(out|\.out\.partial/settings\.json)"
    assert re.match(rf"epiloq quantize: {where}: File too large; finished blocks are kept", sentence(result.output))
    assert not out.exists() and {path.name for path in tmp_path.iterdir()} <= {".out.partial"}
    assert not (tmp_path / ".out.partial" / "model").exists()
    assert run(*command).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (quantised / "4bit" / weights).read_bytes()


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_copied_files_name_the_output(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Rather than the temporary directory, which is removed."""
    source = shutil.copytree(quantised / ("float" if command == "quantize" else "4bit"), tmp_path / "model")
    (source / "notes.txt").write_text("x" * 9000)
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    with full_after_the_weights(monkeypatch, 8000):
        if command == "quantize":
            result = run("quantize", source, "--scheme", "w4a16-g32", "--algorithm", "rtn", "--output", out)
        else:
            result = run("convert", source, out, "--format", "gptq")
    assert result.exit_code == 1, result.output
    assert sentence(result.output).startswith(f"epiloq {command}: {out}: File too large")
    left = {str(path.relative_to(out.parent)) for path in out.parent.rglob("*")}
    assert not any("notes" in name or "model/" in name for name in left) and (not left or command == "quantize")


def test_a_report_that_does_not_fit(quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that it belongs to is removed, so that there is room again."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jobs.Job, "report", full)
    out = tmp_path / "out"
    result = run("quantize", quantised / "float", "--scheme", "w4a16-g32", "--algorithm", "rtn", "--output", out)
    assert result.exit_code == 1
    assert sentence(result.output) == (
        f"epiloq quantize: {out}: No space left on device: free some; finished blocks are kept, and the same command "
        "continues from there"
    )
    assert not (tmp_path / ".out.partial" / "model").exists() and not out.exists()


@needs_full
@pytest.mark.parametrize("command", ["quantize --json", "quantize --report", "convert --json"])
def test_figures_of_a_finished_directory(quantised: Path, tmp_path: Path, command: str) -> None:
    """What cost the time is there, and the sentence says so."""
    out, (name, option) = tmp_path / "out", command.split()
    if name == "quantize":
        pytest.importorskip("matplotlib")
        round_to_nearest = ("--scheme", "w4a16-g32", "--algorithm", "rtn", "--output", out)
        result = run("quantize", quantised / "float", *round_to_nearest, option, FULL)
    else:
        result = run("convert", quantised / "4bit", out, "--format", "gptq", option, FULL)
    assert result.exit_code == 1, result.output
    assert sentence(result.output) == f"epiloq {name}: {FULL}: No space left on device: free some; {out} is complete"
    assert (out / "model.safetensors").is_file() and [path.name for path in tmp_path.iterdir()] == ["out"]


@needs_full
@pytest.mark.parametrize("arguments", [["env"], ["env", "--json", "-"], ["--version"]], ids=" ".join)
def test_standard_output(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "epiloq", *arguments]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    expected = f"epiloq {arguments[0]}: standard output: No space left on device: free some"
    assert found.returncode == 1 and found.stderr.splitlines()[-1] == expected and "Traceback" not in found.stderr


def test_figures(quantised: Path, tmp_path: Path) -> None:
    """A file that was there keeps its content."""
    found = tmp_path / "found.json"
    found.write_text("before")
    with largest_file(10):
        result = run("inspect", quantised / "4bit", "--json", found)
    assert result.exit_code == 1, result.output
    assert sentence(result.output) == f"epiloq inspect: {found}: File too large"
    assert found.read_text() == "before" and list(tmp_path.iterdir()) == [found]


def test_a_plot(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from epiloq.pages import figures

    figure.subplots().plot([1, 2])
    with largest_file(1000), pytest.raises(OSError, match=r"File too large: .*plot\.png"):
        figures.save(figure, tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []
    for name, begins in (("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml"), ("plot", b"\x89PNG")):
        figures.save(figure, tmp_path / name)
        written = tmp_path / (name if "." in name else f"{name}.png")
        assert written.read_bytes().startswith(begins)


def test_text(tmp_path: Path) -> None:
    with largest_file(10), pytest.raises(OSError, match=r"File too large: .*text"):
        write_text(tmp_path / "text", "x" * 100)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_created(tmp_path: Path) -> None:
    """It is named, rather than the temporary file beside it."""
    file = tmp_path / "missing" / "figures.json"
    with pytest.raises(FileNotFoundError) as raised:
        write_text(file, "x")
    assert raised.value.filename == str(file)


def tiny_gguf(folder: Path) -> Path:
    """A GGUF file with a tokenizer."""
    pytest.importorskip("gguf")
    import gguf_files

    file, model = folder / "tiny.gguf", gguf_files.reference("qwen2")
    gguf_files.write(file, model, "qwen2", gguf_files.MIXED, tokenizer=gguf_files.letter_tokenizer)
    return file


def test_a_tokenizer_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory appears that has a part of it, or none."""
    tiny = tiny_gguf(tmp_path)
    out = tmp_path / "out"
    with full_after_the_weights(monkeypatch, 1000):
        result = run("convert", tiny, out, "--format", "epiloq")
    assert result.exit_code == 1, result.output
    assert sentence(result.output) == f"epiloq convert: {out}: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_the_demos_teacher(quantised: Path, tmp_path: Path) -> None:
    """Which transformers writes, with errors of its own."""
    tiny = tiny_gguf(tmp_path)
    from epiloq.demo import teacher

    with largest_file(20_000), pytest.raises(OSError) as raised:
        teacher.convert(tiny, tmp_path / "teacher")
    assert raised.value.filename == str(tmp_path / "teacher")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
