"""``python -m epiloq``: the command line, and the folders that a C++ build asks for.

``--cmake-dir`` and ``--include-dir`` are answered here with the standard library alone, so that they work in a build
environment that has neither typer nor torch.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

FOLDERS = {"--cmake-dir": Path("lib", "cmake", "epiloq"), "--include-dir": Path("include")}


def installed_folder(relative: Path) -> Path:
    """Absolute path of a folder inside the installed package; FileNotFoundError when no installation has it."""
    spec = find_spec("epiloq")
    # An editable installation has two roots: the sources, and site-packages with what CMake installed.
    roots = [Path(root) for root in (spec.submodule_search_locations if spec else None) or ()]
    for root in roots:
        if (root / relative).is_dir():
            return (root / relative).resolve()
    searched = ", ".join(str(root / relative) for root in roots) or "no package named epiloq"
    raise FileNotFoundError(
        f"epiloq: the C++ files are not installed (looked for {searched}); install the package with `pip install .`"
    )


def main() -> None:
    """Print one folder when that is all that is asked for, else run the command line."""
    arguments = sys.argv[1:]
    if len(arguments) == 1 and arguments[0] in FOLDERS:
        try:
            print(installed_folder(FOLDERS[arguments[0]]))
        except FileNotFoundError as error:
            sys.exit(str(error))
        return
    from epiloq.cli.app import main as run_app

    run_app()


if __name__ == "__main__":
    main()
