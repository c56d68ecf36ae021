"""Lists the exported symbols of the shared libraries and finds those that should not be exported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# The public API consists of functions and exception types directly in namespace epiloq.
ALLOWED = {
    "libepiloq": re.compile(r"(typeinfo for |typeinfo name for |vtable for )?epiloq::\w+(\[abi:cxx11\])?(\(.*\))?$"),
    "_core": re.compile(r"PyInit__core$"),
}


def exported(library: Path) -> list[str]:
    """Demangled names of the symbols that a shared library exports."""
    command = ["nm", "--dynamic", "--defined-only", "--demangle", "--format=posix", str(library)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    # Format of a line: name, one letter, value, size.
    return [re.sub(r" [A-Za-z] [0-9a-f]+( [0-9a-f]*)?$", "", line).strip() for line in lines]


def stray(library: Path) -> list[str]:
    """Exported symbols outside the public API. Raises KeyError for a library that is not epiloq's."""
    allowed = ALLOWED[library.name.split(".")[0]]
    return [name for name in exported(library) if not allowed.match(name)]


def needed(library: Path) -> list[str]:
    """Shared libraries that a library depends on (DT_NEEDED)."""
    lines = subprocess.run(["readelf", "-d", str(library)], stdout=subprocess.PIPE, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", lines)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        print(path, *(f"  {name}" for name in exported(path)), sep="\n")
