"""Checks of a model directory's files before they are opened: regular, of limited size, JSON objects."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from textwrap import shorten
from typing import Any

from epiloq.files import nearest_parent, why_in_no_folder, why_not_made, why_not_named
from epiloq.formats.layouts.base import FormatError

_POINTER = b"version https://git-lfs."
LARGEST_JSON = 64 << 20
"""Bytes. The index of a model with a trillion parameters takes about 20 MB, a tokenizer with 260,000 tokens 35 MB."""

# "organisation/model"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LONGEST_REASON = 240
"""Maximum length of another package's message, in characters; some print a page."""

ADAPTER = "adapter_config.json"
_OF_AN_ADAPTER = f": {ADAPTER} is PEFT's; open the model that it names, then the adapter on it"

_SPECIAL = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def status(file: Path) -> os.stat_result | None:
    """The stat result of a file, following links; None if it does not exist.

    Raises FormatError for dangling or circular links and for invalid names.
    """
    try:
        return file.stat()
    except NotADirectoryError:
        raise FormatError(f"{file.parent}: expected a model directory, found a file") from None
    except FileNotFoundError:
        if file.is_symlink():
            target = os.readlink(file)
            raise FormatError(f"{file}: expected a file, found a link to {target}, which is missing") from None
        return None
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise FormatError(f"{file}: expected a file: {getattr(error, 'strerror', error)}") from None


def check_regular(file: Path) -> os.stat_result:
    """Return the stat result of a regular file, possibly behind links. Raises FormatError for anything else."""
    found = status(file)
    if found is None:
        raise FormatError(_missing(file))
    if not stat.S_ISREG(found.st_mode):
        kind = _SPECIAL.get(stat.S_IFMT(found.st_mode), "something else")
        raise FormatError(f"{file}: expected a regular file, found {kind}")
    return found


def _missing(file: Path) -> str:
    """The message for a missing file, with a hint if a hub name was given instead of a folder."""
    if file.parent.is_dir():
        adapter = file.name == "config.json" and (file.parent / ADAPTER).exists()
        return f"{file}: missing{_OF_AN_ADAPTER if adapter else ''}"
    name = file.parent.as_posix()
    message = f"{name}: expected a model directory, found nothing there"
    if not _HUB_NAME.fullmatch(name):
        return message
    return f"{message}; a model of a hub is downloaded first: hf download {name} --local-dir {file.parent.name}"


def check_encodable(path: Path) -> None:
    """Raise FormatError for a path that is not UTF-8, which safetensors needs."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise FormatError(f"{os.fsencode(path)!r}: expected a path in UTF-8, which safetensors needs") from None


def check_new(folder: Path, source: Path | None = None) -> None:
    """Raise FormatError unless a new folder, with its parents, can be created, and is not inside the `source`, whose
    other files and folders are copied into it."""
    reason = why_not_named(folder)
    if reason is not None:
        raise FormatError(f"{folder}: {reason}: choose another output")
    if folder.exists() or folder.is_symlink():
        raise FormatError(f"{folder} exists already: choose another output, or move it away")
    check_encodable(folder)
    if source is not None and source.is_dir() and source.resolve() in folder.resolve().parents:
        raise FormatError(
            f"{folder}: lies inside {source}, whose other files and folders are copied: choose an output outside of it"
        )
    reason = why_in_no_folder(folder)
    if reason is not None:
        raise FormatError(f"{folder}: {reason}")
    reason = why_not_made(nearest_parent(folder))
    if reason is not None:
        raise FormatError(f"{folder}: {reason}: choose another output")


def check_folder(folder: Path) -> None:
    """Raise FormatError unless a model directory contains only regular files and directories.

    So other readers of the directory (transformers, a tokenizer) neither block on a FIFO nor read a device endlessly.
    Hidden entries are ignored, as everywhere here.
    """
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not entry.name.startswith(".") and not entry.is_dir():
            found = check_regular(entry)
            if entry.suffix == ".json" and found.st_size > LARGEST_JSON:
                raise FormatError(f"{entry}: expected at most {LARGEST_JSON:,} bytes of JSON, got {found.st_size:,}")


def pointer(file: Path) -> str | None:
    """What to do about a file that git left as a pointer to its content; None for other files."""
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) != _POINTER:
            return None
    return "expected the file itself, got a pointer of Git LFS: run 'git lfs pull' in its repository"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FormatError, naming the file, for anything else."""
    size = check_regular(file).st_size
    if size > LARGEST_JSON:
        raise FormatError(f"{file}: expected at most {LARGEST_JSON:,} bytes of JSON, got {size:,}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: {pointer(file) or f'expected JSON: {error}'}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{file}: expected a JSON object")
    return found


def _constant(name: str) -> float:
    """An infinity, which some configurations contain as a limit. Raises ValueError for NaN."""
    if name == "NaN":
        raise ValueError("expected numbers, got NaN")
    return float(name)


def reason(error: Exception) -> str:
    """Another package's exception as a single-line part of a message."""
    text = shorten(str(error), LONGEST_REASON, placeholder=" …")
    plain = isinstance(error, (OSError, RuntimeError, ValueError)) and text
    return text if plain else f"{type(error).__name__}: {text}" if text else type(error).__name__
