"""Text for calibration and evaluation: read from files or lists, cut into windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 0
# Tokens that texts have in common by more than chance.
RUN, SHORTEST_RUN = 64, 16


def read_texts(source: str | Path | Sequence[str]) -> list[str]:
    """The documents of a UTF-8 file, of every such file under a folder (hidden ones excepted), or of a list.

    Raises ValueError: nothing there, a file that is not text, or no text at all.
    """
    if not isinstance(source, (str, Path)):
        texts = list(source)
    else:
        path = Path(source)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
        elif path.is_file():
            files = [path]
        else:
            raise ValueError(f"text: {path}: expected a text file or a folder of them, found nothing there")
        texts = [_read(file) for file in files]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"text: {source if isinstance(source, (str, Path)) else 'list'}: expected text, found none")
    return texts


def load_tokenizer(folder: Path) -> Any:
    """A model directory's tokenizer. Raises ValueError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: no tokenizer: {str(error).strip().splitlines()[0]}") from error


def windows(tokenizer: Any, texts: Sequence[str], length: int = 512) -> list[Tensor]:
    """Each text in consecutive windows, int64 ``[1, <= length]``, as the tokenizer itself cuts and frames them.

    Windows of fewer than two tokens are left out. Raises ValueError for a tokenizer that cannot cut (one of those
    written in Python) or when nothing is left.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"text: tokenizer: expected a fast one, got {type(tokenizer).__name__}")
    cut: list[list[int]] = tokenizer(
        list(texts), truncation=True, max_length=length, return_overflowing_tokens=True, verbose=False
    )["input_ids"]
    found = [torch.tensor([ids], dtype=torch.int64) for ids in cut if len(ids) > 1]
    if not found:
        raise ValueError("text: expected at least two tokens, found fewer")
    return found


def sample(found: Sequence[Tensor], count: int, seed: int = SEED) -> list[Tensor]:
    """`count` windows (all, if there are no more) in the text's order: the longest first, then shorter ones."""
    longest = max(window.shape[1] for window in found)
    generator = torch.Generator().manual_seed(seed)
    chosen: list[int] = []
    for is_longest in (True, False):
        candidates = [i for i, window in enumerate(found) if (window.shape[1] == longest) == is_longest]
        order = torch.randperm(len(candidates), generator=generator)[: count - len(chosen)]
        chosen += [candidates[i] for i in order.tolist()]
    return [found[i] for i in sorted(chosen)]


def first_tokens(found: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Windows from the text's beginning on that have so many tokens together (all, if there are no more).

    The last one is cut; one of fewer than two tokens is left out, for it predicts nothing.
    """
    taken: list[Tensor] = []
    for window in found:
        part = window[:, :tokens]
        if part.shape[1] < 2:
            break
        taken.append(part)
        tokens -= part.shape[1]
    return taken


def seen(evaluation: Sequence[Tensor], calibration: Sequence[Tensor]) -> bool:
    """Whether text to evaluate on holds a window of calibration, or half of one, wherever windows begin.

    Half of its runs of `RUN` tokens (the window, where it is shorter, from `SHORTEST_RUN` tokens on): what documents
    share by way of headings and licences does not count.
    """
    texts = [window.flatten().tolist() for window in evaluation]
    known: dict[int, set[tuple[int, ...]]] = {}
    for window in calibration:
        row = window.flatten().tolist()
        length = min(RUN, len(row))
        if length < SHORTEST_RUN:
            continue
        if length not in known:
            known[length] = {tuple(text[i : i + length]) for text in texts for i in range(len(text) - length + 1)}
        runs = [tuple(row[i : i + length]) for i in range(0, len(row) - length + 1, RUN // 2)]
        if 2 * sum(run in known[length] for run in runs) >= len(runs):
            return True
    return False


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {file}: expected UTF-8 text, found bytes that are not at {error.start}") from None
