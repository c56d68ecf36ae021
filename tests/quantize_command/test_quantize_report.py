"""The page of ``epiloq quantize``: asks nothing of the network, says what the figures say, reads well to a machine."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers", "matplotlib", "jinja2"):
    pytest.importorskip(needed, reason="the report needs the extra demo")


from command_line import ROUND, letters, run
from epiloq.environment import counted
from epiloq.quantize import Grid, QuantizedWeight, figures, report
from epiloq.quantize.calibration.tally import HIGHEST, LOWEST, Tally
from epiloq.quantize.calibration.work import Block
from tiny_teacher import save, tiny_model

pytestmark = pytest.mark.usefixtures("pictures")


@pytest.fixture(scope="module")
def made(pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model with everything that a report can show."""
    folder = tmp_path_factory.mktemp("report")
    save(folder / "model", tiny_model(**ROUND))
    (folder / "text").write_text(letters(1500))
    (folder / "other").write_text(letters(1300, 3, 25))
    options = ("--scheme", "w8a8-int8-static", "--algorithm", "smoothquant", "--keep-dynamic", "*.0.mlp.down_proj")
    texts = ("--calibration", folder / "text", "--evaluation", folder / "other", "--windows", 8, "--length", 32)
    files = ("--output", folder / "out", "--json", folder / "r.json", "--report", folder / "copy.html")
    result = run("quantize", folder / "model", *options, *texts, *files)
    assert result.exit_code == 0, result.output
    return folder


def found(made: Path) -> dict[str, Any]:
    return json.loads((made / "r.json").read_text())  # type: ignore[no-any-return]


