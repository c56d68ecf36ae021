"""The file that keeps tuned choices, and what of it counts on a card."""

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
"""The environment variable that names the file; "off": none is read."""
OFF = "off"
FORMAT = 1


@dataclass(frozen=True)
class Card:
    """A device by index, -1 for none, and what tells its model from others."""

    index: int
    name: str
    sm_count: int

    def __str__(self) -> str:
        return f"{self.name}, {self.sm_count} SMs"


def card_of(index: int) -> Card:
    """The card of a CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Card(index, properties.name, properties.multi_processor_count)


def cache_path(path: str | os.PathLike[str] | None = None) -> Path | None:
    """The file of tuned choices: `path`, else what EPILOQ_TUNING says (None for "off"), else epiloq/tuning.json in the
    user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    if path is not None:
        return Path(path)
    if said := os.environ.get(VARIABLE):
        return None if said == OFF else Path(said)
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
    """What must be the same for a choice to hold: the release and the sources of its kernels."""
    return f"{_core.__version__} {_core.kernel_hash()}"


def _read(path: Path) -> dict[str, Any]:
    """The cards of a file. Raises ValueError for what is not such a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("cards"), dict):
        raise ValueError(f"{path} is no file of tuned kernels of format {FORMAT}")
    return dict(content["cards"])


def read(path: Path, card: Card) -> dict[str, Entry]:
    """The choices that hold on this card, by key. Raises ValueError, whose message says why none of a file does."""
    cards = _read(path)
    if not cards:
        return {}
    if str(card) not in cards:
        raise ValueError(f"{path} has kernels tuned on {'; '.join(cards)}, which do not hold on {card}")
    own = cards[str(card)]
    if own.get("kernels") != _kernels():
        raise ValueError(f"{path} was tuned with epiloq {own.get('kernels')}, this is {_kernels()}: tune again")
    try:
        return {key: Entry(**entry) for key, entry in own["choices"].items()}
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: expected choices by problem") from None


def save(path: Path, card: Card, choices: Mapping[str, Entry], without: Collection[str] = ()) -> None:
    """Add choices of a card to a file, which is made with its folder; other cards' stay, as do its own of the same
    kernels but for the keys `without`.

    Raises ValueError for a file that is something else, OSError where it cannot be written.
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
    """From now on dispatch uses these choices on this card, and no others."""
    _core.clear_tuned_kernels(card.index)
    for key, entry in choices.items():
        _core.set_tuned_kernel(card.index, key, entry.kernel)


def load(index: int) -> None:
    """What dispatch calls before a device's first product. Never raises: a file that does not hold is a warning."""
    path = cache_path()
    if path is None or not path.is_file():
        return
    try:
        card = card_of(index)
        apply(card, read(path, card))
    except Exception as error:
        warnings.warn(f"epiloq: tuned kernels are ignored: {error}", stacklevel=2)
