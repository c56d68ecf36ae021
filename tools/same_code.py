"""Checks that a change only moved or renamed code.

Two comparisons, each of a checkout or build before the change with one after it:

- ``same_code.py sources BEFORE AFTER [--renames FILE]`` takes two configured builds (folders that hold
  ``compile_commands.json``), preprocesses every translation unit for every architecture that it is compiled for, and
  lists the declarations of the project's own files that only one of them has. Moved files, merged files and another
  order of includes do not count; a changed token does, and a declaration that is compiled with other options. ``FILE``
  has a line for each renamed identifier: old name, new name, and optionally a pattern that the old file's path matches.
- ``same_code.py machine BEFORE.so AFTER.so`` extracts the machine code of two built libraries and compares the bytes of
  every kernel, whatever its name.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import cubins

_TOKEN = re.compile(
    r"""(?P<raw>\b(?:u8|[uUL])?R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)")|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*|<<=|>>=|<=>|->\*|\.\.\.|::|->|\+\+|--|&&|\|\||[-+*/%&|^!=<>]="""
    r"""|<<|\S""",
    re.DOTALL,
)
_MARKER = re.compile(r'^#\s+\d+\s+"(?P<file>[^"]*)"(?P<flags>[\d ]*)$')
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"][^>"]+[>"]\s*$')
# Assertions in tests contain their line number, which may change.
_NO_LINES = ("-D__LINE__=0", "-Wno-builtin-macro-redefined")
_KINDS = {"class", "struct", "union", "enum", "concept", "using", "typedef"}


@dataclass(frozen=True)
class Rename:
    """A renamed identifier, in old files whose path matches a pattern."""

    old: str
    new: str
    files: str = "*"


def read_renames(path: Path | None) -> list[Rename]:
    """Read the table of renamed identifiers: ``old new [pattern]`` per line; ``#`` begins a comment."""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    return [Rename(*words) for line in lines if (words := line.partition("#")[0].split())]


def skip_template(tokens: list[str], start: int) -> int:
    """Return the index after the ``template <...>`` heads that begin at ``start``."""
    while start + 1 < len(tokens) and tokens[start] == "template" and tokens[start + 1] == "<":
        angles = brackets = 0
        for index in range(start + 1, len(tokens)):
            token = tokens[index]
            brackets += (token in "([{") - (token in ")]}")
            if brackets == 0 and token in "<>":
                angles += 1 if token == "<" else -1
                if angles == 0:
                    start = index + 1
                    break
        else:
            return len(tokens)
    return start


def declaration_end(tokens: list[str], start: int) -> int:
    """Return the index after the declaration that begins at ``start``."""
    head = skip_template(tokens, start)
    needs_semicolon = head < len(tokens) and tokens[head] in _KINDS
    depth = 0
    for index in range(head, len(tokens)):
        token = tokens[index]
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
        if depth:
            continue
        if token == "=" and tokens[index - 1] != "operator":
            needs_semicolon = True
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        body_ends = token == "}" and not needs_semicolon and following not in ("{", ",", ";", "(", ".")
        if token == ";" or body_ends:
            return index + 1
    return len(tokens)


def declarations(tokens: list[str]) -> Iterator[tuple[int, str]]:
    """Yield every declaration at namespace scope: its first index, and its text prefixed with its namespaces."""
    scopes: list[str] = []
    index = 0
    while index < len(tokens):
        brace = index
        while brace < len(tokens) and brace - index < 12 and tokens[brace] not in ("{", ";", "(", "=", "}"):
            brace += 1
        head = tokens[index:brace]
        is_scope = "namespace" in head[:2] or (head[:1] == ["extern"] and len(head) == 2)
        if is_scope and brace < len(tokens) and tokens[brace] == "{":
            scopes.append(" ".join(head))
            index = brace + 1
        elif tokens[index] == "}":
            scopes = scopes[:-1]
            index += 1
        else:
            end = declaration_end(tokens, index)
            yield index, " ".join([*scopes, *tokens[index:end]])
            index = end


class Declaration(NamedTuple):
    """A declaration: its text, its compiler options, and whether it is in the translation unit's main file."""

    text: str
    options: str
    is_own: bool


@dataclass
class Build:
    """A configured build and the declarations of its translation units."""

    folder: Path
    renames: list[Rename] = field(default_factory=list)
    _headers: dict[tuple[str, ...], list[Declaration]] = field(default_factory=dict)

    @cached_property
    def root(self) -> Path:
        """The checkout that was configured."""
        cache = (self.folder / "CMakeCache.txt").read_text(encoding="utf-8")
        found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE)
        if found is None:
            raise SystemExit(f"same_code: {self.folder}: expected a configured build")
        return Path(found[1])

    def is_own(self, file: str) -> bool:
        """Whether a file belongs to the project, hand-written or generated."""
        return file.startswith((f"{self.root}/", f"{self.folder}/")) and "/_deps/" not in file

    @cached_property
    def _by_name(self) -> dict[str, list[Rename]]:
        table: dict[str, list[Rename]] = {}
        for rename in self.renames:
            table.setdefault(rename.old, []).append(rename)
        return table

    def renamed(self, token: str, file: str) -> str:
        """Translate a token of this build to the other build's name."""
        for rename in self._by_name.get(token, ()):
            if fnmatch.fnmatch(file, rename.files) or fnmatch.fnmatch(file, f"*/{rename.files}"):
                return rename.new
        return "<path>" if token.startswith('"') and str(self.root) in token else token

    def own_tokens(self, preprocessed: str) -> tuple[list[str], list[str]]:
        """Return the tokens of the project's files and the file of each, by the preprocessor's line markers."""
        tokens, files, lines, file = list[str](), list[str](), list[str](), ""
        for line in [*preprocessed.splitlines(), '# 1 ""']:
            marker = _MARKER.match(line)
            if marker is None:
                lines.append("" if line.startswith("#pragma once") else line)
                continue
            if self.is_own(file):
                found = [self.renamed(each[0], file) for each in _TOKEN.finditer("\n".join(lines))]
                tokens += found
                files += [file] * len(found)
            file, lines = marker["file"], []
        return tokens, files

    def preprocess(self, command: list[str], source: Path) -> list[Declaration]:
        """Preprocess ``source`` and return the project's declarations."""
        result = subprocess.run([*command, str(source)], cwd=self.folder, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"same_code: {source}: the preprocessor failed:\n{result.stderr}")
        tokens, files = self.own_tokens(result.stdout)
        options = self.options(command)
        return [Declaration(text, options, files[at] == str(source)) for at, text in declarations(tokens)]

    def options(self, command: list[str]) -> str:
        """Return the options of a command that affect the code, without paths."""
        return " ".join(word for word in command[1:] if not word.startswith(("-I", "-isystem", "/")))

    def unit(self, entry: dict[str, str]) -> list[Declaration]:
        """Return a translation unit's declarations; cached for generated units that include the same headers."""
        source = Path(entry["file"])
        lines = source.read_text(encoding="utf-8").splitlines()
        includes = [line for line in lines if _INCLUDE.match(line)]
        body = [line.partition("//")[0] for line in lines if not _INCLUDE.match(line)]
        shares = source.is_relative_to(self.folder) and not any(line.lstrip().startswith("#") for line in body)
        result: list[Declaration] = []
        for command in preprocessor_commands(shlex.split(entry["command"])):
            if not shares:
                result += self.preprocess(command, source)
                continue
            key = (*command, *includes)
            if key not in self._headers:
                with tempfile.NamedTemporaryFile("w", suffix=source.suffix, dir=self.folder) as file:
                    file.write("\n".join(includes) + "\n")
                    file.flush()
                    self._headers[key] = self.preprocess(command, Path(file.name))
            own = [self.renamed(found[0], str(source)) for found in _TOKEN.finditer("\n".join(body))]
            options = self.options(command)
            result += [*self._headers[key], *(Declaration(text, options, True) for _, text in declarations(own))]
        return result

    def declared(self) -> list[Declaration]:
        """Return the declarations of all translation units, without repetitions."""
        entries = json.loads((self.folder / "compile_commands.json").read_text(encoding="utf-8"))
        with ThreadPoolExecutor(2) as pool:
            return list({each for unit in pool.map(self.unit, entries) for each in unit})


