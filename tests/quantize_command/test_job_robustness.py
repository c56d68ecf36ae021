"""Runs of ``epiloq quantize`` and ``convert`` beside each other, killed, or without their source; progress; NaN."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

from rich.console import Console
from safetensors.torch import load_file, save_file

from command_line import letters, quantize, run
from epiloq.cli.progress import clock, progress_stages
from epiloq.files import Held, check_free, held
from epiloq.formats import convert
from epiloq.formats.io import checkpoint
from epiloq.quantize import job as jobs
from epiloq.quantize.settings import Settings

W8 = ("--scheme", "w8a16", "--algorithm", "rtn")


def test_one_run_at_a_time_works_on_an_output(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told who is at work, before a weight is read and when both have passed the checks."""
    settings = Settings(teacher, tmp_path / "out", "w8a16", "rtn")
    second = jobs.prepare(settings)
    message = rf"out: process {os.getpid()} on .*, since 20.*, is writing it"
    with held(tmp_path / ".out.partial" / jobs.LOCK):
        with pytest.raises(ValueError, match=message):
            jobs.perform(second)
        monkeypatch.setattr(jobs, "opened", lambda *_: pytest.fail("loaded"))
        result = quantize(teacher, tmp_path / "out", *W8)
        assert result.exit_code == 2 and f"process {os.getpid()} on" in result.output, result.output
    assert jobs.perform(second)["bytes_after"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["file", "broken link"])
def test_no_place_for_finished_blocks(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Found before a weight is read."""
    aside = tmp_path / ".out.partial"
    aside.symlink_to("nowhere") if kind == "broken link" else aside.write_text("mine")
    monkeypatch.setattr(jobs, "opened", lambda *_, **__: pytest.fail("loaded"))
    result = quantize(teacher, tmp_path / "out", *W8)
    assert result.exit_code == 2, result.output
    assert f"{aside}: expected a folder for finished blocks, found a {kind}: move it away" in result.output
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_a_model_that_does_not_run_leaves_nothing(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its perplexity is measured when the folder of finished blocks is there."""

    def forward(*_: object, **__: object) -> None:
        raise KeyError("a field of config.json")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaForCausalLM.forward", forward)
    (tmp_path / "other.txt").write_text(letters(600, power=3))
    evaluation = ("--evaluation", tmp_path / "other.txt", "--output", tmp_path / "out")
    result = run("quantize", teacher, *W8, *evaluation, "--length", 32)
    assert result.exit_code == 2 and "cannot run as its config.json" in " ".join(result.output.split()), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


HOLD = """
import sys, time
from pathlib import Path
from epiloq.files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_killed_process_releases_the_lock(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(Held, match=f"process {process.pid} on"):
            check_free(file)
        with pytest.raises(Held), held(file):
            pass
        process.send_signal(signal.SIGKILL)
    with held(file):
        assert file.read_text().startswith(f"process {os.getpid()} on")


def test_lock_survives_removal_of_the_folder(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "lock"):
        shutil.rmtree(tmp_path / "a")
    with held(tmp_path / "a" / "lock"), pytest.raises(Held):
        check_free(tmp_path / "a" / "lock")


@pytest.fixture(scope="module")
def quantised(teacher: Path) -> Path:
    assert quantize(teacher, teacher.with_name("quantised"), *W8).exit_code == 0
    return teacher.with_name("quantised")


def test_remains_of_a_killed_conversion_are_removed(quantised: Path, tmp_path: Path) -> None:
    for name in (".out-0123abcd", ".other-0123abcd", ".out-89abcdef", ".out-not"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-0.safetensors").write_bytes(b"x")
    for name in (".out-0123abcd.lock", ".out-89abcdef.lock"):
        (tmp_path / name).touch()
    with held(tmp_path / ".out-89abcdef.lock"):  # by one that is still at work
        assert run("convert", quantised, tmp_path / "out", "--format", "epiloq").exit_code == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", ".other-0123abcd", ".out-89abcdef", ".out-89abcdef.lock", ".out-not"}


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_a_source_that_vanishes_is_named(
    teacher: Path, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """After the weights were opened, and before the other files are copied."""
    source = shutil.copytree(teacher if command == "quantize" else quantised, tmp_path / "model")
    close = checkpoint.Writer.close

    def then_vanish(writer: checkpoint.Writer, config: Any) -> None:
        close(writer, config)
        shutil.rmtree(source)

    monkeypatch.setattr(checkpoint.Writer, "close", then_vanish)
    if command == "quantize":
        result = run("quantize", source, "--output", tmp_path / "out", *W8)
    else:
        result = run("convert", source, tmp_path / "out", "--format", "epiloq")
    assert result.exit_code in (1, 2) and str(source) in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_weights_that_vanish_while_they_are_evaluated(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the size that was read, and divides by no zero."""
    source = shutil.copytree(teacher, tmp_path / "model")
    size = (source / "model.safetensors").stat().st_size
    report = jobs.Job.report

    def without(job: jobs.Job, *arguments: Any) -> dict[str, Any]:
        shutil.rmtree(source)
        return report(job, *arguments)

    monkeypatch.setattr(jobs.Job, "report", without)
    result = run("quantize", source, "--output", tmp_path / "out", *W8, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "r.json").read_text())["bytes_before"] == size


