"""The ``epiloq`` program: commands load on demand, bad arguments change nothing, folders are found without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")

import torch
from typer.testing import CliRunner, Result

import epiloq
from epiloq import __main__ as folders
from epiloq.cli import app
from epiloq.cli.output import write_json
from epiloq.environment import collect


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app.create_app(), list(arguments))


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in app.COMMANDS)


@pytest.mark.parametrize("command", app.COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


def test_env_shows_and_writes_what_is_installed(tmp_path: Path) -> None:
    result = run("env", "--json", str(tmp_path / "env.json"))
    assert result.exit_code == 0
    facts = json.loads((tmp_path / "env.json").read_text())
    assert facts["epiloq"]["version"] == epiloq.__version__
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["cuda_runtime"] == torch.version.cuda
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["cpu"]["torch_threads"] == torch.get_num_threads()
    assert epiloq.__version__ in result.output
    assert torch.__version__ in result.output


@pytest.mark.gpu
def test_env_knows_the_gpu() -> None:
    facts = collect()
    major, minor = torch.cuda.get_device_capability(0)
    assert facts["gpus"][0]["compute_capability"] == f"{major}.{minor}"
    assert facts["driver"]


def test_env_loads_no_heavy_package() -> None:
    code = (
        "import sys; from epiloq.cli.app import main; sys.argv = ['epiloq', 'env']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "print('loaded:', *{'matplotlib', 'transformers', 'epiloq.bench', 'epiloq.demo'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing-of-the-kind"],
        ["env", "--unknown"],
        ["env", "--json", "absent/env.json"],
        ["env", "--json", "."],
    ],
)
def test_bad_arguments_exit_2_and_write_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_missing_typer_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[cli\]' in epiloq's sources"):
        app.main()


def packaged(root: Path, *subfolders: Path) -> Path:
    """A package of the same name that holds only __main__.py and these folders, in a path that needs care."""
    package = root / "a path with ä" / "epiloq"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(str(folders.__file__), package / "__main__.py")
    for name in ("torch", "typer"):
        (package.parent / f"{name}.py").write_text("raise ImportError('must not be imported')")
    for subfolder in subfolders:
        (package / subfolder).mkdir(parents=True)
    return package


@pytest.mark.parametrize("option", folders.FOLDERS)
def test_folders_are_printed_without_torch_and_typer(option: str, tmp_path: Path) -> None:
    package = packaged(tmp_path, folders.FOLDERS[option])
    command = [sys.executable, "-m", "epiloq", option]
    result = subprocess.run(
        command, cwd=package.parent, capture_output=True, text=True, check=False, env={"PYTHONUTF8": "1"}
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert Path(result.stdout.removesuffix("\n")) == (package / folders.FOLDERS[option]).resolve()


@pytest.mark.parametrize("option", folders.FOLDERS)
def test_a_folder_that_is_not_installed_is_an_error(option: str, tmp_path: Path) -> None:
    package = packaged(tmp_path)
    command = [sys.executable, "-m", "epiloq", option]
    result = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "C++ files are not installed" in result.stderr


def test_non_finite_figures_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "f.json", {"a": [1.5, float("nan")], "b": {"c": (float("inf"), "x")}, "d": None})
    read = json.loads((tmp_path / "f.json").read_text(), parse_constant=pytest.fail)
    assert read == {"a": [1.5, None], "b": {"c": [None, "x"]}, "d": None}
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]
