"""The ``epiloq`` program. Commands are data, and each one's module is imported only when that command is asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "env": "epiloq.cli.env:env",
    "demo": "epiloq.cli.demo:demo",
    "bench": "epiloq.bench.cli:bench",
    "quantize": "epiloq.cli.quantize:quantize",
    "eval": "epiloq.cli.eval:evaluate",
    "inspect": "epiloq.cli.inspect:inspect",
    "convert": "epiloq.cli.convert:convert",
    "compare": "epiloq.cli.compare:compare",
}
EPILOG = (
    "Exit codes: 0 all well; 1 a disk that failed or a package that is missing; 2 bad input; 130 interrupted.\n\n"
    "python -m epiloq --cmake-dir | --include-dir prints where the CMake package and the C++ headers are."
)


def create_app() -> typer.Typer:
    """The typer application, its commands loaded lazily: ``env`` must not wait for matplotlib or transformers."""
    import typer
    from typer.core import TyperGroup
    from typer.main import get_command

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(COMMANDS)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in COMMANDS:
                return None
            module, _, function = COMMANDS[cmd_name].partition(":")
            single = typer.Typer(add_completion=False)
            single.command(cmd_name)(getattr(import_module(module), function))
            return get_command(single)

    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, epilog=EPILOG)

    @app.callback()
    def epiloq() -> None:
        """Quantised matrix multiplication for PyTorch and C++."""

    return app


def main() -> None:
    """Entry point of the ``epiloq`` script."""
    try:
        app = create_app()
    except ModuleNotFoundError as error:
        sys.exit(f"epiloq: the command line needs {error.name}: pip install 'epiloq[cli]'")
    app(prog_name="epiloq")
