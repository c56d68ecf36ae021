"""Pages on a phone and on a desk: nothing leaves its card, a loss is not shown as a gain."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pytest

for needed in ("matplotlib", "jinja2", "PIL", "onnx", "transformers"):
    pytest.importorskip(needed, reason="the pages need the extras demo and vision")

from test_demo_command import made_up
from test_vision_demo import made_up as made_up_vision

from epiloq import pages
from epiloq.demo import report, results, speed
from epiloq.demo.vision import report as vision_report
from epiloq.demo.vision.figures import speeds as vision_speeds

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=2000"),
)
# What leaves its card or the window, by tag and text; a box that scrolls may hold wider things.
PROBE = """
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const found = [];
  if (page.documentElement.scrollWidth > page.documentElement.clientWidth) found.push("the window scrolls sideways");
  for (const card of page.querySelectorAll(".card, .panel")) {
    const edge = card.getBoundingClientRect().right;
    for (const inner of card.querySelectorAll("*:not(svg *)"))
      if (!inner.closest(".scroll") && inner.getBoundingClientRect().right > edge + 0.5) found.push(inner.tagName);
    const table = card.querySelector(".scroll");
    if (table && table.scrollWidth > table.clientWidth + 1) found.push("a table scrolls");
  }
  document.body.dataset.found = found.length ? found.join(", ") : "nothing";
});
"""


def language_page(prefill: float = 0.37) -> str:
    found = made_up(10.5, 10.2)
    runs = tuple(
        results.Run("cpu", dtype, 10.5, 10**8, speed.Speed(1240.5, 22.7, prefill, 1.52))
        for dtype in ("float32", "bfloat16")
    )
    name = "model.layers.11.a_block_of_experts_with_a_long_name.down_proj"
    return report.render(replace(found, schemes=(results.Measured("w8a8-int8-static", runs, {name: 0.1}),)))


PAGES = {"language": language_page, "vision": lambda: vision_report.render(made_up_vision())}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_no_content_overflows_its_card(name: str, width: int, tmp_path: Path) -> None:
    frame = f'<iframe style="width:{width}px;height:3000px;border:0" srcdoc="{escape(PAGES[name]())}"></iframe>'
    host = tmp_path / "host.html"
    host.write_text(f"<!doctype html><body>{frame}<script>{PROBE}</script></body>")
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,3000"]
    dom = subprocess.run([*command, "--dump-dom", host.as_uri()], capture_output=True, text=True, timeout=600).stdout
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None, dom[-2000:]
    assert unescape(found.group(1)) == "nothing"


@pytest.mark.parametrize(("prefill", "worse"), [(0.37, True), (1.2, False)])
def test_slower_headline_is_coloured_as_a_loss(prefill: float, worse: bool) -> None:
    page = language_page(prefill)
    assert (f'<b class="worse">{prefill:.2f}x</b>' in page) == worse


def test_costs_are_not_coloured_as_gains() -> None:
    """A higher perplexity and the error of a layer."""
    page = language_page()
    assert re.search(r'<b class="cost">\+[\d.]+ %</b>perplexity', page)
    assert re.search(r'<b class="cost">[\d.]+ %</b>worst layer', page)


def test_bars_show_the_ratios_of_the_table() -> None:
    found = made_up_vision()
    drawn = vision_speeds(found)
    for run in found.runs:
        assert f"{run.detector.speedup:.2f}x" in drawn and f"{run.recogniser.speedup:.2f}x" in drawn


def test_narrow_pages_have_one_column_of_settings() -> None:
    source = Path(pages.__file__).parent.parent / "quantize" / "report.html"
    narrow = re.search(r"@media \(max-width: 48rem\) \{ dl \{ grid-template-columns: ([^;]+);", source.read_text())
    assert narrow is not None and narrow.group(1) == "minmax(0, 1fr)"
