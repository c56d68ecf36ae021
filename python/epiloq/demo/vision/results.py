"""Results of the demonstration, and their JSON representation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from epiloq.demo.results import finite
from epiloq.demo.vision.drawing import Box

FORMAT = 1


@dataclass(frozen=True)
class Found:
    """A detected box, and the text recognised in it."""

    box: Box
    text: str


@dataclass(frozen=True)
class Cost:
    """Size and speed of one network, and the relative output error of each layer by itself."""

    weight_bytes: int
    seconds_per_image: float
    speedup: float
    """Speed relative to the float network in the same dtype on the same device, timed alternately."""
    errors: dict[str, float]
    linked: int = 0
    """Number of convolutions that pass int8 to the next one."""
    exceptions: tuple[str, ...] = ()
    """Convolutions with 8 bits, because their error at 4 bits exceeded the limit."""

    @property
    def worst(self) -> tuple[str, float] | None:
        """The layer with the largest error."""
        return max(self.errors.items(), key=lambda item: item[1], default=None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready figures; those that are not finite become None."""
        return {**dataclasses.asdict(self), "errors": {name: finite(error) for name, error in self.errors.items()}}


@dataclass(frozen=True)
class Run:
    """Both networks in one form on one device. The reference is float32 on the CPU; fractions are from 0 to 1."""

    name: str
    place: str
    detector: Cost
    recogniser: Cost
    map_iou: float
    """Mean over pages of the intersection over union of the detector's map and the reference's."""
    lowest_map_iou: float
    characters_equal: float
    """Fraction of the reference's characters, including spaces around words, that the recogniser also reads."""
    characters_right: float
    """Fraction of the rendered characters that the recogniser reads."""
    page_words_right: float
    """Fraction of the words on the pages that both networks together read without a mistake."""
    first_page: tuple[Found, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of both networks."""
        return self.detector.weight_bytes + self.recogniser.weight_bytes

    def to_json(self) -> dict[str, Any]:
        """JSON-ready figures of the run."""
        plain = dataclasses.asdict(self)
        return {**plain, "detector": self.detector.to_json(), "recogniser": self.recogniser.to_json()}


@dataclass(frozen=True)
class Results:
    """All runs, including those of the float networks, and the environment that they were measured in."""

    runs: tuple[Run, ...]
    drawn: dict[str, Any]
    environment: dict[str, Any]
    seconds: float
    page_jpeg: bytes
    """The image of the first page, as JPEG."""
    page_size: tuple[int, int]
    page_words: tuple[str, ...]

    def run(self, name: str) -> Run:
        """Return the run with this name on the first device."""
        return next(run for run in self.runs if run.name == name)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready results, without the image."""
        return {
            "format": FORMAT,
            "runs": [run.to_json() for run in self.runs],
            "drawn": self.drawn,
            "environment": self.environment,
            "seconds": self.seconds,
        }
