"""Places that nothing can be written to are refused in a sentence before the work; files keep their kind."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from command_line import ROUND, quantize, run, teacher_and_text

KERNEL = [Path("/proc"), Path("/sys")]


@pytest.mark.parametrize("place", [each for each in KERNEL if each.is_dir()], ids=str)
@pytest.mark.parametrize("below", ["out", "a/b/out"])
def test_folders_of_the_kernel(tmp_path: Path, place: Path, below: str) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    found = quantize(model, place / below, "--scheme", "w8a16", "--algorithm", "rtn")
    assert found.exit_code == 2 and f"{place / below}: nothing can be made in {place}" in found.output
    assert quantize(model, tmp_path / "w8", "--scheme", "w8a16", "--algorithm", "rtn").exit_code == 0
    found = run("convert", tmp_path / "w8", place / below, "--format", "gptq")
    assert found.exit_code == 2 and f"{place / below}: nothing can be made in {place}" in found.output
    found = run("inspect", model, "--json", place / "figures.json")
    assert found.exit_code == 2 and "nothing can be made in" in " ".join(found.output.replace("│", "").split())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    (tmp_path / "sealed").mkdir(mode=0o555)
    found = quantize(model, tmp_path / "sealed/out", "--scheme", "w8a16", "--algorithm", "rtn")
    assert found.exit_code == 2 and "nothing can be made in" in found.output


def test_figures_go_into_a_fifo_and_a_linked_file(tmp_path: Path) -> None:
    fifo, read = tmp_path / "fifo", list[str]()
    os.mkfifo(fifo)
    reader = Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    assert run("env", "--json", fifo).exit_code == 0
    reader.join(60)
    assert "torch" in json.loads(read[0]) and stat.S_ISFIFO(fifo.lstat().st_mode)
    (tmp_path / "link.json").symlink_to(tmp_path / "figures.json")
    assert run("env", "--json", tmp_path / "link.json").exit_code == 0
    assert (tmp_path / "link.json").is_symlink() and "torch" in json.loads((tmp_path / "figures.json").read_text())


def test_what_a_command_reads_is_not_replaced(tmp_path: Path) -> None:
    """By figures, a report or a plot, also through a link: a checkpoint without its config.json is lost."""
    model = teacher_and_text(tmp_path, ROUND)
    assert quantize(model, tmp_path / "w8", "--scheme", "w8a16", "--algorithm", "rtn").exit_code == 0
    text, config, link = tmp_path / "text.txt", model / "config.json", tmp_path / "link.json"
    link.symlink_to(config)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    round_to_nearest = ("--scheme", "w8a16", "--algorithm", "rtn")
    commands: list[tuple[object, ...]] = [
        ("inspect", model, "--json", config),
        ("inspect", model, "--json", link),
        ("inspect", tmp_path, "--json", config),
        ("eval", model, "--text", text, "--json", text),
        ("eval", tmp_path / "w8", "--text", text, "--kl", model, "--json", model / "model.safetensors"),
        ("compare", model, tmp_path / "w8", "--json", tmp_path / "w8" / "config.json"),
        ("convert", tmp_path / "w8", tmp_path / "out", "--format", "gptq", "--json", tmp_path / "w8" / "config.json"),
        ("quantize", model, *round_to_nearest, "--output", tmp_path / "out", "--json", config),
        ("quantize", model, *round_to_nearest, "--output", tmp_path / "out", "--report", config),
        ("quantize", model, *round_to_nearest, "--output", tmp_path / "out", "--calibration", text, "--json", text),
        ("tune", model, "--json", config),
        ("demo", "--teacher", model, "--output", tmp_path / "out", "--json", config),
        ("bench", "--model", model, "--device", "cpu", "--json", config),
    ]
    for command in commands:
        found = run(*command)
        assert found.exit_code == 2, command
        assert "that this command reads" in " ".join(found.output.replace("│", "").split()), found.output
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert run("inspect", model, "--json", model / "figures.json").exit_code == 0  # a new file may lie there


def test_device_files_are_not_replaced() -> None:
    assert run("env", "--json", os.devnull).exit_code == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_dangling_link_among_parent_directories(tmp_path: Path) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    (tmp_path / "dead").symlink_to("nowhere")
    for place in ("dead/out", "dead/a/out"):
        found = quantize(model, tmp_path / place, "--scheme", "w8a16", "--algorithm", "rtn")
        assert found.exit_code == 2 and f"{tmp_path / 'dead'} is a broken link" in found.output


def test_a_file_among_parent_directories(tmp_path: Path) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    for name in ("text.txt/figures.json", "text.txt/a/figures.json"):
        found = run("inspect", model, "--json", tmp_path / name)
        said = "".join(found.output.replace("│", "").split())
        expected = f"--json: {tmp_path / name}: expected a path in a folder, but {tmp_path / 'text.txt'} is a file"
        assert found.exit_code == 2 and "".join(expected.split()) in said, found.output
        found = run("bench", "--device", "cpu", "--json", tmp_path / name)
        assert found.exit_code == 2 and f"but {tmp_path / 'text.txt'} is a file" in found.output
    found = run("inspect", model, "--json", tmp_path / "no" / "figures.json")
    assert found.exit_code == 2 and "does not exist" in " ".join(found.output.replace("│", "").split())


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\xfed"))
    found = quantize(model, odd, "--scheme", "w8a16", "--algorithm", "rtn")
    assert found.exit_code == 2 and r"b\xff\xfed': expected a path in UTF-8" in found.output
    model.rename(odd)
    found = run("inspect", odd)
    assert found.exit_code == 2 and r"b\xff\xfed': expected a path in UTF-8" in found.output


def test_names_that_are_too_long(tmp_path: Path) -> None:
    """Also by the names of temporary files beside them, before the work."""
    model = teacher_and_text(tmp_path, ROUND)
    most = os.pathconf(tmp_path, "PC_NAME_MAX")
    for length in (most - 4, most + 1, 5000):
        name = tmp_path / ("n" * length)
        for found in (
            quantize(model, name, "--scheme", "w8a16", "--algorithm", "rtn"),
            quantize(model, tmp_path / "out", "--scheme", "w8a16", "--algorithm", "rtn", "--report", name),
            run("inspect", model, "--json", name),
        ):
            said = " ".join(found.output.replace("│", "").split())
            assert found.exit_code == 2 and "expected names of at most" in said, said
    for found in (run("eval", model, "--text", name), run("inspect", name), run("compare", model, name)):
        assert found.exit_code == 2 and "File name too long" in " ".join(found.output.split()), found.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


def test_only_figures_go_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    monkeypatch.chdir(tmp_path)
    found = quantize(model, tmp_path / "out", "--scheme", "w8a16", "--algorithm", "rtn", "--report", "-")
    said = " ".join(found.output.replace("│", "").split())
    assert found.exit_code == 2 and "only --json writes to standard output" in said, said
    found = run("bench", "--device", "cpu", "--plot", "-")
    assert found.exit_code == 2 and "bench: --plot: expected a name that ends in .png or .svg, got -" in found.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


@pytest.mark.parametrize("seed", [-1, 1 << 63, 10**23])
def test_invalid_seeds(tmp_path: Path, seed: int) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    found = quantize(model, tmp_path / "out", "--scheme", "w8a16", "--seed", seed)
    assert found.exit_code == 2 and f"got {seed} (--seed)" in " ".join(found.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


@pytest.mark.slow
def test_closed_pipe_is_not_reported_as_a_disk_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        command = [sys.executable, "-m", "epiloq", "inspect", teacher_and_text(tmp_path, ROUND), "--json", "-"]
        found = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 1 and "Broken pipe" not in found.stderr
