"""The wheel as its users get it: what it holds and shows, that it imports, and that C++ projects build against it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import epiloq

ROOT = Path(__file__).parents[2]

# CMake and ninja may live beside the interpreter; nothing else may help the built package to be found.
ENVIRONMENT = {
    key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_LIBRARY_PATH", "CMAKE_PREFIX_PATH")
} | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "EPILOQ_CUDA": "OFF"}


class Built(NamedTuple):
    wheel: Path
    build_dir: Path
    site: Path


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=ENVIRONMENT | more, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="session")
def sources() -> Path:
    """The checkout; skips where it, or what building needs, is not there."""
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("the sources are not here")
    for tool in ("scikit_build_core", "pybind11"):
        pytest.importorskip(tool, reason="building needs the tools that `make venv` installs")
    return ROOT


@pytest.fixture(scope="session")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A wheel without kernels, with the C++ tests built beside it, installed into a folder of its own.

    That compiles the library again, and its tests, for a dozen CPU minutes, so tests that use it are slow ones.
    """
    root = tmp_path_factory.mktemp("packaging")
    found = Built(root, root / "build", root / "site")
    settings = [f"build-dir={found.build_dir}", "cmake.define.EPILOQ_TESTS=ON"]
    options = ["--no-deps", "--no-build-isolation", *(f"--config-settings={setting}" for setting in settings)]
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", root, sources, cwd=root)
    (wheel,) = root.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", found.site, wheel, cwd=root)
    return found._replace(wheel=wheel)


@pytest.mark.slow
def test_the_wheel_holds_the_package_the_library_and_the_cmake_files(built: Built) -> None:
    names = zipfile.ZipFile(built.wheel).namelist()
    expected = [
        r"epiloq/_core\.[^/]*\.so",
        r"epiloq/_core\.pyi",
        r"epiloq/py\.typed",
        r"epiloq/lib/libepiloq\.so",
        r"epiloq/lib/cmake/epiloq/epiloqConfig\.cmake",
        r"epiloq/lib/cmake/epiloq/epiloqConfigVersion\.cmake",
        r"epiloq/lib/cmake/epiloq/epiloqTargets\.cmake",
        r"epiloq/include/epiloq/version\.h",
        r"epiloq/demo/demo\.html",
        r"epiloq/demo/report\.html",
        r"epiloq/pages/page\.html",
        r"epiloq/quantize/report\.html",
        r"epiloq-.*\.dist-info/licenses/LICENSE",
        *(f"epiloq/include/epiloq/{header.name}" for header in (ROOT / "include" / "epiloq").iterdir()),
    ]
    assert [pattern for pattern in expected if sum(bool(re.fullmatch(pattern, name)) for name in names) != 1] == []
    strange = [name for name in names if not name.startswith(("epiloq/", "epiloq-")) or "__pycache__" in name]
    assert strange == []


@pytest.mark.slow
def test_the_version_is_the_same_everywhere(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    code = "import epiloq; print(epiloq.__version__, epiloq.__file__)"
    version, where = run(sys.executable, "-c", code, cwd=built.site.parent, PYTHONPATH=str(built.site)).split()
    assert Path(where).is_relative_to(built.site)
    assert version == metadata["Version"] == epiloq.__version__


@pytest.mark.slow
def test_only_the_public_api_is_exported(built: Built) -> None:
    exports = pytest.importorskip("exports")
    package = built.site / "epiloq"
    (module,) = package.glob("_core.*.so")
    assert exports.exported(module) == ["PyInit__core"]
    library = package / "lib" / "libepiloq.so"
    assert exports.stray(library) == []
    assert any(name.startswith("epiloq::scaled_mm(") for name in exports.exported(library))
    system = re.compile(r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux.*")
    assert [name for name in exports.needed(library) if not system.fullmatch(name)] == []
    assert [name for name in exports.needed(module) if not system.fullmatch(name)] == ["libepiloq.so"]


# What strict projects compile with.
WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wconversion",
    "-Wshadow",
    "-Wold-style-cast",
    "-Werror",
)


def consume(cmake_dir: str | Path, build_dir: Path) -> str:
    """What the consumer project prints, built against an installed package."""
    project, flags = ROOT / "examples" / "cpp", " ".join(WARNINGS)
    options = (f"-DCMAKE_PREFIX_PATH={cmake_dir}", f"-DCMAKE_CXX_FLAGS={flags}")
    run("cmake", "-S", project, "-B", build_dir, *options, cwd=build_dir)
    run("cmake", "--build", build_dir, cwd=build_dir)
    return run(build_dir / "consumer", cwd=build_dir)


def products(printed: str) -> bool:
    """Whether the consumer printed what it multiplies."""
    found = [[float(value) for value in line.split()] for line in printed.splitlines()[1:]]
    return found == [[2 * m * n for n in range(1, 9)] for m in range(1, 5)]


@pytest.mark.slow
def test_a_cmake_project_uses_the_installed_wheel(built: Built, tmp_path: Path) -> None:
    ask = (sys.executable, "-S", "-m", "epiloq")  # -S: no site-packages, so no torch, as in a build environment
    cmake_dir = run(*ask, "--cmake-dir", cwd=tmp_path, PYTHONPATH=str(built.site)).strip()
    include_dir = run(*ask, "--include-dir", cwd=tmp_path, PYTHONPATH=str(built.site)).strip()
    assert Path(include_dir, "epiloq", "scaled_mm.h").is_file()
    printed = consume(cmake_dir, tmp_path)
    assert printed.startswith("Unsupported: epiloq") if torch.cuda.is_available() else products(printed)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["c++", "clang++"])
