"""Code that commands share: exit codes, error messages and the checks of options before any work."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from epiloq.cli.output import STDOUT, installed_by, unknown
from epiloq.files import described, why_in_no_folder, why_not_named, why_not_written

REQUIRED = ("transformers", "safetensors")
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
INVALID = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Numbers of errors of a name, or of rights, rather than of a disk."""


JSON_HELP = "Also write the figures to FILE, - for standard output."


def json_option() -> Any:
    """``--json FILE``, which every command has."""
    return optional("FILE", JSON_HELP, "--json")


def complain(command: str, message: str) -> None:
    """Print an error message on standard error."""
    from rich.console import Console

    text = f"epiloq {command}: {message}"
    Console(stderr=True).print(text, style="red", highlight=False, markup=False, soft_wrap=True)


def warn(message: str) -> None:
    """Print a warning on standard error before the work begins."""
    from rich.console import Console

    Console(stderr=True).print(f"warning: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def how_to_open(folder: Path, layout: str) -> str:
    """Return the line that says how to open a model directory of a format."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ["AutoModel"]
    alone = " (transformers alone refuses this format)" if layout == "epiloq" else ""
    return (
        f"To open it: import epiloq.integrations.transformers, then "
        f"transformers.{kind[0]}.from_pretrained({str(folder)!r}){alone}"
    )


def check_installed(what: str, missing: list[str], extra: str) -> None:
    """Exit with FAILED if packages of an extra of epiloq are missing."""
    if missing:
        complain(what, f"needs {', '.join(missing)}: {installed_by(extra)}")
        raise typer.Exit(FAILED)


def _disk_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a disk that fails or is full: safetensors has its own."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


@contextmanager
def failures(command: str, hint: str = "") -> Iterator[None]:
    """Print an exception as one sentence, and exit with BAD_INPUT, FAILED or INTERRUPTED.

    `hint` says what can be done when the machine or the user, not a wrong request, ended it.
    """
    check_installed(command, [name for name in REQUIRED if find_spec(name) is None], "hf")
    plain = warnings.formatwarning
    warnings.formatwarning = _sentence
    try:
        yield
    except ValueError as error:
        complain(command, str(error))
        raise typer.Exit(BAD_INPUT) from None
    except BrokenPipeError:  # the reader has closed the pipe (`epiloq … | head`): click ends without a message
        raise
    except _disk_failures() as error:
        if isinstance(error, OSError) and error.errno in INVALID:
            complain(command, described(error))
            raise typer.Exit(BAD_INPUT) from None
        complain(command, f"{described(error) if isinstance(error, OSError) else error}{hint}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        complain(command, f"interrupted{hint}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        warnings.formatwarning = plain


def _sentence(message: Warning | str, *_: Any, **__: Any) -> str:
    """Format a warning without its place in the code."""
    return f"warning: {' '.join(str(message).split())}\n"


def optional(metavar: str, text: str, *names: str) -> Any:
    """Return an option whose help shows no default, because without it there is no value."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def choices(text: str, known: Iterable[str], name: str, metavar: str, default: str = "") -> Any:
    """Return an option whose value is one of the `known` names, which its help lists and the shell completes."""
    names = list(known)
    return typer.Option(
        name,
        metavar=metavar,
        help=f"{text}: {', '.join(names)}.{f' By default {default}.' if default else ''}",
        show_default=False,
        autocompletion=lambda incomplete: [name for name in names if name.startswith(incomplete)],
    )


def one_of(value: str, known: dict[str, Any], option: str) -> str:
    """`value` if it is a name in a table; otherwise an error that names the nearest and lists them."""
    if value not in known:
        raise typer.BadParameter(f"no {unknown(value, known)}", param_hint=option)
    return value


def check_device(device: str) -> None:
    """Raise unless the device exists."""
    import torch

    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise typer.BadParameter(f"expected cpu or cuda, got {device!r}", param_hint="--device")
    if kind == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"{device!r}: torch sees no CUDA device here; use cpu", param_hint="--device")


def check_target(path: Path | None, option: str = "--json", inputs: Iterable[Path | str | None] = ()) -> None:
    """Refuse a file to write that could not be written later, or is one of the `inputs`, before any work is done."""
    if path is None or (path == STDOUT and option == "--json"):
        return
    if path == STDOUT:
        raise typer.BadParameter(
            "expected a file name, got -: only --json writes to standard output", param_hint=option
        )
    reason = why_not_named(path) or why_in_no_folder(path)
    if reason is not None:
        raise typer.BadParameter(f"{path}: {reason}", param_hint=option)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, expected a file name", param_hint=option)
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist", param_hint=option)
    reason = why_not_written(path, inputs)
    if reason is not None:
        raise typer.BadParameter(f"{path}: {reason}", param_hint=option)


def quiet() -> None:
    """Keep transformers offline, without progress bars and warnings."""
    from epiloq.demo.teacher import keep_offline

    keep_offline()
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
