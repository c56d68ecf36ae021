"""The demonstration of vision: drawing, variants, the page, the command; and the real networks."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

for needed in ("onnx", "PIL", "matplotlib", "jinja2", "typer", "rich"):
    pytest.importorskip(needed, reason="the demonstration of vision needs the extra vision")

import numpy as np
import torch
from torch import nn
from typer.testing import CliRunner

import epiloq
from epiloq.cli import demo_vision
from epiloq.cli.app import create_app
from epiloq.demo import DemoError, speed
from epiloq.demo.vision import drawing, figures, material, measure, networks, report
from epiloq.demo.vision.networks import Variant
from epiloq.demo.vision.results import Cost, Found, Results, Run
from epiloq.quantize.calibration.tally import unseen

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


# Drawing


def test_words_are_split_into_disjoint_parts() -> None:
    words = drawing.vocabulary()
    assert len(words) > 1000 and all(3 <= len(word) <= 12 for word in words)
    evaluated, calibrated = drawing.split(words, 5, 40, 30)
    assert (len(evaluated), len(calibrated)) == (40, 30) and not set(evaluated) & set(calibrated)
    assert drawing.split(words, 5, 40, 30) == (evaluated, calibrated)


def test_a_page_has_its_ink_in_its_boxes(random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "NOISE", 0)
    page = drawing.draw_page(drawing.split(drawing.vocabulary(), random.getrandbits(20), 28, 0)[0], random)
    assert page.image.size == (640, 480) and len(page.words) == len(page.boxes) > 5
    pixels = np.asarray(page.image).astype(int)
    inked = np.abs(pixels - pixels[0, 0]).sum(-1) > 60
    outside = inked.copy()
    for left, top, right, bottom in page.boxes:
        assert 0 <= left < right <= 640 and 0 <= top < bottom <= 480
        assert inked[top:bottom, left:right].any()
        outside[max(0, top - 2) : bottom + 2, left - 2 : right + 2] = False
    assert not outside.any()


def test_a_seed_draws_the_same_again() -> None:
    first, second = (drawing.draw_word("again", Random(3)) for _ in range(2))
    assert first.tobytes() == second.tobytes() and first.height > 20


def test_material_keeps_calibration_apart() -> None:
    drawn = material.draw(words=20, pages=1, calibration=9, calibration_pages=2, seed=4)
    assert [len(batch) for batch in drawn.batches] == [8, 8, 4]
    assert [len(batch) for batch in drawn.calibration_batches] == [8, 1]
    assert len(drawn.words) == 20 and len(drawn.calibration_pages) == 2
    assert not {*drawn.words, *drawn.pages[0].words} & {w for page in drawn.calibration_pages for w in page.words}
    assert drawn.describe()["calibration_words"] == 9


# Variants


class Small(nn.Module):
    """A convolution whose weights are on the 4-bit grid, one whose are not, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.easy, self.hard, self.linear = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 16, 3), nn.Linear(16, 32)
        with torch.no_grad():
            self.easy.weight.copy_(torch.randint(-7, 8, self.easy.weight.shape).float())
            self.easy.weight[:, 0], self.easy.weight[:, 1] = 7, -8  # a step is a 15th of the range

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.hard(self.easy(x).relu()).mean((2, 3)))
        return y


@torch.no_grad()
def test_convolutions_beyond_the_limit_take_the_other_scheme() -> None:
    model, samples = Small().eval(), [torch.randn(4, 32, 9, 9)]
    made = networks.quantise(model, Variant("mixed", "conv-w4a16", "w8a16", limit=0.02), samples)
    assert made.exceptions == ("hard",)
    assert made.network.get_submodule("easy").bits == 4
    assert made.network.get_submodule("hard").bits == 8
    assert isinstance(made.network.get_submodule("linear"), epiloq.nn.WeightOnlyLinear)
    assert set(made.errors) == {"easy", "hard", "linear"} and max(made.errors.values()) < 0.02
    assert isinstance(model.hard, nn.Conv2d)


@torch.no_grad()
def test_int8_layers_are_linked_beside_linear_ones() -> None:
    model, samples = Small().eval(), [torch.randn(4, 32, 9, 9)]
    made = networks.quantise(model, Variant("int8", "conv-w8a8-int8", "w8a8-int8"), samples)
    assert made.linked == 1 and made.exceptions == ()
    assert isinstance(made.network.get_submodule("linear"), epiloq.nn.Int8Linear)
    expected = model(samples[0])
    assert float((made.network(samples[0]) - expected).norm() / expected.norm()) < 0.1


# The page and the command


