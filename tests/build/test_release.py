"""The release: its workflow builds what is promised, and the tools beside it name, measure and try wheels."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
wheel_tools = pytest.importorskip("wheels", reason="the tools are not here")
smoke = pytest.importorskip("wheel_smoke", reason="the tools are not here")


@pytest.fixture(scope="module")
def jobs() -> Any:
    yaml = pytest.importorskip("yaml", reason="transformers brings it")
    if not WORKFLOWS.is_dir():
        pytest.skip("not inside a checkout")
    return yaml.safe_load((WORKFLOWS / "release.yml").read_text(encoding="utf-8"))["jobs"]


def test_workflows_fit_their_schema() -> None:
    program = shutil.which("check-jsonschema", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None or not WORKFLOWS.is_dir():
        pytest.skip("check-jsonschema or the workflows are not here")
    files = sorted(map(str, WORKFLOWS.glob("*.yml")))
    checked = [program, "--builtin-schema", "vendor.github-workflows", *files]
    run = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert len(files) == 2 and run.returncode == 0, run.stdout


def test_every_python_machine_and_cuda_is_built_and_tried(jobs: Any) -> None:
    built, tried = (jobs[name]["strategy"]["matrix"] for name in ("wheels", "smoke"))
    assert built["machine"] == tried["machine"] == ["x86-64", "aarch64"]
    assert built["cuda"] == tried["cuda"] == ["12.8", "13.0"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert tried["python"] == re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert tried["python"] == [f"3.{minor}" for minor in wheel_tools.PYTHON_MINORS]
    releases = re.findall(r"NVIDIA CUDA :: (\d+)", project)
    assert [cuda.partition(".")[0] for cuda in built["cuda"]] == releases
    for matrix in (built, tried):
        rows = {row["machine"]: row for row in matrix["include"] if "machine" in row}
        assert [rows[machine]["runner"].endswith("-arm") for machine in matrix["machine"]] == [False, True]
    (command,) = (step["run"] for step in jobs["wheels"]["steps"] if "run" in step)
    assert "tools/wheels.py --all" in command and jobs["wheels"]["env"]["EPILOQ_CUDA"] == "ON"


def test_publishing_requires_tests_and_a_tag(jobs: Any) -> None:
    """Publishing needs the tests, a tag, and no secret; one file a CPython and machine goes to the index."""
    assert jobs["smoke"]["needs"] == "wheels" and jobs["publish"]["needs"] == ["smoke", "sdist"]
    assert jobs["publish"]["if"] == "github.event_name == 'push'"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    text = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text and "://" not in text
    uploaded = {step["with"]["name"] for name in ("wheels", "sdist") for step in jobs[name]["steps"] if "with" in step}
    taken = {
        step["with"].get("pattern", step["with"].get("name"))
        for name in ("publish", "attach")
        for step in jobs[name]["steps"]
        if "download" in step.get("uses", "")
    }
    assert uploaded == {"wheels-${{ matrix.machine }}-cuda${{ matrix.cuda }}", "sdist"}
    assert taken == {"wheels-*-cuda13.0", "wheels-*-cuda12.8", "sdist"}
    labels = {row["cuda"]: row["label"] for row in jobs["wheels"]["strategy"]["matrix"]["include"] if "cuda" in row}
    assert labels == {"12.8": "--label cu128"}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of one module, as small as one can be."""
    made = tmp_path / "small-1.2.0-py3-none-any.whl"
    information = "small-1.2.0.dist-info"
    files = {
        "small.py": "here = 5\n",
        f"{information}/METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1.2.0\n\nVersion: x\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: hashlib.sha256(text.encode()).digest() for name, text in files.items()}
    lines = [f"{name},sha256={urlsafe_b64encode(digest).decode().rstrip('=')}," for name, digest in digests.items()]
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in (files | {f"{information}/RECORD": "\n".join([*lines, f"{information}/RECORD,,"])}).items():
            archive.writestr(name, text)
    return made


def test_a_label_is_part_of_the_version(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("wheel", reason="the package wheel is not installed")
    made = wheel_tools.labelled(Path(sys.executable), wheel, "cu128", tmp_path / "out")
    assert made.name == "small-1.2.0+cu128-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), str(made)]
    subprocess.run(pip, check=True, capture_output=True)
    code = "import importlib.metadata, small; print(importlib.metadata.version('small'), small.here)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1.2.0+cu128", "5"]


def test_a_label_names_the_compiler_of_the_kernels(tmp_path: Path) -> None:
    """A build folder keeps the compiler that it was first configured with: CUDACXX alone does not change it."""
    assert wheel_tools.compiler(tmp_path) is None
    with pytest.raises(SystemExit, match=r"--label cu128: expected kernels of that CUDA, got those of none"):
        wheel_tools.check_label("cu128", tmp_path)
    (tmp_path / "CMakeFiles" / "3.31.6").mkdir(parents=True)
    output = 'set(CMAKE_CUDA_COMPILER "/nvcc")\nset(CMAKE_CUDA_COMPILER_VERSION "12.8.93")\n'
    (tmp_path / "CMakeFiles" / "3.31.6" / "CMakeCUDACompiler.cmake").write_text(output)
    assert wheel_tools.compiler(tmp_path) == "12.8.93"
    wheel_tools.check_label("cu128", tmp_path)
    wheel_tools.check_label("nightly", tmp_path)
    with pytest.raises(SystemExit, match=r"--label cu130: expected kernels of that CUDA, got those of 12\.8\.93: set "):
        wheel_tools.check_label("cu130", tmp_path)


def test_wheels_that_are_too_large_or_strange_are_named(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel_tools.checked_size(wheel) == wheel.stat().st_size
    monkeypatch.setattr(wheel_tools, "LIMIT", 100)
    with pytest.raises(SystemExit, match=r"small-1\.2\.0-py3-none-any\.whl: expected at most 0 MB, got 0\.0 MB"):
        wheel_tools.checked_size(wheel)
    with pytest.raises(SystemExit, match="expected a wheel of CPython 3, got another name"):
        smoke.interpreter_of(wheel)
    with pytest.raises(SystemExit, match=r"expected CPython 3\.99 on the PATH, in pyenv or in /opt/python, found none"):
        smoke.interpreter_of(Path("epiloq-0.2.0-cp399-cp399-linux_x86_64.whl"))


def test_interpreters_are_identified_by_running_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that manylinux images have; a shim that does not start is none."""
    minor = sys.version_info[1]
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    there = tmp_path / "versions" / f"3.{minor}.1" / "bin"
    there.mkdir(parents=True)
    (there / f"python3.{minor}").symlink_to(sys.executable)
    shims = tmp_path / "shims"
    shims.mkdir()
    (shims / f"python3.{minor}").write_text("#!/bin/sh\nexit 127\n")
    (shims / f"python3.{minor}").chmod(0o755)
    monkeypatch.setenv("PATH", str(shims))
    assert list(wheel_tools.interpreters((minor, 99))) == [there / f"python3.{minor}"]


# What the page says of programs that are not ours.
OTHERS_SAY = (
    "CUDA driver version is insufficient for CUDA runtime version",
    "no kernel image is available for execution on the device",
    "Killed signal terminated program cicc",
)


def test_messages_on_the_page_are_those_of_the_code() -> None:
    page = ROOT / "docs" / "guide" / "installing.md"
    if not page.exists():
        pytest.skip("the documentation is not here")
    text = page.read_text(encoding="utf-8").partition("## Troubleshooting")[2]
    messages = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    folders = (ROOT / "python" / "epiloq", ROOT / "src", ROOT / "third_party", ROOT / "cmake")
    names = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".cmake")]
    # Without what joins the pieces of a message, so that quotes and line ends in it do not matter.
    sources = "".join(path.read_text(encoding="utf-8") for path in [*names, ROOT / "CMakeLists.txt"])
    sources = re.sub(r'"\s*\n?\s*f?"', "", sources)
    # Values in braces, or added to strings, are wherever the page has those of an example.
    example = {"cpython 3.12": "{version}", "no kernel for cuda:0": "no kernel for cuda:"}
    assert len(messages) > 10
    for message in messages:
        if message in OTHERS_SAY or message == "Killed":
            continue
        wanted = message.partition(" (compute")[0] if "no kernel for" in message else message
        for output, written in example.items():
            wanted = wanted.replace(output, written)
        assert wanted in sources, message
