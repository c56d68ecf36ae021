"""Too little text, or text that is used twice: reported before the work begins, and refused without --force."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

from command_line import letters, quantize, run
from epiloq.quantize import job as jobs

W4 = ("--scheme", "w4a16-g32")


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8-static"])
def test_too_few_tokens_are_refused(
    teacher: Path, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_text("abc")
    message = "only 3 calibration tokens (1 of 8 windows)"
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "opened", lambda *_: pytest.fail("loaded"))
        refused = quantize(teacher, tmp_path / "out", "--scheme", scheme, "--calibration", tmp_path / "short")
    assert (
        refused.exit_code == 2 and f"{message}: expected at least 256" in refused.output and "--force" in refused.output
    )
    assert [path.name for path in tmp_path.iterdir()] == ["short"]
    options = ("--scheme", scheme, "--calibration", tmp_path / "short", "--force", "--json", tmp_path / "r.json")
    forced = quantize(teacher, tmp_path / "out", *options)
    assert forced.exit_code == 0, forced.output
    assert forced.output.index(f"warning: {message}; results will be poor") < forced.output.index("of weights")
    assert json.loads((tmp_path / "r.json").read_text())["warnings"] == [f"{message}; results will be poor"]
    assert f"{message}; results will be poor" in (tmp_path / "out" / "report.html").read_text()


def test_an_algorithm_without_inputs_needs_no_text(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc")
    options = (*W4, "--algorithm", "rtn", "--calibration", tmp_path / "short")
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 0 and "warning" not in result.output


def test_fewer_windows_than_were_asked_for(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "some").write_text(letters(5000))
    options = (*W4, "--calibration", tmp_path / "some", "--windows", 32, "--length", 512)
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    assert "warning: only 5000 calibration tokens (10 of 32 windows); results may be poor" in result.output


def test_perplexity_over_a_handful_of_tokens(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc")
    refused = run("eval", teacher, "--text", tmp_path / "short")
    assert refused.exit_code == 2 and "only 3 tokens to evaluate on: expected at least 256" in refused.output
    forced = run("eval", teacher, "--text", tmp_path / "short", "--force", "--json", tmp_path / "e.json")
    assert forced.exit_code == 0 and "warning: perplexity over only 3 tokens" in forced.output
    assert json.loads((tmp_path / "e.json").read_text())["warnings"] == [
        "perplexity over only 3 tokens; it will be inaccurate"
    ]
    job = quantize(teacher, tmp_path / "out", *W4, "--evaluation", tmp_path / "short")
    assert job.exit_code == 2 and "only 3 tokens to evaluate on" in job.output and not (tmp_path / "out").exists()


def test_text_that_calibration_sees_is_named(teacher: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    used, other = tmp_path / "used.txt", tmp_path / "other.txt"
    used.write_text("".join(draw.choices("abcdefgh", k=640)))
    other.write_text("b" * 700 + "\n" + "some more\n" + used.read_text()[320:])
    options = (*W4, "--calibration", used, "--evaluation", other, "--windows", 20)
    refused = quantize(teacher, tmp_path / "out", *options)
    assert refused.exit_code == 2, refused.output
    here, there = f"{other}, line 3, column 1", f"{used}, line 1, column 321"
    assert (
        f"evaluation text that calibration sees: {here}, is in {there}: give other text, or --force" in refused.output
    )
    forced = quantize(teacher, tmp_path / "out", *options, "--force", "--json", tmp_path / "r.json")
    assert forced.exit_code == 0, forced.output
    assert "the perplexity will be too good" in forced.output
    assert json.loads((tmp_path / "r.json").read_text())["perplexity"]["tokens"] == 1031


@pytest.mark.parametrize("command", ["quantize", "eval", "inspect"])
def test_a_model_of_a_hub_is_downloaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"quantize": ("--scheme", "w8a16", "--algorithm", "rtn", "--output", "out"), "eval": ("--text", "t")}
    (tmp_path / "t").write_text("a" * 300)
    result = run(command, "HuggingFaceTB/SmolLM2-135M", *options.get(command, ()))
    assert result.exit_code == 2, result.output
    assert "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M" in result.output
    wrong = run(command, "here/there/nothing", *options.get(command, ()))
    assert (
        wrong.exit_code == 2 and "here/there/nothing: expected a model directory, found nothing there" in wrong.output
    )
    assert "download" not in wrong.output
