"""Text for calibration and evaluation: read from files or lists, cut into windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.io.safe_files import check_folder, reason

SEED = 0
# Numbers of tokens from which a repetition is not considered a coincidence.
RUN, SHORTEST_RUN = 64, 16
_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """A text, and its source: a file, or "text 3" of a list."""

    name: str
    text: str


def read_documents(source: str | Path | Sequence[str]) -> list[Document]:
    """Read documents from a UTF-8 file, from every file under a folder except hidden ones, or from a list.

    Raises ValueError if nothing is there, a file is not UTF-8 or of JSON lines, or there is no text.
    """
    if not isinstance(source, (str, Path)):
        found = [Document(f"text {number}", text) for number, text in enumerate(source, 1)]
    else:
        path = Path(source)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
        elif path.is_file():
            files = [path]
        else:
            raise ValueError(f"text: {path}: expected a text file or a folder of text files, found neither")
        found = [Document(str(file), _read(file)) for file in files]
    found = [document for document in found if document.text.strip()]
    if not found:
        raise ValueError(f"text: {source if isinstance(source, (str, Path)) else 'list'}: expected text, found none")
    return found


def read_texts(source: str | Path | Sequence[str]) -> list[str]:
    """Return the texts of `read_documents`."""
    return [document.text for document in read_documents(source)]


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model directory. Raises ValueError if there is none or it cannot be read."""
    from transformers import AutoTokenizer

    check_folder(folder)
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself for a file that it cannot read
        raise ValueError(f"{folder}: no tokenizer: {reason(error)}") from error
    # If files are missing, transformers constructs a tokenizer of special tokens only (T5's has one more token).
    if len(found) - len(found.all_special_ids) < 2:
        raise ValueError(
            f"{folder}: no tokenizer: expected its files (tokenizer.json or the like) next to config.json, found none "
            "with a vocabulary"
        )
    return found


def windows(tokenizer: Any, texts: Sequence[str], length: int = 512) -> list[Tensor]:
    """Cut each text into consecutive windows, int64 ``[1, <= length]``, with special tokens as the tokenizer adds them.

    Windows of fewer than two tokens are left out. Raises ValueError for a tokenizer that cannot do this (one of those
    written in Python), or if nothing is left.
    """
    cut: list[list[int]] = _cut(tokenizer, texts, length)["input_ids"]
    found = [torch.tensor([ids], dtype=torch.int64) for ids in cut if len(ids) > 1]
    if not found:
        raise ValueError("text: expected at least two tokens, found fewer")
    return found


def place(tokenizer: Any, documents: Sequence[Document], length: int, window: int, token: int) -> str:
    """Describe where a token of one of `windows` begins: document, line and column, both from 1."""
    cut = _cut(tokenizer, [document.text for document in documents], length, return_offsets_mapping=True)
    kept = [index for index, ids in enumerate(cut["input_ids"]) if len(ids) > 1]
    document = documents[cut["overflow_to_sample_mapping"][kept[window]]]
    before = document.text[: cut["offset_mapping"][kept[window]][token][0]]
    column = len(before) - before.rfind("\n")
    return f"{document.name}, line {before.count(chr(10)) + 1}, column {column}"


def _cut(tokenizer: Any, texts: Sequence[str], length: int, **options: bool) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"text: tokenizer: expected a fast one, got {type(tokenizer).__name__}")
    cutting = {"truncation": True, "max_length": length, "return_overflowing_tokens": True, "verbose": False}
    try:
        return tokenizer(list(texts), **cutting, **options)
    except Exception as error:
        raise ValueError(f"text: the tokenizer failed: {reason(error)}") from error


def sample(found: Sequence[Tensor], count: int, seed: int = SEED) -> list[Tensor]:
    """Draw `count` windows (all, if there are fewer), preferring the longest, and return them in the text's order."""
    longest = max(window.shape[1] for window in found)
    generator = torch.Generator().manual_seed(seed)
    chosen: list[int] = []
    for is_longest in (True, False):
        candidates = [i for i, window in enumerate(found) if (window.shape[1] == longest) == is_longest]
        order = torch.randperm(len(candidates), generator=generator)[: count - len(chosen)]
        chosen += [candidates[i] for i in order.tolist()]
    return [found[i] for i in sorted(chosen)]


def first_tokens(found: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return windows from the beginning of the text that have `tokens` tokens in total (all, if there are fewer).

    The last one is truncated; one of fewer than two tokens is left out, because it predicts nothing.
    """
    taken: list[Tensor] = []
    for window in found:
        part = window[:, :tokens]
        if part.shape[1] < 2:
            break
        taken.append(part)
        tokens -= part.shape[1]
    return taken


@dataclass(frozen=True)
class Repeat:
    """Position of a common run of tokens in two lists of windows, as (window, token) indices."""

    evaluation: tuple[int, int]
    calibration: tuple[int, int]


def repeated(evaluation: Sequence[Tensor], calibration: Sequence[Tensor]) -> Repeat | None:
    """Find a calibration window of which at least half also occurs in the evaluation text, at any offset.

    Compares runs of `RUN` tokens, or whole windows of at least `SHORTEST_RUN` tokens; requiring half of them ignores
    common headings and licences. Returns the first common run, or None.
    """
    texts = [window.flatten().tolist() for window in evaluation]
    known: dict[int, dict[tuple[int, ...], tuple[int, int]]] = {}
    for number, window in enumerate(calibration):
        row = window.flatten().tolist()
        length = min(RUN, len(row))
        if length < SHORTEST_RUN:
            continue
        if length not in known:
            places = ((other, i) for other, text in enumerate(texts) for i in range(len(text) - length + 1))
            known[length] = {}
            for other, i in places:
                known[length].setdefault(tuple(texts[other][i : i + length]), (other, i))
        starts = range(0, len(row) - length + 1, RUN // 2)
        runs = {start: tuple(row[start : start + length]) for start in starts}
        common = [start for start, run in runs.items() if run in known[length]]
        if 2 * len(common) >= len(runs):
            return Repeat(known[length][runs[common[0]]], (number, common[0]))
    return None


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _read(file: Path) -> str:
    if file.suffix.lower() in _LINES:
        raise ValueError(
            f"text: {file}: expected plain text, got JSON lines, whose syntax would be read as text: write the texts "
            f"to a file, for example by jq -r .text {file.name}"
        )
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {file}: expected UTF-8 text, found invalid bytes at {error.start}") from None
