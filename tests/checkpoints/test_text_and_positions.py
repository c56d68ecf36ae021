"""Commands that read text: as many tokens as were asked for, in windows that the model has positions for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from command_line import letters, logits, quantize, run, text
from epiloq.formats.io import model as models
from epiloq.formats.io.architecture import positions
from epiloq.formats.io.checkpoint import Checkpoint
from tiny_teacher import save


def with_positions(teacher: Path, folder: Path, positions: int) -> Path:
    shutil.copytree(teacher, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_windows_beyond_the_positions_are_refused(teacher: Path, tmp_path: Path) -> None:
    short = with_positions(teacher, tmp_path / "short", 64)
    for command in (("eval", short), ("compare", teacher, short)):
        result = run(*command, "--text", text(teacher))
        assert result.exit_code == 2 and "at most 64 tokens" in " ".join(result.output.split()), result.output
        assert run(*command, "--text", text(teacher), "--length", 64, "--tokens", 256).exit_code == 0


def test_positions_argument_names(teacher: Path, tmp_path: Path) -> None:
    config = transformers.GPTJConfig(vocab_size=256, n_positions=40, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
    folder = save(tmp_path / "gptj", transformers.GPTJForCausalLM(config))
    assert "max_position_embeddings" not in json.loads((folder / "config.json").read_text())
    assert positions(Checkpoint(folder)) == 40
    result = run("eval", folder, "--text", text(teacher), "--length", 100)
    assert result.exit_code == 2 and "at most 40 tokens" in " ".join(result.output.split())


def test_windows_have_the_requested_number_of_tokens(teacher: Path, tmp_path: Path) -> None:
    """However long documents are."""
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(chr(97 + i) * (10 + i))
    for tokens, expected in ((100, 100), (101, 101), (0, sum(10 + i for i in range(20)))):
        options = ("--text", tmp_path / "texts", "--tokens", tokens, "--force", "--json", tmp_path / "e.json")
        assert run("eval", teacher, *options).exit_code == 0
        assert json.loads((tmp_path / "e.json").read_text())["tokens"] == expected


@pytest.mark.parametrize("command", ["inspect", "eval", "compare", "convert"])
def test_file_instead_of_model_directory_is_refused(teacher: Path, tmp_path: Path, command: str) -> None:
    more = {
        "eval": ("--text", text(teacher)),
        "compare": (teacher,),
        "convert": (tmp_path / "out", "--format", "awq"),
    }.get(command, ())
    result = run(command, text(teacher), *more)
    message = " ".join(result.output.split())
    assert result.exit_code == 2 and "expected a model directory, found a file" in message, result.output


@pytest.mark.parametrize("command", ["inspect", "eval"])
def test_a_config_of_wrong_types(teacher: Path, tmp_path: Path, command: str) -> None:
    shutil.copytree(teacher, tmp_path / "model")
    config = json.loads((teacher / "config.json").read_text()) | {"hidden_size": "x"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = run(command, tmp_path / "model", *(("--text", text(teacher)) if command == "eval" else ()))
    message = " ".join(result.output.split())
    assert result.exit_code == 2 and "config.json: transformers cannot read it" in message and "hidden_size" in message


def test_windows_are_limited_to_the_models_positions(teacher: Path, tmp_path: Path) -> None:
    short = with_positions(teacher, tmp_path / "short", 64)
    (tmp_path / "other.txt").write_text(letters(600, 3, 25))
    options = ("--scheme", "w8a16", "--algorithm", "rtn", "--evaluation", tmp_path / "other.txt")
    result = quantize(short, tmp_path / "out", *options, "--json", tmp_path / "q.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "q.json").read_text())
    assert found["perplexity"]["window"] == 64 and found["perplexity"]["tokens"] == 600
    assert found["calibration_windows"] == 0 and "calibrated on" not in result.output
    assert torch.equal(
        logits(models.from_directory(str(tmp_path / "out"))), logits(models.load(Checkpoint(tmp_path / "out"))[0])
    )
