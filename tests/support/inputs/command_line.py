"""The ``epiloq`` command in this process, and small models for it to work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

from epiloq.cli import app
from tiny_teacher import save, tiny_model

ROUND = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
"""Sizes that groups of 32 and every format's words fill."""
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
"""The same of groups of 128."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app.create_app(), [str(argument) for argument in arguments])


def letters(count: int, power: int = 2, period: int = 26) -> str:
    """A text of lower-case letters without spaces."""
    return "".join(chr(97 + i**power % period) for i in range(count))


def teacher_and_text(folder: Path, sizes: dict[str, int]) -> Path:
    """A model in `folder`, and 1500 letters beside it."""
    save(folder / "model", tiny_model(**sizes))
    (folder / "text.txt").write_text(letters(1500))
    return folder / "model"


def text(teacher: Path) -> Path:
    return teacher.with_name("text.txt")


def quantize(teacher: Path, output: Path, *options: object) -> Result:
    """``epiloq quantize`` on eight short windows of the teacher's text."""
    short = ("--windows", 8, "--length", 32, "--calibration", text(teacher))
    return run("quantize", teacher, "--output", output, *short, *options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] * 5, use_cache=False).logits  # type: ignore[no-any-return]
