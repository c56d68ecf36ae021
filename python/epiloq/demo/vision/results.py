"""What the demonstration found, and its form as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from epiloq.demo.results import finite
from epiloq.demo.vision.drawing import Box

FORMAT = 1


@dataclass(frozen=True)
class Found:
    """A place on a page, and the text that was read there."""

    box: Box
    text: str


@dataclass(frozen=True)
class Cost:
    """Size and speed of one network, and what rounding did to each layer's output alone."""

    weight_bytes: int
    seconds_per_image: float
    speedup: float
    """Against the float network in the same format on the same device, timed in turns."""
    errors: dict[str, float]
    linked: int = 0
    """Convolutions that hand int8 on to the next."""
    exceptions: tuple[str, ...] = ()
    """Convolutions whose error at 4 bits exceeded the limit, and that have 8."""

    @property
    def worst(self) -> tuple[str, float] | None:
        """The layer with the largest error."""
        return max(self.errors.items(), key=lambda item: item[1], default=None)

    def to_json(self) -> dict[str, Any]:
        """Figures that are not finite become None."""
        return {**dataclasses.asdict(self), "errors": {name: finite(error) for name, error in self.errors.items()}}


@dataclass(frozen=True)
class Run:
    """Both networks in one form on one device. Fractions are of 1; the reference is float32 on the CPU."""

    name: str
    place: str
    detector: Cost
    recogniser: Cost
    map_iou: float
    """Of the detector's map with the reference's, the mean over pages."""
    lowest_map_iou: float
    characters_equal: float
    """Of the reference's characters, spaces around words included, those that the recogniser reads too."""
    characters_right: float
    """Of the characters that were drawn, those that it reads."""
    page_words_right: float
    """Of the words on the pages, those that both networks together read without a mistake."""
    first_page: tuple[Found, ...]

    @property
    def weight_bytes(self) -> int:
        """Of both networks."""
        return self.detector.weight_bytes + self.recogniser.weight_bytes

    def to_json(self) -> dict[str, Any]:
        """Everything about the run."""
        plain = dataclasses.asdict(self)
        return {**plain, "detector": self.detector.to_json(), "recogniser": self.recogniser.to_json()}


@dataclass(frozen=True)
class Results:
    """The runs, the float ones among them, and the circumstances."""

    runs: tuple[Run, ...]
    drawn: dict[str, Any]
    environment: dict[str, Any]
    seconds: float
    page_jpeg: bytes
    """The first page's image."""
    page_size: tuple[int, int]
    page_words: tuple[str, ...]

    def run(self, name: str) -> Run:
        """The first run with a name: of the principal device."""
        return next(run for run in self.runs if run.name == name)

    def to_json(self) -> dict[str, Any]:
        """Everything but the picture, ready for ``json.dumps``."""
        return {
            "format": FORMAT,
            "runs": [run.to_json() for run in self.runs],
            "drawn": self.drawn,
            "environment": self.environment,
            "seconds": self.seconds,
        }
