"""The documentation is right: its Python runs, commands and options exist, links have targets."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import documents

pytestmark = pytest.mark.skipif(not documents.PAGES, reason="the documentation is in the checkout only")
LANGUAGES = {"", "python", "sh", "cmake", "cpp", "json", "text", "setup", "check"}


def identity(page: Path) -> str:
    return str(page.relative_to(documents.ROOT))


every_page = pytest.mark.parametrize("page", documents.PAGES, ids=identity)
with_python = pytest.mark.parametrize(
    "page",
    [page for page in documents.PAGES if any(block.language == "python" for block in documents.blocks(page))],
    ids=identity,
)


@with_python
@pytest.mark.filterwarnings("error:.*past_key_values.* is deprecated:FutureWarning")
def test_blocks_run_in_order_as_they_stand(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epiloq_in_transformers: None
) -> None:
    """In one namespace, which hidden steps do not share: what a reader copies is all there is."""
    from command_line import run

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shown: dict[str, Any] = {"__name__": "__main__"}
    for block in documents.blocks(page):
        if block.language in ("python", "setup", "check"):
            code = compile("\n" * (block.line - 1) + block.text, identity(page), "exec")
            names = {"python": shown, "check": shown | {"error": documents.error}, "setup": {}}[block.language]
            exec(code, names)
        elif block.is_run:
            for program, *arguments in documents.commands(block):
                if program == "epiloq":
                    result = run(*arguments)
                    assert result.exit_code == 0, (arguments, result.output)


@every_page
def test_blocks_are_of_known_languages(page: Path) -> None:
    assert {block.language for block in documents.blocks(page)} <= LANGUAGES


@every_page
def test_checks_assert(page: Path) -> None:
    """A hidden check that only computes a value cannot fail."""
    for block in documents.blocks(page):
        if block.language == "check":
            assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(block.text))), block


@every_page
def test_lines_are_not_written_twice(page: Path) -> None:
    """A line that begins like its neighbour is what an edit has left behind; tables and code may."""
    lines = re.sub(r"```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE).splitlines()
    prose = [line for line in lines if not line.startswith(("|", "    "))]
    assert not [line for line, following in pairwise(prose) if line[:30] == following[:30] and len(line) > 30]


def check_epiloq(arguments: list[str]) -> None:
    """The command exists, takes these options and as many arguments."""
    typer_main = pytest.importorskip("typer.main")
    from epiloq.cli import app

    group = typer_main.get_command(app.create_app())
    if not arguments or arguments[0].startswith("-"):
        return
    command = group.get_command(None, arguments[0])
    assert command is not None, arguments
    with command.context_class(command, info_name=arguments[0]) as context:
        _, left, _ = command.make_parser(context).parse_args(args=arguments[1:])
    assert not left, (arguments, left)


def check_make(arguments: list[str]) -> None:
    makefile = (documents.ROOT / "Makefile").read_text(encoding="utf-8")
    for target in arguments:
        assert "=" in target or re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


def check_pip(arguments: list[str]) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")
    extras = tomllib.loads((documents.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for word in arguments:
        assert not re.match(r"epiloq\b", word), f"{word}: epiloq is on no index; install from the sources"
        if found := re.fullmatch(r"\.\[([\w,-]+)\]", word):
            assert set(found[1].split(",")) <= extras.keys(), word


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m" and arguments[1] == "epiloq":
        assert arguments[2:] in (["--cmake-dir"], ["--include-dir"])
    elif not arguments[0].startswith("-"):
        assert (documents.ROOT / arguments[0]).exists(), arguments


def check_torchrun(arguments: list[str]) -> None:
    """What it starts is an `epiloq` command; options before `-m` are torchrun's."""
    module = arguments.index("-m")
    assert arguments[module + 1] == "epiloq", arguments
    check_epiloq(arguments[module + 2 :])


CHECKS = {
    "epiloq": check_epiloq,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
}
OTHER_PROGRAMS = {"cd", "git"}


@every_page
def test_commands_and_options_exist(page: Path) -> None:
    for block in documents.blocks(page):
        if block.language == "sh":
            for program, *arguments in documents.commands(block):
                assert program in CHECKS or program in OTHER_PROGRAMS, f"nothing checks commands of {program}"
                if program in CHECKS:
                    CHECKS[program](arguments)


@every_page
def test_links_have_targets(page: Path) -> None:
    for target in documents.links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in documents.anchors(file), target


@every_page
def test_what_a_colon_announces_follows(page: Path) -> None:
    """A heading after a colon is the rest of a section that was written anew elsewhere."""
    assert not re.search(r":\n+#+ ", page.read_text(encoding="utf-8"))


def test_nobody_is_sent_to_an_index() -> None:
    """epiloq is on no package index: texts say `pip install '.[extra]'`."""
    for page in (
        *documents.PAGES,
        *(documents.ROOT / "python").rglob("*.py"),
        *(documents.ROOT / "examples").glob("*"),
    ):
        if page.is_file():
            assert not re.search(r"pip install ['\"]?epiloq\b", page.read_text(encoding="utf-8")), page


def test_the_readme_is_short() -> None:
    assert len((documents.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


IN_THE_TREE = r"`((?:src|include|cmake|python|tests|tools|docs|benchmarks|examples)/[\w./-]+)`"


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(IN_THE_TREE, page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (documents.ROOT / name).exists()]


IN_A_FILE = rf"`(\w+)(?:[.:(<][^`]*)?`\s+in\s+{IN_THE_TREE}"


@every_page
def test_names_are_defined_in_the_files_named_with_them(page: Path) -> None:
    """A Python name is defined there, rather than imported or used; of C++, whose definitions vary, it occurs."""
    for name, path in re.findall(IN_A_FILE, page.read_text(encoding="utf-8")):
        if (file := documents.ROOT / path).is_file():
            defined = rf"\b(?:class|def) {name}\b|^{name}\b[^=\n]*=" if file.suffix == ".py" else rf"\b{name}\b"
            assert re.search(defined, file.read_text(encoding="utf-8"), re.MULTILINE), f"{name} in {path}"