def preprocessor_commands(command: list[str]) -> Iterator[list[str]]:
    """Yield preprocessor commands for a compiler command: one per architecture of device code."""
    if Path(command[0]).name == "ccache":
        command = command[1:]
    kept, pairs, words = [], list[str](), iter(command)
    for word in words:
        if word == "-gencode":
            pairs.append(next(words))
        elif word in ("-c", "-o"):
            next(words)
        elif not word.startswith(("--compress-mode", "-Xptxas")):
            kept.append(word)
    computes = sorted({pair.partition(",")[0] for pair in pairs})
    if not computes:
        yield [*kept, *_NO_LINES, "-E"]
    for compute in computes:
        yield [*kept, "-gencode", f"{compute},code={compute.removeprefix('arch=')}", *_NO_LINES, "-E"]


def only_in(some: list[Declaration], other: list[Declaration]) -> dict[str, str]:
    """Return declarations that ``other`` lacks, compared by text, and those of main files also by options."""
    texts, compiled = {each.text for each in other}, {(each.text, each.options) for each in other}
    missing = {each.text: "" for each in some if each.text not in texts}
    for each in some:
        if each.is_own and each.text in texts and (each.text, each.options) not in compiled:
            missing[each.text] = f"   [compiled with {each.options}]"
    return missing


