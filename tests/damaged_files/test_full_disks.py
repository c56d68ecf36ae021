"""Writing that fails midway, as on a full disk: one sentence that names the output, and no file that is half there.

The kernel's limit of a file's size stands for a full disk: it ends real writes in the middle, of any user.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import epiloq.formats.convert as conversion
import tiny_teacher
from command_line import run
from epiloq.files import write_text


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
