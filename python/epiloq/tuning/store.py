"""File of tuned kernel choices, and selection of those that apply to a GPU."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epiloq import _core
from epiloq.files import write_text

VARIABLE = "EPILOQ_TUNING"
"""Environment variable with the file's path; "off" disables it."""
OFF = "off"
FORMAT = 1


@dataclass(frozen=True)
class Card:
    """A GPU: its device index (-1 for none), and the properties that identify its model."""

    index: int
    name: str
    sm_count: int

    def __str__(self) -> str:
        return f"{self.name}, {self.sm_count} SMs"


def card_of(index: int) -> Card:
    """The `Card` for a CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Card(index, properties.name, properties.multi_processor_count)


def cache_path(path: str | os.PathLike[str] | None = None) -> Path | None:
    """Path of the file: `path`, else the value of EPILOQ_TUNING (None for "off"), else epiloq/tuning.json in the user's
    cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    if path is not None:
        return Path(path)
    if value := os.environ.get(VARIABLE):
        return None if value == OFF else Path(value)
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # Relative ones are invalid by the XDG specification.
    base = Path(folder) if Path(folder).is_absolute() else Path.home() / ".cache"
    return base / "epiloq" / "tuning.json"


@dataclass(frozen=True)
class Entry:
    """A tuned choice: the kernel, its time and the default's in microseconds, measured side by side."""

    kernel: str
    us: float
    default: str
    default_us: float


def _kernels() -> str:
    """Identity of the kernels, by release and sources; choices apply only to the same one."""
    return f"{_core.__version__} {_core.kernel_hash()}"


def _read(path: Path) -> dict[str, Any]:
    """Read a file's entries by GPU. Raises ValueError if it is not a tuning file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("cards"), dict):
        raise ValueError(f"{path}: expected a file of tuned kernels of format {FORMAT}; run epiloq.tune to write one")
    return dict(content["cards"])


def read(path: Path, card: Card) -> dict[str, Entry]:
    """Read the choices for this GPU, by key. Raises ValueError with the reason if there are none."""
    cards = _read(path)
    if not cards:
        return {}
    if str(card) not in cards:
        raise ValueError(f"{path} has kernels tuned on {'; '.join(cards)}, which do not apply to {card}")
    own = cards[str(card)]
    if own.get("kernels") != _kernels():
        raise ValueError(f"{path} was tuned with epiloq {own.get('kernels')}, this is {_kernels()}: tune again")
    try:
        return {key: Entry(**entry) for key, entry in own["choices"].items()}
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: expected choices by problem") from None


def save(path: Path, card: Card, choices: Mapping[str, Entry], without: Collection[str] = ()) -> None:
    """Add choices for a GPU to a file, which is created if necessary, and remove those with the keys `without`.

    Entries of other GPUs are kept, and those of this GPU if they are for the same kernels.

    Raises ValueError if the file is not a tuning file, and OSError if it cannot be written.
    """
    cards = _read(path)
    own = cards.get(str(card), {})
    held = own.get("choices", {}) if own.get("kernels") == _kernels() else {}
    kept = {key: entry for key, entry in held.items() if key not in without}
    added = {key: vars(entry) for key, entry in choices.items()}
    cards[str(card)] = {"kernels": _kernels(), "choices": {**kept, **added}}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"format": FORMAT, "cards": cards}, indent=1) + "\n")


def apply(card: Card, choices: Mapping[str, Entry]) -> None:
    """Make dispatch use these choices, and no others, on this GPU."""
    _core.clear_tuned_kernels(card.index)
    for key, entry in choices.items():
        _core.set_tuned_kernel(card.index, key, entry.kernel)


def load(index: int) -> None:
    """Callback of dispatch before the first product on a device. Never raises: an unsuitable file causes a warning."""
    path = cache_path()
    if path is None or not path.is_file():
        return
    try:
        card = card_of(index)
        apply(card, read(path, card))
    except Exception as error:
        warnings.warn(f"epiloq: tuned kernels are ignored: {error}", stacklevel=2)