class Outline(HTMLParser):
    """What of a page matters here."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        values = dict(attrs)
        self.ids.update([values["id"] or ""] if "id" in values else [])
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "srcset")]
        self.pictures += [values] if tag == "svg" else []

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_stands_alone(made: Path) -> None:
    html = (made / "out" / "report.html").read_text()
    assert html == (made / "copy.html").read_text()
    page = Outline(html)
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!['\"]?#)", html)
    used = {link[1:] for link in page.links} | set(re.findall(r"url\(['\"]?#(\w+)", html))
    assert used <= set(page.ids)


def test_the_page_reads_well_to_a_machine(made: Path) -> None:
    html = (made / "out" / "report.html").read_text()
    page = Outline(html)
    assert '<html lang="en">' in html and page.tags["h1"] == 1 and "<title>epiloq: model as w8a8-int8-static" in html
    assert len(page.pictures) == 6
    labels = [picture["aria-label"] for picture in page.pictures]
    assert all(picture["role"] == "img" for picture in page.pictures) and all(labels) and len(set(labels)) == 6
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html
    assert "currentColor" in html and figures.COLOURS[0] in html


def test_the_page_says_what_was_found(made: Path) -> None:
    page, message = Outline((made / "out" / "report.html").read_text()), found(made)
    assert message["perplexity"]["tokens"] == 1300 and message["perplexity"]["window"] == 512
    for expected in (
        f"{message['perplexity']['before']:.3f} to {message['perplexity']['after']:.3f}",
        max(message["layer_errors"], key=message["layer_errors"].get),
        "*.0.mlp.down_proj",
        str(made / "text"),
        message["environment"]["versions"],
    ):
        assert expected in page.words
    assert set(message["stages"]) == {"load", "evaluate before", "quantise", "write", "evaluate after"}
    assert sum(message["stages"].values()) <= message["seconds"] * 1.001
    kept = [name for name, errors in message["input_errors"].items() if errors["kept_dynamic"]]
    assert kept == ["model.layers.0.mlp.down_proj"] and set(message["input_errors"]) == set(message["layer_errors"])
    assert sum(message["scales"]["counts"]) == 2 * (2 * 64 + 2 * 16 + 2 * 96 + 64)  # A scale for each output channel.


def test_eval_prints_the_same_perplexity(made: Path) -> None:
    result = run("eval", made / "out", "--text", made / "other", "--json", made / "e.json")
    assert result.exit_code == 0, result.output
    measured = json.loads((made / "e.json").read_text())["perplexity"]
    assert found(made)["perplexity"]["after"] == pytest.approx(measured, rel=1e-6)


def test_names_wrap_after_dots(made: Path) -> None:
    assert "model.<wbr>layers.<wbr>0.<wbr>" in report.render(found(made))


@pytest.mark.parametrize(
    ("head", "embedding", "expected"),
    [
        (None, None, "Norms, routers, embeddings and the output head stay"),
        ("w8a16", None, "Norms, routers and embeddings stay"),
        ("w8a16", "w8a16", "Norms and routers stay"),
    ],
)
def test_quantised_vocabulary_is_not_called_float(
    made: Path, head: str | None, embedding: str | None, expected: str
) -> None:
    message = found(made) | {"vocabulary": {"head": head, "embedding": embedding, "kl": None}}
    assert expected in Outline(report.render(message)).words


def test_counts_agree_with_their_nouns(made: Path) -> None:
    assert (counted(1, "file"), counted(2, "file")) == ("1 file", "2 files")
    assert " and 1 file, " in run("inspect", made / "out").output


def test_settings_are_words(made: Path) -> None:
    message = found(made) | {"scheme": "w4a16-g32", "calibration_tokens": 0, "symmetric": False}
    shown = report.settings(message)
    assert shown["symmetric weights"] == "no" and shown["calibrated on"] == "no text"
    assert report.settings(found(made))["seed"] == "0"


def test_settings_without_effect_are_left_out(made: Path) -> None:
    """A page of symmetric weights must not say that they are not, because nobody gave --symmetric."""
    rounded = found(made) | {"algorithm": "rtn", "calibration_tokens": 0, "symmetric": False, "budget": None}
    shown = report.settings(rounded | {"scheme": "w8a8-int8"})
    assert shown["symmetric weights"] == "yes"
    assert shown.keys().isdisjoint({"alpha", "seed", "windows at most", "tokens in a window", "keep dynamic"})
    assert "symmetric weights" not in report.settings(rounded | {"scheme": "fp8-token"})
    assert report.settings(rounded | {"scheme": "w4a16-g32", "symmetric": True})["symmetric weights"] == "yes"
    static = {"scheme": "w8a8-int8-static", "algorithm": "smoothquant", "calibration_tokens": 512}
    assert {"alpha", "seed", "keep dynamic", "windows at most"} <= report.settings(rounded | static).keys()
    assert "slices of output rows" not in report.settings(rounded | static)
    guided = {"scheme": "w4a16-g32", "algorithm": "awq+gptq-guided", "slices": 3}
    assert report.settings(rounded | guided)["slices of output rows"] == "3"


def test_names_cannot_break_the_page(made: Path) -> None:
    message = found(made)
    hostile = '<script>alert("1")</script>'
    message |= {"model": hostile, "command": hostile, "layer_errors": {f"layers.{i}.{hostile}": 0.1 for i in range(3)}}
    html = report.render(message)
    assert hostile not in html and Outline(html).tags["script"] == 0


@pytest.mark.filterwarnings("error")
def test_a_page_without_errors(made: Path) -> None:
    """As of a model whose weights lie on the grid already."""
    message = found(made)
    message |= {"layer_errors": dict.fromkeys(message["layer_errors"], 0.0), "input_errors": {}}
    assert Outline(report.render(message)).pictures


def test_a_page_of_the_simplest_run(made: Path, tmp_path: Path) -> None:
    options = ("--scheme", "w4a16-g32", "--algorithm", "rtn", "--output", tmp_path / "out", "--json", tmp_path / "r")
    result = run("quantize", made / "model", *options)
    assert result.exit_code == 0 and "its weight has a relative error of" in result.output
    message = json.loads((tmp_path / "r").read_text())
    assert message["perplexity"] is None and message["input_errors"] == {} and message["error_of"] == "weight"
    assert len(Outline((tmp_path / "out" / "report.html").read_text()).pictures) == 4


def test_without_its_packages_there_is_no_page(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "REQUIRED", ("a_package_that_is_not_there",))
    options = ("--scheme", "w8a16", "--algorithm", "rtn", "--output", tmp_path / "out")
    result = run("quantize", made / "model", *options)
    assert result.exit_code == 0 and "a_package_that_is_not_there" in result.output
    assert not (tmp_path / "out" / "report.html").exists()
    refused = run("quantize", made / "model", *options[:-1], tmp_path / "two", "--report", tmp_path / "r.html")
    assert refused.exit_code == 1 and "a_package_that_is_not_there" in refused.output
    assert not (tmp_path / "two").exists()


def test_scales_are_counted_by_size(seed: int) -> None:
    scale = torch.exp2(torch.empty(7, 30).uniform_(-20, 3))
    scale[0, :2] = torch.tensor([2.0**-60, 2.0**60])
    weight = QuantizedWeight(torch.zeros(7, 60, dtype=torch.int8), scale, None, Grid(8, 2, True))
    tally = Tally()
    for name in "ab":
        tally.add(Block(name, {f"{name}.x": weight}, {}, {f"{name}.x": 0.5}), resumed=name == "b")
    histogram = tally.histogram
    edges, counts = histogram["log2_edges"], histogram["counts"]
    assert len(edges) == len(counts) + 1 and (edges[0], edges[-1]) == (LOWEST, HIGHEST) and sum(counts) == 420
    values = scale.double().log2().clamp(LOWEST, HIGHEST).flatten().tolist()
    expected = [2 * sum(low <= v < high for v in values) for low, high in pairwise(edges)]
    expected[-1] += 2 * values.count(HIGHEST)
    assert counts == expected
    assert tally.blocks == ["a", "b"] and tally.resumed == 1


def test_narrow_ranges_of_scales_have_labels_with_room() -> None:
    """Within one decade the labels of major and minor ticks would overlap."""
    svg = figures.scales({"scales": {"counts": [1, 5, 2], "log2_edges": [-5.5, -4.5, -3.5, -2.5]}})
    labels = re.findall(r"<!-- \$\\mathdefault\{(.*)\}\$ -->", svg)
    assert [label for label in labels if "^" in label] == ["2^{-5}", "2^{-4}", "2^{-3}"]


@pytest.mark.parametrize("low", [0.005, 0.0031, 0.002, 0.00017, 0.0178])
def test_errors_can_be_read_over_their_whole_range(low: float) -> None:
    """Labels are at both ends, with the same distances or at 1, 2 and 5."""
    svg = figures.layer_errors({"layer_errors": {"m.layers.0.up": low, "m.layers.1.up": 0.0178}})
    labels = [float(label) / 100 for label in re.findall(r">([\d.]+) %<", svg)]
    gap = 1.3 if 8 * low > 0.0178 else 2.5
    assert 3 <= len(labels) <= 12 and labels[0] < gap * low and labels[-1] > 0.0178 / gap


@pytest.mark.parametrize("last", [0, 1, 3, 40])
def test_blocks_are_counted_in_whole_numbers(last: int) -> None:
    """A model of one block, too."""
    svg = figures.layer_errors({"layer_errors": {f"m.layers.{block}.up": 0.01 for block in {0, last}}})
    labels = [float(label) for label in re.findall(r">([\d.]+)<", svg)]
    assert set(labels) >= {0} and all(label.is_integer() for label in labels) and max(labels) <= last


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m.layers.0.mlp.up", "m.layers.1.mlp.up", "m.layers.0.q"], {"up", "q"}),
        (["h.0.attention.output.dense", "h.0.intermediate.dense"], {"attention.output.dense", "intermediate.dense"}),
        (["alone"], {"alone"}),
    ],
)
def test_layers_are_grouped_by_kind(names: list[str], expected: set[str]) -> None:
    found = figures.kinds(names)
    assert set(found) == expected and sorted(name for same in found.values() for name in same) == sorted(names)