@pytest.mark.parametrize("standard", ["c++20", "c++23"])
def test_the_headers_compile_without_warnings(built: Built, tmp_path: Path, compiler: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    include, source = built.site / "epiloq" / "include", tmp_path / "all.cpp"
    headers = sorted(path.name for path in (include / "epiloq").iterdir())
    source.write_text("".join(f"#include <epiloq/{header}>\n" for header in headers))
    command = (compiler, f"-std={standard}", "-fsyntax-only", *WARNINGS, "-I", str(include), str(source))
    compiled = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (compiled.returncode, compiled.stderr) == (0, "")


@pytest.mark.slow
def test_components_are_refused_by_name(built: Built, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(app LANGUAGES CXX)\n"
        "find_package(epiloq CONFIG REQUIRED COMPONENTS cuda)\n"
    )
    where = f"-DCMAKE_PREFIX_PATH={built.site / 'epiloq' / 'lib' / 'cmake' / 'epiloq'}"
    command = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build"), where]
    refused = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "epiloq has no components, got cuda; epiloq_HAS_CUDA and epiloq_ARCHS" in " ".join(refused.stderr.split())


@pytest.mark.gpu
def test_a_cmake_project_multiplies_on_the_gpu(tmp_path: Path) -> None:
    if shutil.which("cmake") is None or shutil.which("nvcc") is None:
        pytest.skip("CMake or the CUDA toolkit is not installed")
    assert products(consume(Path(epiloq.__file__).parent / "lib" / "cmake" / "epiloq", tmp_path))


@pytest.mark.parametrize("generator", ["Unix Makefiles", "Ninja"])
def test_kernels_are_configured_by_each_generator(generator: str, sources: Path, tmp_path: Path) -> None:
    """With a stand-in for CUTLASS, whose headers only compiling needs."""
    tools = ("cmake", "nvcc", "ninja" if generator == "Ninja" else "make")
    if not all(shutil.which(tool, path=ENVIRONMENT["PATH"]) for tool in tools):
        pytest.skip(f"one of {', '.join(tools)} is not installed")
    header = tmp_path / "cutlass" / "include" / "cutlass" / "cutlass.h"
    header.parent.mkdir(parents=True)
    header.touch()
    options = ("-DEPILOQ_CUDA=ON", f"-DCUTLASS_DIR={tmp_path / 'cutlass'}")
    output = run("cmake", "-G", generator, "-S", sources, "-B", tmp_path / "build", *options, cwd=tmp_path)
    assert "Generating done" in output


@pytest.mark.slow
def test_the_cpp_tests_pass(built: Built) -> None:
    output = run("ctest", "--output-on-failure", "--no-tests=error", cwd=built.build_dir)
    assert "100% tests passed" in output


def sdist(sources: Path, out: Path) -> Path:
    """A source distribution of a folder, unpacked; no file is in it twice."""
    code = "from scikit_build_core.build import build_sdist; import sys; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, out, cwd=sources)
    (file,) = out.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = archive.getnames()
        assert len(names) == len(set(names))
        archive.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_sources_alone(sources: Path, tmp_path: Path) -> None:
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    folder = sdist(sources, tmp_path / "first")
    names = contents(folder)
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "PKG-INFO", "src/bindings/module.cpp"} <= names
    leftover = re.compile(r"(build|dist|\..*)/|.*(\.so|\.pyc|\.o|\.whl)$")
    assert [name for name in names if leftover.match(name)] == []
    # Without git, which is not there, the same again.
    assert contents(sdist(folder, tmp_path / "again")) == names
