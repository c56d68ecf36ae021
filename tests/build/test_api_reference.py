"""The API reference builds without a warning: every type, class and page that it mentions is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import epiloq

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DOCS / "conf.py").exists(), reason="the documentation is in the checkout only"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "myst_parser", "furo", "transformers", "typer"):
        pytest.importorskip(package, reason="the reference needs the extra docs")
    out = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return out


def test_every_public_name_has_an_entry(built: Path) -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (built / "api").glob("*.html")}
    modules = {"compat", "formats", "nn", "quantize", "schemes", "__version__"}
    for name in set(epiloq.__all__) - modules:
        assert any(f'id="epiloq.{name}"' in text for text in pages.values()), name
    for name in epiloq.nn.__all__:
        assert f'id="epiloq.nn.{name}"' in pages["nn"], name


def test_every_header_is_listed() -> None:
    text = (DOCS / "api" / "cpp.md").read_text(encoding="utf-8")
    for header in (DOCS.parent / "include" / "epiloq").glob("*.h"):
        assert f"`epiloq/{header.name}`" in text, header.name