def compare_sources(before: Build, after: Build) -> int:
    """Print the declarations that only one of two builds has, and return their number."""
    left, right = before.declared(), after.declared()
    removed, added = only_in(left, right), only_in(right, left)
    for sign, found in (("-", removed), ("+", added)):
        for text, note in sorted(found.items()):
            print(f"{sign} {text[:300]}{note}")
    texts = {each.text for each in left} & {each.text for each in right}
    print(f"{len(texts)} declarations in both, {len(removed)} only before, {len(added)} only after")
    return len(removed) + len(added)


def machine_code(library: Path) -> Counter[tuple[str, str]]:
    """Count the kernels of a library by architecture and digest of their machine code."""
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins.extract(library.resolve(), Path(folder)):
            for code in cubins.code(cubin).values():
                found[cubins.arch(cubin), hashlib.sha256(code).hexdigest()] += 1
    return found


def compare_machine_code(before: Path, after: Path) -> int:
    """Print the number of kernels that only one library has, by architecture, and return it."""
    left, right = machine_code(before), machine_code(after)
    removed, added = left - right, right - left
    for arch in sorted({arch for arch, _ in [*left, *right]}):
        counts = [sum(n for (a, _), n in kernels.items() if a == arch) for kernels in (left, right, removed, added)]
        print("{}: {} kernels before, {} after, {} only before, {} only after".format(arch, *counts))
    return removed.total() + added.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    sources = modes.add_parser("sources", help="compare two configured builds")
    machine = modes.add_parser("machine", help="compare two built libraries")
    for mode in (sources, machine):
        mode.add_argument("before", type=Path)
        mode.add_argument("after", type=Path)
    sources.add_argument("--renames", type=Path, help="a table: old name, new name, optional pattern of old paths")
    arguments = parser.parse_args()
    if arguments.mode == "machine":
        sys.exit(1 if compare_machine_code(arguments.before, arguments.after) else 0)
    before = Build(arguments.before.resolve(), read_renames(arguments.renames))
    sys.exit(1 if compare_sources(before, Build(arguments.after.resolve())) else 0)


if __name__ == "__main__":
    main()
