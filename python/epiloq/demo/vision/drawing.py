"""Images of text rendered with matplotlib's fonts: single words, and pages of words with their boxes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; right and bottom are exclusive."""

FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")
SHORTEST, LONGEST = 3, 12
NOISE = 6
"""Standard deviation of the noise, in units of 1/255."""


@dataclass(frozen=True)
class Page:
    """An image of words, with the words and their boxes."""

    image: Image
    words: tuple[str, ...]
    boxes: tuple[Box, ...]


def vocabulary() -> list[str]:
    """Return the sorted words of Python's language reference, including numbers."""
    from pydoc_data.topics import topics

    found = {word for text in topics.values() for word in re.findall(r"[A-Za-z0-9_'.-]+", text)}
    plain = {word.strip("'.-_") for word in found}
    return sorted(word for word in plain if SHORTEST <= len(word) <= LONGEST)


def split(words: Sequence[str], seed: int, evaluated: int, calibrated: int) -> tuple[list[str], list[str]]:
    """Draw disjoint random words for evaluation and for calibration."""
    chosen = Random(seed).sample(words, evaluated + calibrated)
    return chosen[:evaluated], chosen[evaluated:]


def draw_word(word: str, random: Random) -> Image:
    """Render a single word with a narrow margin, as a detector would crop it."""
    from PIL import Image, ImageDraw

    face = font(random, random.randint(24, 44))
    left, top, right, bottom = face.getbbox(word)
    margins = [random.randint(2, 7) for _ in range(4)]
    size = (round(right - left) + margins[0] + margins[2], round(bottom - top) + margins[1] + margins[3])
    paper, ink = _colours(random)
    image = Image.new("RGB", size, paper)
    ImageDraw.Draw(image).text((margins[0] - left, margins[1] - top), word, fill=ink, font=face)
    return _noisy(image, random)


def draw_page(words: Sequence[str], random: Random) -> Page:
    """Render lines of as many of the words as fit, each in its own font and size."""
    from PIL import Image, ImageDraw

    width, height = size = (640, 480)
    paper, _ = _colours(random)
    image = Image.new("RGB", size, paper)
    pen = ImageDraw.Draw(image)
    placed: list[tuple[str, Box]] = []
    x, y = random.randint(10, 60), 12
    for word in words:
        face = font(random, random.randint(18, 38))
        left, top, right, bottom = (round(edge) for edge in face.getbbox(word))
        if x + right - left > width - 10:
            x, y = random.randint(10, 60), y + random.randint(58, 76)
        if y + 50 > height:
            break
        pen.text((x - left, y), word, fill=_ink_on(paper, random), font=face)
        placed.append((word, (x, y + top, x + right - left, y + bottom)))
        x += right - left + random.randint(40, 90)
    return Page(_noisy(image, random), tuple(word for word, _ in placed), tuple(box for _, box in placed))


def font(random: Random, size: int) -> FreeTypeFont:
    """Choose one of FONTS, at a size in pixels."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / random.choice(FONTS), size)


def _colours(random: Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Choose a light or dark paper colour, and an ink colour of sufficient contrast."""
    light = random.random() < 0.7
    low, high = (190, 255) if light else (0, 70)
    paper = (random.randint(low, high), random.randint(low, high), random.randint(low, high))
    return paper, _ink_on(paper, random)


def _ink_on(paper: tuple[int, int, int], random: Random) -> tuple[int, int, int]:
    low, high = (0, 90) if sum(paper) > 3 * 128 else (165, 255)
    return random.randint(low, high), random.randint(low, high), random.randint(low, high)


def _noisy(image: Image, random: Random) -> Image:
    import numpy as np
    from PIL import Image as images

    noise = np.random.default_rng(random.getrandbits(32)).normal(0, NOISE, (image.height, image.width, 3))
    return images.fromarray(np.clip(np.asarray(image) + noise, 0, 255).round().astype(np.uint8))
