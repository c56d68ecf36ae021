"""Text for calibration and evaluation: read from files or lists, cut into windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 0


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
    """`count` windows (all, if there are no more) in the text's order, of full length where there are such."""
    longest = max(window.shape[1] for window in found)
    full = [window for window in found if window.shape[1] == longest]
    chosen = torch.randperm(len(full), generator=torch.Generator().manual_seed(seed))[:count]
    return [full[i] for i in sorted(chosen.tolist())]


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {file}: expected UTF-8 text, found bytes that are not at {error.start}") from None
