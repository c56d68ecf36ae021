"""Conventions of command lines that every command keeps: -h, --version, --quiet, --json -, completion, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

for needed in ("typer", "rich", "transformers", "safetensors"):
    pytest.importorskip(needed, reason="the commands need the extra hf")

from typer.testing import CliRunner, Result

import epiloq
import tiny_teacher
from epiloq.cli import app, output
from epiloq.formats.table import FORMATS
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.outputs import schemes
from epiloq.quantize.targets import TARGETS

QUANTIZE = ("--scheme", "w8a8-int8", "--algorithm", "rtn")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.display, "quiet", False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_teacher.save(tmp_path_factory.mktemp("tiny"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app.create_app(), list(arguments))


def process(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more}
    command = [sys.executable, "-m", "epiloq", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"epiloq {epiloq.__version__}\n")


@pytest.mark.parametrize("command", ["", *app.COMMANDS])
def test_short_and_long_help_are_one(command: str) -> None:
    short, long = (run(*command.split(), option) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output
    assert "--quiet" in short.output


@pytest.mark.parametrize("command", app.COMMANDS)
def test_help_wraps_as_the_terminal_does(command: str) -> None:
    """A paragraph of the docstring is one line where there is room, and examples are indented."""
    shown = [line.rstrip() for line in run(command, "-h").output.partition("╭")[0].splitlines()]
    sentences = [line.strip() for line in shown if line.strip()]
    assert [line for line in sentences if line[0].islower() and not line.startswith("epiloq ")] == []
    examples = [line for line in shown if line.strip().startswith("epiloq ")]
    assert all(line.startswith("   epiloq ") for line in examples)
    assert bool(examples) == ("Examples:" in sentences)


@pytest.mark.parametrize("command", app.COMMANDS)
def test_help_is_whole_at_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is longer than its column would be cut."""
    monkeypatch.setenv("COLUMNS", "80")
    assert not re.findall(r"\S… +│$", run(command, "-h").output, re.MULTILINE)


def test_help_names_each_scheme_s_default_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")  # one line per option
    found = re.search(r"By default gptq, or rtn for ([^.]+)\.", run("quantize", "-h").output)
    assert found is not None
    patterns = re.split(r", | and ", found.group(1))
    rounded = {name for name in TARGETS for pattern in patterns if fnmatchcase(name, pattern)}
    assert rounded == {name for name, target in TARGETS.items() if target.algorithm == "rtn"}
    assert {target.algorithm for target in TARGETS.values()} == {"rtn", "gptq"}


def test_terminals_that_are_not_utf_8(tmp_path: Path) -> None:
    """What their encoding lacks is replaced, as are names of files that are no text."""
    strange = os.fsencode(tmp_path) + b"/\xff\xe9"
    environment = dict(os.environ, PYTHONIOENCODING="ascii", COLUMNS="40")
    for arguments, code in ((["--help"], 0), (["quantize", "--help"], 0), (["inspect", strange], 2)):
        command = [sys.executable, "-m", "epiloq", *arguments]
        result = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert result.returncode == code and b"Traceback" not in result.stderr, result.stderr
        assert (result.stdout if code == 0 else result.stderr).isascii()


def test_help_lists_what_may_be_chosen() -> None:
    quantize, convert = run("quantize", "-h").output, run("convert", "-h").output
    assert [name for name in (*schemes(), *ALGORITHMS, *FORMATS) if name not in quantize] == []
    assert [name for name in FORMATS if name not in convert] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantise",), "did you mean quantize?"),
        (("quantize", "absent", "--scheme", "w4a16-g46", "--output", "out"), "did you mean w4a16-g64?"),
        (("quantize", "absent", "--scheme", "w4a16-g", "--output", "out"), "did you mean w4a16-g128?"),
        (("bench", "--suite", "lama3-8b"), "epiloq bench: --suite: expected one of"),
        (("bench", "--suite", "lama3-8b"), "got 'lama3-8b' (did you mean llama3-8b?)"),
        (("convert", "absent", "out", "--format", "gguf"), "there are deepseek-fp8, compressed-tensors, gptq"),
    ],
)
def test_misspelled_name_gets_a_suggestion(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "offered"), [("epiloq conv", {"convert"}), ("epiloq quantize --scheme w4a16-g1", {"w4a16-g128"})]
)
def test_the_shell_completes_commands_and_schemes(words: str, offered: set[str]) -> None:
    count = str(len(words.split()) - 1)
    result = process(_EPILOQ_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
    assert set(result.stdout.split()) == offered


def test_json_on_standard_output_is_not_mixed_with_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 400)
    commands = (
        ("env",),
        ("inspect", str(model)),
        ("eval", str(model), "--text", str(text), "--tokens", "600"),
        ("quantize", str(model), *QUANTIZE, "--output", "small"),
        ("compare", str(model), "small"),
        ("convert", "small", "other", "--format", "epiloq"),
    )
    for arguments in commands:
        result = run(*arguments, "--json", "-")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)
        assert result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "small", "text.txt"]


