"""Text of the demonstration: Python's language reference, from ``pydoc_data.topics``, in disjoint parts.

Models are evaluated on its first tokens and calibrated on tokens from the middle.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epiloq.demo import DemoError

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 512


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of the text, used in independent windows."""

    first_token: int
    tokens: Tensor
    """int64 [n], on the CPU."""

    @property
    def windows(self) -> list[Tensor]:
        """The tokens as int64 [1, <= 512] windows; a last window of one token, which predicts nothing, is dropped."""
        starts = range(0, len(self.tokens) - 1, WINDOW)
        return [self.tokens[None, start : start + WINDOW] for start in starts]

    def describe(self) -> dict[str, int]:
        """First token, number of tokens and window length."""
        return {"first_token": self.first_token, "tokens": len(self.tokens), "window": WINDOW}


@dataclass(frozen=True)
class Text:
    """The two disjoint parts, and the source of the text."""

    source: str
    evaluation: Part
    calibration: Part

    def describe(self) -> dict[str, Any]:
        """Return source and use of each part, for the report."""
        return {
            "source": self.source,
            "evaluation": self.evaluation.describe(),
            "calibration": self.calibration.describe(),
        }


def read(tokenizer: Any, evaluation_tokens: int, calibration_tokens: int) -> Text:
    """Tokenise the text and cut the two parts. Raises DemoError if the text is too short."""
    from pydoc_data.topics import topics

    import torch

    tokens = torch.tensor(tokenizer("\n".join(topics.values()), verbose=False)["input_ids"], dtype=torch.int64)
    middle = max(len(tokens) // 2, evaluation_tokens)
    if middle + calibration_tokens > len(tokens):
        raise DemoError(
            f"the text has {len(tokens)} tokens: {evaluation_tokens} for evaluation and {calibration_tokens} for "
            "calibration do not fit; ask for fewer with --tokens"
        )
    return Text(
        source=f"pydoc_data.topics of Python {platform.python_version()}",
        evaluation=Part(0, tokens[:evaluation_tokens]),
        calibration=Part(middle, tokens[middle : middle + calibration_tokens]),
    )
