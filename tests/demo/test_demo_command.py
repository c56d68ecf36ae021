"""The demonstration's command: its files, its page, and what it says to bad arguments."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

for needed in ("typer", "rich", "transformers", "tokenizers", "matplotlib", "jinja2"):
    pytest.importorskip(needed, reason="the demonstration needs the extra demo")

from typer.testing import CliRunner, Result

import epiloq
import tiny_teacher
from epiloq import schemes
from epiloq.cli import app
from epiloq.cli import demo as command
from epiloq.cli.output import write_json
from epiloq.demo import report, results, speed, teacher

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_teacher.save(tmp_path_factory.mktemp("tiny"))


# Results and the page


def made_up(*perplexities: float, errors: dict[str, float] | None = None) -> results.Results:
    def run(value: float) -> results.Run:
        return results.Run("cpu", "float32", value, 10**8, speed.Speed(1234.5, 56.7, 1.9, 1.2))

    found = errors if errors is not None else {"layers.0.a<b>": 0.01, "layers.1.down": 0.3}
    return results.Results(
        teacher=results.Measured("teacher", (run(10.0), run(10.1)), {}),
        schemes=tuple(results.Measured(f"scheme-{i}", (run(v),), found) for i, v in enumerate(perplexities)),
        model={"name": "a <model> & more", "architecture": "X", "parameters": 10**6},
        text={
            "source": "somewhere",
            "evaluation": {"first_token": 0, "tokens": 100, "window": 50},
            "calibration": {"first_token": 200, "tokens": 100, "window": 50},
        },
        environment={
            "epiloq": {"version": "1"},
            "torch": {"version": "2"},
            "python": "3",
            "cpu": {"name": "c", "torch_threads": 2, "vector_level": "v", "load_average": 0.5},
            "gpus": [],
        },
        seconds=1.0,
    )


def test_best_scheme_and_worst_layer_treat_nan_as_worst() -> None:
    assert made_up(math.nan, 11.0, 10.5).best_scheme.name == "scheme-2"
    assert made_up(10.5, errors={"a": 0.3, "b": math.nan}).schemes[0].worst_layer[0] == "b"  # type: ignore[index]


def test_json_holds_the_figures_and_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "figures.json", made_up(math.inf, 10.5).to_json())
    read = json.loads((tmp_path / "figures.json").read_text())
    assert read["teacher"]["perplexity"] == 10.0
    assert read["schemes"]["scheme-0"]["perplexity"] is None
    assert read["schemes"]["scheme-1"]["perplexity_change_percent"] == pytest.approx(5.0)
    assert read["schemes"]["scheme-1"]["worst_layer"] == {"name": "layers.1.down", "relative_error": 0.3}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


class Outline(HTMLParser):
    """Counts elements, and checks that each is closed in turn."""

    VOID = ("meta", "link", "br", "img", "input", "wbr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("perplexities", [(10.5,), (10.2, 10.3, 12.0, 40.0, 11.0, 10.9, 11.2), (math.nan, 10.5)])
def test_page_is_whole_and_needs_no_network(perplexities: tuple[float, ...]) -> None:
    page = report.render(made_up(*perplexities))
    seen = Outline(page).seen
    assert seen.count("svg") == 2
    assert seen.count("tr") == 1 + 2 + len(perplexities)
    assert not {"script", "link", "img", "iframe"} & set(seen)
    assert "http" not in page
    assert "a &lt;model&gt; &amp; more" in page
    assert "a<b>" not in page


# The command


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app.create_app(), ["demo", *arguments])


@pytest.mark.slow
def test_command_measures_every_scheme(folder: Path, tmp_path: Path) -> None:
    output, figures = tmp_path / "new" / "folder", tmp_path / "figures.json"
    result = invoke(
        *("--teacher", str(folder), "--output", str(output), "--json", str(figures), "--tokens", "600"),
        *("--device", "cpu"),
    )
    assert result.exit_code == 0, result.output
    read = json.loads(figures.read_text())
    assert tuple(read["schemes"]) == schemes.available()
    for model in (read["teacher"], *read["schemes"].values()):
        assert [run["dtype"] for run in model["runs"]] == ["float32", "bfloat16"]
    for name, scheme in read["schemes"].items():
        assert scheme["perplexity"] == pytest.approx(read["teacher"]["perplexity"], rel=0.1)
        assert scheme["weight_bytes"] < read["teacher"]["weight_bytes"]
        assert scheme["prefill_tokens_per_s"] > 0
        assert scheme["decode_tokens_per_s"] > 0
        assert scheme["worst_layer"]["relative_error"] == max(scheme["layer_errors"].values())
        assert name in result.output
    assert read["environment"]["epiloq"]["version"] == epiloq.__version__
    assert read["text"]["evaluation"]["tokens"] == 600
    assert [path.name for path in output.iterdir()] == ["report.html"]
    assert folder.name in (output / "report.html").read_text()


@pytest.mark.gpu
def test_command_measures_on_the_gpu(folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = invoke(
        *("--teacher", str(folder), "--output", str(tmp_path), "--json", str(figures), "--tokens", "600"),
        *("--device", "cuda"),
    )
    assert result.exit_code == 0, result.output
    read = json.loads(figures.read_text())
    for scheme in read["schemes"].values():
        assert [run["device"] for run in scheme["runs"]] == ["cuda"]
        assert scheme["perplexity"] == pytest.approx(read["teacher"]["perplexity"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--schemes", "w8a8-int8,w9a9"], "w9a9"),
        (["--schemes", ""], "--schemes"),
        (["--tokens", "1"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--device", "tpu"], "--device"),
        (["--json", "absent/figures.json"], "--json"),
        (["--json", "."], "--json"),
        (["--teacher", "absent"], "--teacher"),
        (["--teacher", "."], "--teacher"),
        (["--output", "file"], "--output"),
    ],
)
def test_bad_arguments_exit_2_and_change_nothing(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "file").write_text("kept")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert complaint in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_absent_teacher_exits_1_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(teacher, "PACKAGE", "no-such-package-at-all")
    monkeypatch.setattr(command, "REQUIRED_TO_CONVERT", ())
    result = invoke()
    assert result.exit_code == 1
    assert teacher.INSTALL in result.output
    assert list(tmp_path.iterdir()) == []


def test_absent_package_exits_1_and_changes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "REQUIRED", ("rich", "no_such_module_at_all"))
    result = invoke("--teacher", str(folder))
    assert result.exit_code == 1
    assert "no_such_module_at_all" in result.output
    assert "pip install '.[demo]'" in result.output
    assert list(tmp_path.iterdir()) == []
