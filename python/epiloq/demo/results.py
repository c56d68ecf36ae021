"""Results of the demonstration, and their JSON representation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from epiloq.demo.speed import Speed

FORMAT = 1
SHORT_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Run:
    """Figures of one model on one device; ``dtype`` is that of the floating-point parts."""

    device: str
    dtype: str
    perplexity: float
    weight_bytes: int
    speed: Speed

    @property
    def place(self) -> str:
        """Device and dtype as text, for example "cpu fp32"."""
        return f"{self.device} {SHORT_DTYPE.get(self.dtype, self.dtype)}"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: perplexity, bytes, tokens per second, and speed-ups over the fp32 teacher on the same device."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "perplexity": finite(self.perplexity),
            "weight_bytes": self.weight_bytes,
            **dataclasses.asdict(self.speed),
        }


@dataclass(frozen=True)
class Measured:
    """One model: its runs, the principal one first, and the relative output error of each quantised layer."""

    name: str
    runs: tuple[Run, ...]
    layer_errors: dict[str, float]

    @property
    def first(self) -> Run:
        """The principal run, on the first device."""
        return self.runs[0]

    @property
    def worst_layer(self) -> tuple[str, float] | None:
        """Name and relative error of the layer with the largest error; NaN counts as the largest."""

        def badness(item: tuple[str, float]) -> float:
            return math.inf if math.isnan(item[1]) else item[1]

        return max(self.layer_errors.items(), key=badness, default=None)


@dataclass(frozen=True)
class Results:
    """Figures of the teacher and the schemes, with the text and the environment that they were measured in."""

    teacher: Measured
    schemes: tuple[Measured, ...]
    model: dict[str, Any]
    text: dict[str, Any]
    environment: dict[str, Any]
    seconds: float

    def change_percent(self, run: Run) -> float:
        """Change of a run's perplexity relative to the teacher's principal run, in percent."""
        return 100 * (run.perplexity / self.teacher.first.perplexity - 1)

    @property
    def best_scheme(self) -> Measured:
        """The scheme with the lowest perplexity."""
        return min(self.schemes, key=lambda s: math.inf if math.isnan(s.first.perplexity) else s.first.perplexity)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready results; figures that are not finite become None.

        The teacher and each scheme have the figures of their principal run at the top, and all runs under ``runs``.
        """
        return {
            "format": FORMAT,
            "teacher": {**self.teacher.first.to_json(), "runs": [run.to_json() for run in self.teacher.runs]},
            "schemes": {scheme.name: self._scheme_json(scheme) for scheme in self.schemes},
            "model": self.model,
            "text": self.text,
            "environment": self.environment,
            "seconds": self.seconds,
        }

    def _scheme_json(self, scheme: Measured) -> dict[str, Any]:
        worst = scheme.worst_layer
        return {
            **scheme.first.to_json(),
            "perplexity_change_percent": finite(self.change_percent(scheme.first)),
            "worst_layer": worst and {"name": worst[0], "relative_error": finite(worst[1])},
            "layer_errors": {name: finite(error) for name, error in scheme.layer_errors.items()},
            "runs": [run.to_json() for run in scheme.runs],
        }


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, which JSON cannot represent."""
    return value if math.isfinite(value) else None
