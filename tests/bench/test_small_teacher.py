"""The recipe of tools/figures/small_teacher.py at tiny size: it learns, repeats, and its model can be quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the recipe needs the extra hf")
small_teacher = pytest.importorskip("small_teacher", reason="the repository's tools are not here")

from command_line import run

RECIPE = small_teacher.Recipe(
    vocabulary=300, hidden=32, layers=1, heads=2, feed_forward=64, length=16, batch=4, steps=30, rate=1e-2
)
TEXTS = ["".join(f"{i} and {i + 1} are numbers; " for i in range(80)), "shorter text, twice. " * 9]


def trained(output: Path | None = None) -> tuple[dict[str, torch.Tensor], list[float]]:
    tokenizer = small_teacher.tokenizer_of(TEXTS, RECIPE.vocabulary)
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]
    windows = small_teacher.windows_of(tokenizer, TEXTS, RECIPE.length)
    model = small_teacher.blank(RECIPE, len(tokenizer), tokenizer.eos_token_id)
    lost = small_teacher.train(model, windows, RECIPE)
    if output is not None:
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
    return model.state_dict(), lost


def test_it_learns_repeats_and_can_be_quantised(tmp_path: Path) -> None:
    state, lost = trained(tmp_path / "model")
    again, _ = trained()
    assert sum(lost[-5:]) < 0.8 * sum(lost[:5])
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    result = run(
        "quantize", tmp_path / "model", "--scheme", "w4a16-g32", "--algorithm", "rtn", "--output", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output


def test_the_text_leaves_out_what_is_evaluated_on(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    whole = "\n".join(topics.values())
    (tmp_path / "b.py").write_text('"""Of b."""\ndef f():\n    """Of f."""\n')
    (tmp_path / "a.py").write_text('x = "no docstring"\nclass A:\n    """Of A."""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text('"""Of a test."""\n')
    (tmp_path / "bad.py").write_text("not Python at all (")
    assert list(small_teacher.docstrings(tmp_path)) == ["Of A.", "Of b.\n\nOf f."]
    assert whole.endswith(small_teacher.reference()) and len(small_teacher.reference()) <= len(whole) * 0.75 + 1


def test_too_little_text_is_refused() -> None:
    tokenizer = small_teacher.tokenizer_of(TEXTS, RECIPE.vocabulary)
    with pytest.raises(ValueError, match=r"text: expected at least 512 tokens, got \d+"):
        small_teacher.windows_of(tokenizer, ["short"], 512)
