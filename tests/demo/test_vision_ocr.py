"""What surrounds the networks of the demonstration of vision: images to tensors, maps to boxes, scores to text."""

from __future__ import annotations

from random import Random

import pytest

for needed in ("onnx", "PIL", "matplotlib", "jinja2", "typer", "rich"):
    pytest.importorskip(needed, reason="the demonstration of vision needs the extra vision")

import torch
from PIL import Image

from epiloq.demo.vision import ocr

pytestmark = pytest.mark.usefixtures("seed")


def test_a_page_becomes_a_tensor_of_multiples_of_32() -> None:
    image = Image.new("RGB", (33, 64), (255, 0, 128))
    x = ocr.page_tensor(image)
    assert x.shape == (1, 3, 64, 64)
    for channel, value in enumerate((128, 0, 255)):  # blue first
        assert float((x[0, channel] - (value / 127.5 - 1)).abs().max()) < 1e-6


def test_word_images_are_scaled_and_zero_padded() -> None:
    batch = ocr.word_batch([Image.new("RGB", (100, 24), "white"), Image.new("RGB", (50, 48), "black")])
    assert batch.shape == (2, 3, 48, 200)
    assert bool((batch[0] == 1).all() and (batch[1, :, :, :50] == -1).all() and (batch[1, :, :, 50:] == 0).all())


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        ([0, 1, 1, 0, 1, 2, 2], "aab"),
        ([1, 1, 1], "a"),
        ([0, 0], ""),
        ([], ""),
        ([3, 0, 3, 2, 0], "  b"),
    ],
)
def test_ctc_reads_each_run_once_and_no_blanks(classes: list[int], text: str) -> None:
    characters = ocr.alphabet({"character": "a\nb"})
    assert characters == ["", "a", "b", " "]
    scores = torch.rand(1, len(classes), 4)
    scores[0, range(len(classes)), classes] += 1
    assert ocr.read(scores, characters) == [text]


def test_map_iou() -> None:
    a, b = torch.zeros(4, 4), torch.zeros(4, 4)
    assert ocr.map_iou(a, b) == 1
    a[0], b[:, 0] = 0.31, 0.9
    assert ocr.map_iou(a, b) == pytest.approx(1 / 7)
    assert ocr.map_iou(a, torch.full((4, 4), 0.3)) == 0  # at the threshold is below it


def test_boxes_are_grown_parts_of_the_map() -> None:
    probabilities = torch.zeros(100, 200)
    probabilities[20:30, 40:100] = 0.9
    probabilities[60:70, 10:30] = 0.9  # this and the next touch at a corner alone
    probabilities[70:72, 30:34] = 0.9
    probabilities[90:92, 100:150] = 0.9  # too thin
    probabilities[50:60, 150:190] = 0.4  # too faint
    probabilities[0:9, 195:200] = 0.9  # at the edge
    grow = round(1.6 * 60 * 10 / 140)
    assert ocr.boxes(probabilities) == [
        (195 - 3, 0, 200, 12),
        (40 - grow, 20 - grow, 100 + grow, 30 + grow),
        (10 - 6, 60 - 6, 34 + 6, 72 + 6),
    ]


def test_parts_are_joined_below_a_gap(seed: int) -> None:
    """A shape like a U is one part though its arms meet only at the end; random maps against flooding."""
    random = Random(seed)
    rows = [[random.random() < 0.45 for _ in range(17)] for _ in range(13)]
    rows[0][:3], rows[1][:3] = [True, False, True], [True, True, True]
    left = {(y, x) for y, row in enumerate(rows) for x, value in enumerate(row) if value}
    expected = []
    while left:
        part = [left.pop()]
        for y, x in part:
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            part += near
        ys, xs = zip(*part, strict=True)
        expected.append((min(xs), min(ys), max(xs) + 1, max(ys) + 1))
    assert sorted(ocr._parts(rows)) == sorted(expected)


@pytest.mark.parametrize(
    ("a", "b", "count"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2), ("flaw", "lawn", 2)]
)
def test_edits(a: str, b: str, count: int) -> None:
    assert ocr.edits(a, b) == ocr.edits(b, a) == count


def test_agreement_is_by_characters() -> None:
    assert ocr.agreement(["abcd", "xy"], ["abcd", "xyzuvw"]) == pytest.approx(0.6)
    assert ocr.agreement(["aaaaaaaa"], ["b"]) == 0
    assert ocr.agreement([], []) == 1