@pytest.mark.slow
def test_bench_writes_json_to_standard_output() -> None:
    arguments = ("--op", "quantize_int8", "--variant", "static", "--m", "1", "--peer", "eager", "--device", "cpu")
    result = run("bench", *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] and "floor" in result.stderr


def test_progress_goes_to_standard_error_as_lines(model: Path, tmp_path: Path) -> None:
    result = run("quantize", str(model), *QUANTIZE, "--output", str(tmp_path / "small"))
    assert result.exit_code == 0, result.output
    written = result.stderr.splitlines()
    assert written[0].startswith("load and check: 1/1")
    assert any("blocks: 1/2" in line and "left" in line for line in written[1:])
    assert "MB of weights" in result.stdout and "load and check" not in result.stdout


def test_quiet_leaves_results_alone(model: Path, tmp_path: Path) -> None:
    made = run("quantize", str(model), *QUANTIZE, "--output", str(tmp_path / "small"), "--quiet")
    assert (made.exit_code, made.output) == (0, "")
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 400)
    for before, after in ((["-q"], []), ([], ["-q"])):
        result = run(*before, "eval", str(model), "--text", str(text), "--tokens", "600", *after)
        assert result.exit_code == 0
        assert all(line.startswith("warning: ") for line in result.stderr.splitlines())
        assert result.stdout.startswith("perplexity") and len(result.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "MODEL", "--text", "TEXT", "--kl", "absent"), "absent: expected a model directory, found nothing"),
        (("compare", "MODEL", "MODEL", "--text", "empty"), "empty: expected text, found none"),
        (("quantize", "MODEL", *QUANTIZE, "--output", "out", "--ignore", ""), "--ignore: expected patterns"),
        (("quantize", "MODEL", *QUANTIZE, "--output", "out", "--ignore", "re:"), "got an empty one ('re:')"),
        (("bench", "--device", "cpu", "--op", "scaled_mm", "--m", "0"), "bench: --m: expected at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_before_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("")
    Path("text").write_text("one two three four five six seven eight nine ten " * 400)
    result = run(*({"MODEL": str(model), "TEXT": "text"}.get(each, each) for each in arguments))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr
    assert not re.search(r"layers: |windows: |\[1/", result.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text"]


def test_interruption_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epiloq.cli.env.collect", interrupt)
    result = run("env")
    assert (result.exit_code, result.stderr) == (130, "epiloq env: interrupted\n")


def test_interruption_while_a_command_is_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epiloq.cli.app.import_module", lambda name: interrupt())
    result = run("inspect", "MODEL")
    assert (result.exit_code, result.stderr) == (130, "epiloq inspect: interrupted\n")


def interrupt() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


WITHOUT_TYPER = (
    "import sys; sys.modules['typer'] = None; sys.argv = ['epiloq', *sys.argv[1:]]; "
    "from epiloq.cli.app import main; main()"
)


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [("--version", 0, "epiloq "), ("env", 0, "kernels"), ("demo", 1, "pip install '.[cli]'")],
)
def test_runs_without_typer(option: str, code: int, message: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TYPER, option]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert message in (result.stdout if code == 0 else result.stderr)
    assert "Traceback" not in result.stderr


def test_help_without_docstrings() -> None:
    """Which ``python -OO`` leaves out, and with them a command's description, not its options."""
    command = [sys.executable, "-OO", "-m", "epiloq", "inspect", "-h"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "--check" in result.stdout, result.stderr


def test_tune_without_a_gpu_is_refused_in_one_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epiloq._core.built_archs", lambda: [])
    for what in ("64x128", str(model)):
        result = run("tune", what, "--tokens", "1,16")
        assert result.exit_code == 2
        assert result.stderr == "epiloq tune: expected a CUDA device that epiloq has kernels for, found none\n"
    assert run("tune", "64x128", "--tokens", "1;2").exit_code == 2