def spoilt(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    return change


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named_before_the_work(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, value: float
) -> None:
    monkeypatch.setattr(jobs, "perform", lambda *_: pytest.fail("worked"))
    source = shutil.copytree(teacher, tmp_path / "model")
    names = ["model.layers.1.mlp.up_proj.weight"]
    names += ["model.norm.weight"] if algorithm == "gptq" else []  # To nearest, nobody runs the model.
    for name in names:
        tensors = load_file(teacher / "model.safetensors")
        spoilt(name, value)(tensors)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        (tmp_path / "text.txt").write_text("abcdefgh" * 50)
        options = ("--calibration", tmp_path / "text.txt", "--scheme", "w4a16-g32", "--algorithm", algorithm)
        result = quantize(source, tmp_path / "out", *options)
        assert result.exit_code == 2 and f"model.safetensors: {name}: expected finite numbers" in result.output


def shown(terminal: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> str:
    times = iter(range(1000))
    monkeypatch.setattr("epiloq.cli.progress.time.monotonic", lambda: 40.0 * next(times))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress_stages(console) as stage, stage("blocks", steps) as advance:
        for _ in range(steps):
            advance()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(False, 3, monkeypatch).splitlines()
    assert lines[:2] == ["blocks: 1/3, 0:00:40, about 0:01:20 left", "blocks: 2/3, 0:01:20, about 0:00:40 left"]
    assert lines[2:] == ["blocks: 3/3, 0:02:00"]
    many = shown(False, 950, monkeypatch).splitlines()
    assert len(many) == 95 and many[0].startswith("blocks: 10/950") and many[-1].startswith("blocks: 950/950")
    assert clock(3725.4) == "1:02:05"


def test_bars_in_a_terminal_say_how_long_is_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress_stages(console) as stage, stage("blocks", 2) as advance:
        advance()
        advance()
    assert isinstance(console.file, io.StringIO)
    assert "blocks" in console.file.getvalue() and "left:" in console.file.getvalue()


def test_a_run_without_a_terminal_has_a_line_for_each_block(teacher: Path, tmp_path: Path) -> None:
    result = quantize(teacher, tmp_path / "out", *W8)
    assert "w8a16, rtn: blocks: 1/2, 0:00:0" in result.output and "blocks: 2/2" in result.output
    assert convert.prepare(tmp_path / "out", tmp_path / "x", "gptq").steps == 14


def test_lines_of_quick_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr("epiloq.cli.progress.time.monotonic", lambda: 0.1 * next(times))
    console = Console(file=io.StringIO(), width=100)
    with progress_stages(console) as stage, stage("windows [1] of [red]", 32) as advance:
        for _ in range(32):
            advance()
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [f"windows [1] of [red]: {n}/32" for n in (1, 11, 21, 31, 32)]
