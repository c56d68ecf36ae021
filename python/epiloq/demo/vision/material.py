"""Rendered words and pages for evaluation, and others with different words for calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from epiloq.demo.vision import drawing, ocr
from epiloq.demo.vision.drawing import Page

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

BATCH = 8
WORDS_A_PAGE = 28


@dataclass(frozen=True)
class Material:
    """Rendered text. Words are ordered by the width of their images, and batched."""

    words: tuple[str, ...]
    batches: tuple[Tensor, ...]
    pages: tuple[Page, ...]
    calibration_batches: tuple[Tensor, ...]
    calibration_pages: tuple[Page, ...]
    seed: int

    def describe(self) -> dict[str, int | str]:
        """Return the numbers of words and pages and the seed, for the report."""
        return {
            "source": "pydoc_data.topics",
            "seed": self.seed,
            "words": len(self.words),
            "pages": len(self.pages),
            "page_words": sum(len(page.words) for page in self.pages),
            "calibration_words": sum(len(batch) for batch in self.calibration_batches),
            "calibration_pages": len(self.calibration_pages),
        }


def draw(
    words: int = 200, pages: int = 8, calibration: int = 64, calibration_pages: int = 6, seed: int = 0
) -> Material:
    """Render all images; no calibration word is used for evaluation."""
    evaluated, other = drawing.split(
        drawing.vocabulary(), seed, words + pages * WORDS_A_PAGE, calibration + calibration_pages * WORDS_A_PAGE
    )
    random = Random(seed + 1)
    texts, batches = _batches(evaluated[:words], random)
    return Material(
        tuple(texts),
        tuple(batches),
        _pages(evaluated[words:], random),
        tuple(_batches(other[:calibration], random)[1]),
        _pages(other[calibration:], random),
        seed,
    )


def _batches(words: Sequence[str], random: Random) -> tuple[list[str], list[Tensor]]:
    drawn = [(word, drawing.draw_word(word, random)) for word in words]
    drawn.sort(key=lambda pair: pair[1].width / pair[1].height)
    images: list[Image] = [image for _, image in drawn]
    batches = [ocr.word_batch(images[start : start + BATCH]) for start in range(0, len(images), BATCH)]
    return [word for word, _ in drawn], batches


def _pages(words: Sequence[str], random: Random) -> tuple[Page, ...]:
    starts = range(0, len(words), WORDS_A_PAGE)
    return tuple(drawing.draw_page(words[start : start + WORDS_A_PAGE], random) for start in starts)
