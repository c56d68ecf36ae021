"""The ``epiloq`` program. Commands are data, and each one's module is imported only when that command is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import cleandoc
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn

from epiloq.cli.output import display, installed_by, unknown
from epiloq.files import FULL_OR_FAILED, described

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
    "tune": "epiloq.cli.tune:tune",
}
FAILED, INTERRUPTED = 1, 130
HELP = {"help_option_names": ["-h", "--help"]}
EPILOG = (
    "Exit codes: 0 success; 1 a disk that failed, a package that is missing or a benchmark's wrong result; 2 bad usage "
    "or input; 130 interrupted. Results go to standard output, errors and progress to standard error.\n\n"
    "python -m epiloq --cmake-dir | --include-dir prints where the CMake package and the C++ headers are."
)


def version() -> str:
    """The program's name and version."""
    import epiloq

    return f"epiloq {epiloq.__version__}"


def joined_lines(text: str) -> str:
    """A docstring as help: each paragraph is one line, which the terminal wraps, and examples keep their own."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else " ".join(each.split()) for each in paragraphs)


def interrupted(what: str) -> NoReturn:
    """Say so in one line, and exit."""
    print(f"{what}: interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def interruptible(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command to end with one line when it is interrupted, or when a disk is full or fails."""

    @wraps(function)
    def command(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except KeyboardInterrupt:
            interrupted(f"epiloq {name}")
        except OSError as error:
            if error.errno not in FULL_OR_FAILED:
                raise
            print(f"epiloq {name}: {described(error)}", file=sys.stderr)
            sys.exit(FAILED)

    return command


def create_app() -> typer.Typer:
    """The typer application, its commands loaded lazily: ``env`` must not wait for matplotlib or transformers."""
    import typer
    from typer.core import TyperGroup
    from typer.main import get_command

    def set_quiet(given: bool) -> None:
        display.quiet = display.quiet or given

    options = typer.Typer(add_completion=False)

    @options.command()
    def common(
        quiet: bool = typer.Option(False, "--quiet", "-q", callback=set_quiet, expose_value=False, help=QUIET),
    ) -> None: ...

    quiet_option = get_command(options).params[0]

    class LazyGroup(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args[0] not in COMMANDS and not args[0].startswith("-"):
                ctx.fail(f"no command {unknown(args[0], COMMANDS)}")
            return super().resolve_command(ctx, args)

        def list_commands(self, ctx: Any) -> list[str]:
            return list(COMMANDS)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in COMMANDS:
                return None
            module, _, function = COMMANDS[cmd_name].partition(":")
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            try:
                given = getattr(import_module(module), function)
            except KeyboardInterrupt:  # typer would end without a word
                interrupted(f"epiloq {cmd_name}")
            text = joined_lines(given.__doc__ or "")  # python -OO leaves docstrings out
            single.command(cmd_name, help=text, context_settings=HELP)(interruptible(cmd_name, given))
            command = get_command(single)
            command.params.append(quiet_option)
            return command

    app = typer.Typer(
        cls=LazyGroup, no_args_is_help=True, epilog=EPILOG, context_settings=HELP, pretty_exceptions_enable=False
    )

    def print_version(given: bool) -> None:
        if given:
            interruptible("--version", print)(version())
            raise typer.Exit

    @app.callback()
    def epiloq(
        show_version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
        quiet: bool = typer.Option(False, "--quiet", "-q", help=QUIET),
    ) -> None:
        """Quantised matrix multiplication for PyTorch and C++."""
        display.quiet = quiet

    return app


QUIET = "No progress and no summary: only results, warnings and errors."


def main() -> None:
    """Entry point of the ``epiloq`` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 has no "…", nor every file's name
    try:
        app = create_app()
    except ModuleNotFoundError as error:
        _without_typer(sys.argv[1:], str(error.name))
        return
    except KeyboardInterrupt:
        interrupted("epiloq")
    app(prog_name="epiloq")


def _without_typer(arguments: list[str], missing: str) -> None:
    """Handle ``--version`` and ``env``, which need no package of the extra; print one sentence for everything else."""
    if arguments == ["--version"]:
        print(version())
    elif arguments == ["env"]:
        from epiloq.environment import print_plainly

        print_plainly()
    else:
        sys.exit(f"epiloq: the command line needs {missing}: {installed_by('cli')}")
