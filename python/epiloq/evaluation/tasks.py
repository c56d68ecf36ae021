"""Tasks of the LM Evaluation Harness (the package ``lm_eval``) that are described by local files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

PACKAGES = ("lm_eval", "datasets")
"""Packages that the extra ``tasks`` installs."""
SUFFIXES = (".yaml", ".yml")

Scores = dict[str, dict[str, float]]
"""Metrics by task, with the harness's names: ``acc,none``, ``acc_stderr,none``."""


def task_files(source: Path) -> list[Path]:
    """Task descriptions (YAML): `source` itself, or those in this folder. Raises ValueError if there are none."""
    found = [source] if source.is_file() else sorted(f for f in source.rglob("*") if f.suffix in SUFFIXES)
    if not found or found[0].suffix not in SUFFIXES:
        raise ValueError(
            f"--tasks: expected a task description of lm-evaluation-harness (*.yaml) or a folder of them, got {source}"
        )
    return found


def scores(model: nn.Module, tokenizer: Any, source: Path, *, limit: int | None = None) -> Scores:
    """Evaluate a causal language model on tasks.

    A task may run Python functions from files next to its description. Data sets' paths start at the current folder.

    Args:
        model: A transformers model, on the device where it shall run.
        tokenizer: Its tokenizer.
        source: A task description (YAML), or a folder of them.
        limit: Maximum number of documents per task; None for all.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError: No task was found, or the harness could not load or run one; the message gives the reason.
    """
    files = task_files(source)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("--tasks: expected a tokenizer with a BOS or EOS token, got one with neither")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = source if source.is_dir() else source.parent
    try:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        names = manager.all_subtasks if source.is_dir() else [str(files[0])]
        if not names:
            raise ValueError("it describes no task")
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
        found = simple_evaluate(
            wrapped, tasks=list(names), task_manager=manager, limit=limit, log_samples=False, bootstrap_iters=1000
        )
    except Exception as error:
        raise ValueError(f"--tasks: {source}: {type(error).__name__}: {error}") from error
    return {name: _figures(metrics) for name, metrics in found["results"].items()}


def _figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float)) and "," in name}