def made_up() -> Results:
    cost = Cost(1_000_000, 0.02, 1.5, {"conv<1>": 0.01, "conv2": math.nan}, 3, ("conv2",))
    whole = Cost(4_000_000, 0.03, 1.0, {})
    found = (Found((10, 20, 60, 40), "right & <b>"), Found((10, 60, 60, 80), "wrong"))
    runs = [Run("float", "cpu fp32", whole, whole, 1.0, 1.0, 1.0, 0.99, 0.9, found)]
    runs += [
        Run(variant.name, "cpu fp32", cost, cost, 0.97, 0.96, 0.98, 0.99, 0.9, found) for variant in networks.VARIANTS
    ]
    environment = {
        "epiloq": {"version": "1"},
        "torch": {"version": "2"},
        "python": "3",
        "cpu": {"name": "a & b", "torch_threads": 2, "vector_level": "v", "load_average": 0.5},
        "gpus": [],
    }
    drawn = material.draw(words=3, pages=1, calibration=2, calibration_pages=1).describe()
    return Results(tuple(runs), drawn, environment, 1.0, b"jpeg", (640, 480), ("right & <b>", "other"))


def test_the_page_shows_detections_and_every_form() -> None:
    page = report.render(made_up())
    assert page.count("data:image/jpeg;base64,") == 2
    assert page.count("right &amp; &lt;b&gt;</text>") == 2 and "<b>right" not in page
    assert page.count("stroke-dasharray=") >= 2  # the word that is not on the page, for both
    for variant in networks.VARIANTS:
        assert f"{variant.name}: convolutions {variant.convolutions}" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_what_was_read_is_shown_within_the_page() -> None:
    """Also of words at its edges, above or beside which there is no room."""
    results = made_up()
    width, height = results.page_size
    boxes = [(2, 0, 40, 20), (width - 30, 12, width, 40), (5, height - 20, 60, height), (10, 50, 60, 70)]
    found = tuple(Found(box, "a long word") for box in boxes)
    svg = figures.detections(results, replace(results.runs[0], first_page=found))
    filled = re.findall(r'<rect x="(-?\d+)" y="(-?\d+)" width="(\d+)" height="(\d+)" fill="#', svg)
    assert len(filled) == len(boxes)
    for x, y, w, h in (map(int, each) for each in filled):
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height


def test_figures_become_json_without_nan() -> None:
    written = json.loads(json.dumps(made_up().to_json(), allow_nan=False))
    assert [run["name"] for run in written["runs"]] == ["float", *(variant.name for variant in networks.VARIANTS)]
    assert written["runs"][1]["detector"]["errors"] == {"conv<1>": 0.01, "conv2": None}


def test_the_table_fits_80_columns() -> None:
    from rich.console import Console

    assert Console(width=200).measure(demo_vision.results_table(made_up())).maximum <= 80


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    found = CliRunner().invoke(create_app(), ["demo", "--vision", "--output", str(tmp_path)])
    assert found.exit_code == 1 and "pip install --no-deps rapidocr-onnxruntime" in found.output

    monkeypatch.setitem(demo_vision.REQUIRED, "no_such_module", "no-such-package")
    with pytest.raises(DemoError, match=r"no-such-package: pip install '\.\[vision\]' in epiloq's sources"):
        demo_vision.check_packages()


def test_the_command_refuses_options_of_the_other_demonstration() -> None:
    found = CliRunner().invoke(create_app(), ["demo", "--vision", "--schemes", "w8a8-int8"])
    assert found.exit_code == 2 and "--schemes" in found.output


# The real networks


def test_the_real_networks_read_in_int8(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Smaller than the demonstration, hence the wider bounds; on a GPU the float networks are in half precision."""
    try:
        networks.find(networks.DETECTOR)
    except DemoError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(speed, "BUDGET_S", 0)
    drawn = material.draw(words=16, pages=1, calibration=16, calibration_pages=1)
    whole, int8 = measure.measure([device], drawn, {}, unseen, networks.VARIANTS[:1]).runs
    exact = device == "cpu"
    assert min(whole.characters_equal, whole.map_iou) >= (1 if exact else 0.95)
    assert whole.characters_right > 0.9 and whole.page_words_right > 0.6
    assert int8.map_iou > 0.93 and int8.characters_equal > 0.9
    assert len(int8.detector.errors) == 64 and len(int8.recogniser.errors) == 38 + 9
    assert int8.detector.linked > 40 and int8.recogniser.linked > 28
    assert int8.weight_bytes < (0.3 if exact else 0.6) * whole.weight_bytes
