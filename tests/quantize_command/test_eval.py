"""``epiloq eval``: perplexity, divergence from a teacher and tasks from local files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers

from command_line import ROUND, quantize, run, teacher_and_text, text
from epiloq.evaluation import tasks
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load

W4 = ("--scheme", "w4a16-g32", "--algorithm", "rtn", "--format", "epiloq")


@pytest.fixture(scope="module")
def student(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("student") / "out"
    assert quantize(teacher, output, *W4).exit_code == 0
    return output


def figures(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    result = run("eval", *arguments, "--json", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "e.json").read_text())  # type: ignore[no-any-return]


def test_divergence_is_the_mean_over_all_tokens(teacher: Path, student: Path, tmp_path: Path) -> None:
    found = figures(tmp_path, student, "--text", text(teacher), "--length", 32, "--tokens", 300, "--kl", teacher)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(teacher)
    ids = torch.tensor(tokenizer(text(teacher).read_text())["input_ids"][:300])
    models = [load(Checkpoint(folder))[0] for folder in (teacher, student)]
    total = torch.zeros((), dtype=torch.float64)
    for part in ids.split(32):
        with torch.no_grad():
            logs = [m(part[None], use_cache=False).logits[0].double().log_softmax(-1) for m in models]
        total += (logs[0].exp() * (logs[0] - logs[1])).sum()
    assert found["kl"] == pytest.approx(float(total) / 300, rel=1e-4, abs=5e-7) and found["kl"] > 0
    assert found["teacher"] == str(teacher)


def test_a_model_does_not_diverge_from_itself(teacher: Path, tmp_path: Path) -> None:
    assert figures(tmp_path, teacher, "--text", text(teacher), "--kl", teacher)["kl"] == 0


def test_options_that_lack_another_are_refused(teacher: Path) -> None:
    neither = run("eval", teacher)
    assert neither.exit_code == 2 and "expected --text, --tasks or both, got neither" in neither.output
    alone = run("eval", teacher, "--kl", teacher, "--tasks", "x")
    assert alone.exit_code == 2 and "--kl: expected --text FILE as well" in alone.output


def test_a_teacher_with_other_tokens_is_refused(teacher: Path, tmp_path: Path) -> None:
    other = teacher_and_text(tmp_path, ROUND)
    file = other / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    numbers = vocabulary["model"]["vocab"]
    numbers["a"], numbers["b"] = numbers["b"], numbers["a"]
    file.write_text(json.dumps(vocabulary))
    result = run("eval", teacher, "--text", text(teacher), "--kl", other)
    assert result.exit_code == 2 and f"--kl: {other}: expected a model with the tokens of" in result.output


def test_invalid_task_descriptions_are_refused(teacher: Path, tmp_path: Path) -> None:
    for source in (text(teacher), tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"--tasks: expected a task description"):
            tasks.task_files(source)


def test_absent_packages_are_named(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epiloq.cli import eval as command

    monkeypatch.setattr(command, "PACKAGES", ("no_such_harness",))
    result = run("eval", teacher, "--tasks", tmp_path)
    assert result.exit_code == 1 and "needs no_such_harness: pip install '.[tasks]'" in result.output


@pytest.fixture(scope="module")
def framed(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher with a token that ends a text."""
    folder = tmp_path_factory.mktemp("framed") / "model"
    shutil.copytree(teacher, folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(255)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def local_tasks(tmp_path: Path) -> Path:
    """A task of 6 questions with two answers each; the first is right."""
    pytest.importorskip("lm_eval", reason="tasks need the extra tasks")
    pytest.importorskip("datasets", reason="tasks need the extra tasks")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"{a} and", "answers": [b, c]} for a, b, c in ("abc", "bcd", "cde", "def", "efg", "fgh")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "letters.yaml").write_text(
        "task: letters\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {folder / 'rows.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{answers}}'\ndoc_to_target: 0\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return folder


def test_tasks_of_a_folder_are_scored(
    framed: Path, teacher: Path, local_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = figures(tmp_path, framed, "--tasks", local_tasks)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(framed)
    model, _ = load(Checkpoint(framed))
    right = 0
    for a, b, c in ("abc", "bcd", "cde", "def", "efg", "fgh"):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(f"{a} and ")["input_ids"]]), use_cache=False).logits[0, -1]
        right += bool(logits[tokenizer(b)["input_ids"][0]] >= logits[tokenizer(c)["input_ids"][0]])
    assert math.isclose(found["tasks"]["letters"]["acc,none"], right / 6)
    assert "perplexity" not in found
    one = figures(tmp_path, framed, "--tasks", local_tasks / "letters.yaml", "--text", text(teacher), "--limit", 3)
    assert one["perplexity"] > 1 and one["tasks"]["letters"]["acc,none"] in (0, 1 / 3, 2 / 3, 1)


def test_a_task_that_cannot_be_loaded_says_why(framed: Path, local_tasks: Path) -> None:
    (local_tasks / "rows.jsonl").unlink()
    result = run("eval", framed, "--tasks", local_tasks)
    assert result.exit_code == 2 and f"--tasks: {local_tasks}: " in result.output


def test_a_tokenizer_that_frames_no_text_is_refused(teacher: Path, local_tasks: Path) -> None:
    result = run("eval", teacher, "--tasks", local_tasks)
    assert result.exit_code == 2 and "expected a tokenizer with a BOS or EOS token" in result.output
