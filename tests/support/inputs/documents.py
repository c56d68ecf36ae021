"""What a Markdown page shows: fenced blocks, hidden test steps, links and headings.

A comment ``<!-- test: setup`` holds Python that prepares files for the page's blocks, and shares no names with them.
``<!-- test: run -->`` before a block of shell lines has its ``epiloq`` commands executed. ``<!-- test: check CODE -->``
sees the names that the blocks so far have made, and `error`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).parents[3]
# None outside the checkout, as in the bundle for a GPU machine.
PAGES = sorted(
    [
        *ROOT.glob("README.md"),
        *ROOT.glob("CONTRIBUTING.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
)
_FENCE = re.compile(r"^ *```(\S*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_HIDDEN = re.compile(r"^<!-- test: setup\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
_CHECK = re.compile(r"^<!-- test: check\s+(.*?)\s*-->$", re.DOTALL | re.MULTILINE)
_RUN = "<!-- test: run -->"


@dataclass(frozen=True)
class Block:
    """A fenced block, or a hidden one of language "setup" or "check"; ``line`` is that of its first line of text."""

    language: str
    text: str
    line: int
    is_run: bool = False


def blocks(page: Path) -> list[Block]:
    """In the page's order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in [*_FENCE.finditer(text), *_HIDDEN.finditer(text), *_CHECK.finditer(text)]:
        language = {_HIDDEN: "setup", _CHECK: "check"}.get(match.re) or match[1]
        code = match[2] if match.re is _FENCE else match[1]
        line = text[: match.start(2 if match.re is _FENCE else 1)].count("\n") + 1
        found.append(Block(language, code, line, text[: match.start()].rstrip().endswith(_RUN)))
    return sorted(found, key=lambda block: block.line)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each shell line: comments and `a && b` taken apart, environment variables left out."""
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        while "&&" in words:
            end = words.index("&&")
            yield words[:end]
            words = words[end + 1 :]
        if words:
            yield words


def anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Targets of links that are no addresses of the web."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]


def make_model_and_texts() -> None:
    """In this folder: MODEL, a small language model as Hugging Face directories are, text.txt and other.txt."""
    from command_line import WIDE
    from tiny_teacher import save, tiny_model

    save(Path("MODEL"), tiny_model(**WIDE))
    for name, step in (("text.txt", 7), ("other.txt", 11)):
        Path(name).write_text("".join(chr(97 + i * i * step % 26) for i in range(20000)))


def error(found: Tensor, expected: Tensor) -> float:
    """Of what a page computes: the difference's norm over that of the expected values."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
