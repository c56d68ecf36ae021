"""Checks that a change only moved or renamed code: the tool of record for renames.

Two comparisons, each of a checkout or build before the change with one after it:

- ``same_code.py sources BEFORE AFTER [--renames FILE]`` takes two configured builds (folders that hold
  ``compile_commands.json``), preprocesses every translation unit for every architecture that it is compiled for, and
  compares the declarations that come from the project itself. Moved files, merged files and another order of includes
  do not count as differences; a changed token does. ``FILE`` has a line for each renamed identifier: old name, new
  name, and optionally a pattern that the path of the old file matches.
- ``same_code.py machine BEFORE.so AFTER.so`` extracts the machine code of two built libraries and compares the bytes of
  every kernel, whatever its name.
"""

from __future__ import annotations

import argparse
import difflib
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

import cubins

_TOKEN = re.compile(
    r"""(?P<raw>\b(?:u8|[uUL])?R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)")|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*|<<=|>>=|<=>|->\*|\.\.\.|::|->|\+\+|--|&&|\|\||[-+*/%&|^!=<>]="""
    r"""|<<|\S""",
    re.DOTALL,
)
_MARKER = re.compile(r'^#\s+\d+\s+"(?P<file>[^"]*)"(?P<flags>[\d ]*)$')
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"][^>"]+[>"]\s*$')
_KINDS = {"class", "struct", "union", "enum", "concept", "using", "typedef"}


@dataclass(frozen=True)
class Rename:
    """An identifier's old and new name, in old files whose path matches a pattern."""

    old: str
    new: str
    files: str = "*"


def read_renames(path: Path | None) -> list[Rename]:
    """The table of renamed identifiers: ``old new [pattern]`` a line, ``#`` begins a comment."""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    return [Rename(*words) for line in lines if (words := line.partition("#")[0].split())]


Tokens = tuple[str, ...]


def skip_template(tokens: list[str], start: int) -> int:
    """The index behind ``template <...>`` heads that begin at ``start``."""
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
    """The index behind the declaration that begins at ``start``."""
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


def declarations(tokens: list[str]) -> Iterator[Tokens]:
    """Every declaration at namespace scope, after the namespaces it lies in."""
    scopes: list[Tokens] = []
    index = 0
    while index < len(tokens):
        brace = index
        while brace < len(tokens) and brace - index < 12 and tokens[brace] not in ("{", ";", "(", "=", "}"):
            brace += 1
        opens = brace < len(tokens) and tokens[brace] == "{"
        if opens and (
            "namespace" in tokens[index : min(index + 2, brace)]
            or (tokens[index] == "extern" and brace == index + 2)
        ):
            scopes.append(tuple(tokens[index:brace]))
            index = brace + 1
        elif tokens[index] == "}":
            if scopes:
                scopes.pop()
            index += 1
        else:
            end = declaration_end(tokens, index)
            yield (*(token for scope in scopes for token in scope), *tokens[index:end])
            index = end


@dataclass
class Build:
    """A configured build: its translation units, and the declarations of each."""

    folder: Path
    renames: list[Rename] = field(default_factory=list)
    _headers: dict[tuple[str, ...], list[Tokens]] = field(default_factory=dict)

    @cached_property
    def root(self) -> Path:
        """The checkout that was configured."""
        cache = (self.folder / "CMakeCache.txt").read_text(encoding="utf-8")
        found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE)
        if found is None:
            raise SystemExit(f"same_code: {self.folder}: expected a configured build")
        return Path(found[1])

    def is_own(self, file: str) -> bool:
        """Whether a file is the project's, written or generated."""
        return file.startswith((f"{self.root}/", f"{self.folder}/")) and "/_deps/" not in file

    def renamed(self, token: str, file: str) -> str:
        """A token of this build as the other one spells it."""
        for rename in self._by_name.get(token, ()):
            if fnmatch.fnmatch(file, rename.files) or fnmatch.fnmatch(file, f"*/{rename.files}"):
                return rename.new
        return "<path>" if token.startswith('"') and str(self.root) in token else token

    @cached_property
    def _by_name(self) -> dict[str, list[Rename]]:
        table: dict[str, list[Rename]] = {}
        for rename in self.renames:
            table.setdefault(rename.old, []).append(rename)
        return table

    def tokens(self, text: str, file: str) -> list[str]:
        """The tokens of preprocessed text."""
        return [self.renamed(found[0], file) for found in _TOKEN.finditer(text)]

    def own_tokens(self, preprocessed: str) -> list[str]:
        """The tokens that come from the project's own files, by the preprocessor's line markers."""
        tokens: list[str] = []
        file, lines = "", list[str]()
        for line in [*preprocessed.splitlines(), '# 1 "" ']:
            marker = _MARKER.match(line)
            if marker is None:
                if not line.startswith("#pragma once"):
                    lines.append(line)
                continue
            if self.is_own(file):
                tokens += self.tokens("\n".join(lines), file)
            file, lines = marker["file"], []
        return tokens

    def preprocess(self, command: list[str], source: Path) -> list[Tokens]:
        """The project's declarations in what the preprocessor makes of ``source``."""
        result = subprocess.run([*command, str(source)], cwd=self.folder, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"same_code: {source}: the preprocessor failed:\n{result.stderr}")
        return list(declarations(self.own_tokens(result.stdout)))

    def unit(self, entry: dict[str, str]) -> list[list[Tokens]]:
        """A translation unit's declarations, for each architecture. Units that include the same headers share them."""
        source = Path(entry["file"])
        lines = source.read_text(encoding="utf-8").splitlines()
        body = [line for line in lines if not _INCLUDE.match(line)]
        is_generated = source.is_relative_to(self.folder)
        shares = is_generated and not any(line.lstrip().startswith("#") for line in body)
        result = []
        for command in preprocessor_commands(shlex.split(entry["command"])):
            if not shares:
                result.append(self.preprocess(command, source))
                continue
            includes = [line for line in lines if _INCLUDE.match(line)]
            key = (*command, *includes)
            if key not in self._headers:
                with tempfile.NamedTemporaryFile("w", suffix=source.suffix, dir=self.folder) as file:
                    file.write("\n".join(includes) + "\n")
                    file.flush()
                    self._headers[key] = self.preprocess(command, Path(file.name))
            own = declarations(self.tokens(re.sub(r"//.*", "", "\n".join(body)), str(source)))
            result.append([*self._headers[key], *own])
        return result

    def units(self) -> dict[str, list[Tokens]]:
        """Every translation unit's declarations, by its path in the checkout or the build."""
        entries = json.loads((self.folder / "compile_commands.json").read_text(encoding="utf-8"))
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(self.unit, entries)
            return {
                f"{entry['file'].removeprefix(f'{self.folder}/').removeprefix(f'{self.root}/')} [{number}]": each
                for entry, each_arch in zip(entries, found, strict=True)
                for number, each in enumerate(each_arch)
            }


