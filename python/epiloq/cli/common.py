"""What commands share: how they end, the options they check first, and their JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from epiloq.files import write_text

REQUIRED = ("transformers", "safetensors")
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def complain(command: str, message: str) -> None:
    """Print on stderr why a command ends."""
    from rich.console import Console

    text = f"epiloq {command}: {message}"
    Console(stderr=True).print(text, style="red", highlight=False, markup=False, soft_wrap=True)


def warn(message: str) -> None:
    """Print on stderr what a user should know before the work begins."""
    from rich.console import Console

    Console(stderr=True).print(f"warning: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def how_to_open(folder: Path, layout: str) -> str:
    """The line that says how a model directory is opened that was written in a format."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ["AutoModel"]
    alone = " (transformers alone refuses this format)" if layout == "epiloq" else ""
    return (
        f"To open it: import epiloq.integrations.transformers, then "
        f"transformers.{kind[0]}.from_pretrained({str(folder)!r}){alone}"
    )


def check_installed(what: str, missing: list[str], extra: str) -> None:
    """Leave with FAILED where packages are missing that an extra of epiloq would bring."""
    if missing:
        complain(what, f"needs {', '.join(missing)}: pip install 'epiloq[{extra}]'")
        raise typer.Exit(FAILED)


def _disk_failures() -> tuple[type[Exception], ...]:
    """What a disk that fails or is full raises: safetensors has an exception of its own for it."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


@contextmanager
def failures(command: str, hint: str = "") -> Iterator[None]:
    """Say in a sentence what went wrong, and leave with BAD_INPUT, FAILED or INTERRUPTED.

    `hint` says what can be done when the machine or the user, not a wrong request, ended it.
    """
    check_installed(command, [name for name in REQUIRED if find_spec(name) is None], "hf")
    try:
        yield
    except ValueError as error:
        complain(command, str(error))
        raise typer.Exit(BAD_INPUT) from None
    except _disk_failures() as error:
        complain(command, f"{error}{hint}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        complain(command, f"interrupted{hint}")
        raise typer.Exit(INTERRUPTED) from None


def one_of(value: str, known: dict[str, Any], option: str) -> str:
    """`value` if it is a name in a table; otherwise an error that lists them."""
    if value not in known:
        raise typer.BadParameter(f"no {value!r}; there are {', '.join(known)}", param_hint=option)
    return value


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    import torch

    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"expected cpu, or cuda where torch sees one, got {device!r}", param_hint="--device")


def check_target(path: Path | None, option: str = "--json") -> None:
    """Refuse a file to write that could not be written later, before any work is done."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, expected a file name", param_hint=option)
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist", param_hint=option)


def quiet() -> None:
    """Keep transformers off the network and its bars and warnings off our display."""
    from epiloq.demo.teacher import keep_offline

    keep_offline()
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def write_json(file: Path | None, found: dict[str, Any]) -> None:
    """Write what ``--json`` asks for, if it was given; NaN and infinities, for which JSON has no words, are null."""
    if file is not None:
        write_text(file, json.dumps(_sayable(found), indent=2, allow_nan=False) + "\n")


def _sayable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sayable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sayable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
