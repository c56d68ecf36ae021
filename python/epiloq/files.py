"""Files that a reader finds whole, and files that one process at a time holds."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

FULL_OR_FAILED = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS))
"""Numbers of errors of a disk that is full, failed or cannot be written to."""


FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Those of a disk, or of a user's part of one, that has no space."""
_OF_RUST = ("SafetensorError", "Exception")
"""Names of the exceptions of the packages safetensors and tokenizers, whose messages contain an error's number."""


@contextmanager
def named_failures(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let errors of a full or failed disk name what was being written, which those of a single write do not.

    Errors of a `temporary` file or folder, which becomes `path` when it is complete, name `path`, too. Those of the
    packages safetensors and tokenizers become OSError.
    """
    try:
        yield
    except OSError as error:
        written = error.filename2 or error.filename
        aside = temporary is not None and written is not None and Path(os.fsdecode(written)).is_relative_to(temporary)
        if aside or (error.errno in FULL_OR_FAILED and written is None):
            error.filename, error.filename2 = str(path), None
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if type(error).__name__ not in _OF_RUST or number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error


@contextmanager
def removed_if_failed(folder: Path, path: Path) -> Iterator[None]:
    """Remove a folder that was not written to the end, so that a full disk has room again; `named_failures` of `path`,
    which it becomes."""
    try:
        with named_failures(path, folder):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def described(error: OSError) -> str:
    """Return the error's message, its file or folder, and what to do if there is no space, without its number."""
    full = error.errno in FULL
    # Files that epiloq writes are named by `named_failures`, and reading needs no space.
    written = error.filename2 or error.filename or ("standard output" if full else None)
    if not error.strerror or written is None:
        return str(error)
    return f"{written}: {error.strerror}{': free some' if full else ''}"


def write_text(path: Path, content: str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part, also of a run that is cut short.

    A link stays one, and what is no regular file (a FIFO, /dev/null) is written to rather than replaced.
    """
    write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """The same for bytes."""
    path = path.resolve() if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with named_failures(path, temporary):
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


_BESIDE = len(".-12345678.lock")
"""Bytes that names of temporary files and folders beside an output have more than the output's."""


def why_not_named(path: Path) -> str | None:
    """Return why no file or folder can have this path, because its names are too long; None if one can."""
    nearest = next((each for each in path.absolute().parents if _is_there(each)), Path(path.anchor or "."))
    longest, total = os.pathconf(nearest, "PC_NAME_MAX"), os.pathconf(nearest, "PC_PATH_MAX")
    for name in path.parts:
        most = longest - (_BESIDE if name == path.name else 0)
        if len(os.fsencode(name)) > most:
            return f"expected names of at most {most} bytes, got {len(os.fsencode(name))}"
    size = len(os.fsencode(path.absolute())) + _BESIDE
    return f"expected a path of less than {total} bytes, got {size}" if size >= total else None


def _is_there(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # its name is too long
        return False


def nearest_parent(path: Path) -> Path:
    """Return the nearest parent of a path that exists, be it a folder, a file or a broken link."""
    return next(each for each in path.absolute().parents if each.exists() or each.is_symlink())


def why_in_no_folder(path: Path) -> str | None:
    """Return why a path cannot lie in a folder, because a parent is a file or a broken link; None if it can."""
    nearest = nearest_parent(path)
    if nearest.is_dir():
        return None
    return f"expected a path in a folder, but {nearest} is a {'file' if nearest.exists() else 'broken link'}"


def why_not_made(folder: Path) -> str | None:
    """Try to create a folder in `folder`, and return why that fails (read-only, or virtual); None if it does not."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".epiloq-", dir=folder))
    except OSError as error:
        return f"nothing can be made in {folder}: {error.strerror}"
    return None


def why_not_written(file: Path, inputs: Iterable[Path | str | None] = ()) -> str | None:
    """Return why `write_text` could not, or must not, write a file in an existing folder; None if it may.

    It must not replace one of a command's `inputs`, files and folders, or a file that is in such a folder.
    """
    reason = why_not_named(file)
    if reason is not None:
        return reason
    file = file.resolve()
    if file.is_file():
        for read in [Path(each) for each in inputs if each]:
            if read.exists() and file.is_relative_to(read.resolve()):
                what = f"a file of {read}" if read.is_dir() else "a file"
                return f"it is {what} that this command reads: choose another name, or remove it first"
    if file.exists() and not file.is_file():
        return None if os.access(file, os.W_OK) else f"{file} cannot be written to"
    return why_not_made(file.parent)


class Held(Exception):
    """Another process holds a file; the message says which."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file, which is made with its folder, until the block or this process ends. Raises Held."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8") as file:
            _take(path, file.fileno())
            if not _is_still_there(path, file.fileno()):  # The previous holder has removed the file.
                continue
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
            file.flush()
            yield
            return


def check_free(path: Path) -> None:
    """Raise Held where another process holds a file."""
    if path.is_file():
        with open(path, encoding="utf-8") as file:
            _take(path, file.fileno())


def _take(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Held(path.read_text(encoding="utf-8") or "another process") from None


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