def preprocessor_commands(command: list[str]) -> Iterator[list[str]]:
    """Commands that preprocess rather than compile: one for each architecture of device code."""
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
        yield [*kept, "-E"]
    for compute in computes:
        yield [*kept, "-gencode", f"{compute},code={compute.removeprefix('arch=')}", "-E"]


def digest(unit: list[Tokens]) -> str:
    """What two units have in common that have the same declarations, in whatever order."""
    total = hashlib.sha256()
    for each in sorted(" ".join(tokens) for tokens in unit):
        total.update(each.encode() + b"\0")
    return total.hexdigest()


def differences(before: list[Tokens], after: list[Tokens]) -> Iterator[str]:
    """The declarations that only one of two units has, as a diff by tokens."""
    left, right = Counter(before), Counter(after)
    removed, added = list((left - right).elements()), list((right - left).elements())
    yield from difflib.unified_diff(
        [token for tokens in removed for token in tokens],
        [token for tokens in added for token in tokens],
        "before",
        "after",
        lineterm="",
        n=4,
    )


def compare_sources(before: Build, after: Build) -> int:
    """Print the units that differ; how many there are."""
    left, right = before.units(), after.units()
    by_digest: dict[str, list[str]] = {}
    for name, unit in right.items():
        by_digest.setdefault(digest(unit), []).append(name)
    alone = []
    for name, unit in left.items():
        twins = by_digest.get(digest(unit))
        if twins:
            twins.remove(name) if name in twins else twins.pop()
        else:
            alone.append(name)
    new = [name for names in by_digest.values() for name in names]
    for name in alone:
        wanted = set(left[name])
        nearest = max(new, key=lambda other: len(wanted & set(right[other])), default=None)
        print(f"--- {name} is like no unit after the change; nearest: {nearest}")
        if nearest is not None:
            new.remove(nearest)
            print(" ".join(list(differences(left[name], right[nearest]))[:400]))
    for name in new:
        print(f"+++ {name} is like no unit before the change")
    print(f"{len(left) - len(alone)} of {len(left)} units are the same ({len(right)} after the change)")
    return len(alone) + len(new)


def machine_code(library: Path) -> Counter[tuple[str, str]]:
    """How often each kernel's code occurs in a library, by architecture and the digest of its bytes."""
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins.extract(library.resolve(), Path(folder)):
            for code in cubins.code(cubin).values():
                found[cubins.arch(cubin), hashlib.sha256(code).hexdigest()] += 1
    return found


def compare_machine_code(before: Path, after: Path) -> int:
    """Print how many kernels only one library has, by architecture; their number."""
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
