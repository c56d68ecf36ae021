"""Pre- and postprocessing of PP-OCRv4's networks: images to tensors, maps to boxes, probabilities to text, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from epiloq.demo.vision.drawing import Box

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# Values from PP-OCRv4's configuration.
MAP_THRESHOLD = 0.3
BOX_THRESHOLD = 0.5
UNCLIP = 1.6
WORD_HEIGHT = 48
SMALLEST_SIDE = 3
DETECTOR_MULTIPLE = 32


def page_tensor(image: Image) -> Tensor:
    """Convert to float32 [1, 3, H, W] in [-1, 1], padded to multiples of 32 by repeating edge pixels."""
    import torch

    pixels = _pixels(image)
    pads = [-size % DETECTOR_MULTIPLE for size in pixels.shape[:0:-1]]
    return torch.nn.functional.pad(pixels[None], (0, pads[0], 0, pads[1]), mode="replicate")


def word_batch(images: Sequence[Image]) -> Tensor:
    """Convert to float32 [B, 3, 48, W] in [-1, 1]: images are scaled to that height and zero-padded on the right."""
    import torch

    scaled = [image.resize((max(1, round(image.width * WORD_HEIGHT / image.height)), WORD_HEIGHT)) for image in images]
    batch = torch.zeros(len(images), 3, WORD_HEIGHT, max(image.width for image in scaled))
    for row, image in zip(batch, scaled, strict=True):
        row[:, :, : image.width] = _pixels(image)
    return batch


def _pixels(image: Image) -> Tensor:
    """Convert to float32 [3, H, W] in [-1, 1], in BGR order as in training."""
    import numpy as np
    import torch

    colours = torch.from_numpy(np.asarray(image.convert("RGB")).copy())
    return colours.flip(-1).permute(2, 0, 1).float() / 127.5 - 1


def alphabet(metadata: dict[str, str]) -> list[str]:
    """Return the recogniser's classes: the CTC blank, the characters listed in its file, and a space."""
    return ["", *metadata["character"].splitlines(), " "]


def read(probabilities: Tensor, characters: Sequence[str]) -> list[str]:
    """Decode [B, T, C] by greedy CTC: the likeliest classes, without repetitions and blanks (class 0)."""
    texts = []
    for classes in probabilities.argmax(-1).tolist():
        before = [0, *classes]
        texts.append("".join(characters[now] for last, now in zip(before, classes, strict=False) if now != last))
    return texts


def map_iou(a: Tensor, b: Tensor) -> float:
    """Intersection over union of two probability maps above MAP_THRESHOLD; 1 if both are empty."""
    first, second = a > MAP_THRESHOLD, b > MAP_THRESHOLD
    union = int((first | second).sum())
    return int((first & second).sum()) / union if union else 1.0


def boxes(probabilities: Tensor) -> list[Box]:
    """Return axis-aligned boxes of text in a map [H, W], from top to bottom.

    Each is the bounding box of a connected component of the map above MAP_THRESHOLD with a mean of at least
    BOX_THRESHOLD, enlarged by UNCLIP times area over perimeter, because the network is trained on shrunken words.
    """
    height, width = probabilities.shape
    found = []
    for left, top, right, bottom in _parts((probabilities > MAP_THRESHOLD).tolist()):
        w, h = right - left, bottom - top
        if min(w, h) < SMALLEST_SIDE or float(probabilities[top:bottom, left:right].mean()) < BOX_THRESHOLD:
            continue
        grow = round(UNCLIP * w * h / (2 * (w + h)))
        found.append((max(0, left - grow), max(0, top - grow), min(width, right + grow), min(height, bottom + grow)))
    return sorted(found, key=lambda box: (box[1], box[0]))


def _parts(rows: Sequence[Sequence[bool]]) -> Iterable[Box]:
    """Bounding boxes of 8-connected components, found by joining runs of each row to those of the row above."""
    parents: list[int] = []
    frames: list[list[int]] = []

    def root(index: int) -> int:
        while parents[index] != index:
            index = parents[index]
        return index

    above: list[tuple[int, int, int]] = []
    for y, row in enumerate(rows):
        here = []
        for start, end in _runs(row):
            own = len(parents)
            parents.append(own)
            frames.append([start, y, end, y + 1])
            for other_start, other_end, other in above:
                if other_start <= end and start <= other_end:
                    parents[root(other)] = root(own)
            here.append((start, end, own))
        above = here
    joined: dict[int, Box] = {}
    for index, (left, top, right, bottom) in enumerate(frames):
        a, b, c, d = joined.get(root(index), (left, top, right, bottom))
        joined[root(index)] = (min(a, left), min(b, top), max(c, right), max(d, bottom))
    return joined.values()


def _runs(row: Sequence[bool]) -> Iterable[tuple[int, int]]:
    """Yield begin and (exclusive) end of each run of true values."""
    start = None
    for x, value in enumerate([*row, False]):
        if value and start is None:
            start = x
        elif not value and start is not None:
            yield start, x
            start = None


def edits(a: str, b: str) -> int:
    """Levenshtein distance: the fewest insertions, deletions and replacements of characters between two texts."""
    costs = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, costs[0] = costs[0], i
        for j, right in enumerate(b, 1):
            diagonal, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, diagonal + (left != right))
    return costs[-1]


def agreement(texts: Sequence[str], expected: Sequence[str]) -> float:
    """Fraction of the expected characters that were read: 1 - edits / characters, at least 0."""
    wrong = sum(edits(text, wanted) for text, wanted in zip(texts, expected, strict=True))
    return max(0.0, 1 - wrong / max(1, sum(map(len, expected))))
