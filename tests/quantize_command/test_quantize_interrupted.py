"""``epiloq quantize`` when the disk is full, the user has had enough or the output is taken: nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from epiloq.cli import app
from epiloq.formats.io import model as models
from epiloq.quantize import job as jobs
from epiloq.quantize.algorithms import one_weight
from epiloq.quantize.calibration import calibrate as walking
from epiloq.quantize.calibration import work
from tiny_teacher import save, tiny_model

OPTIONS = ("--scheme", "w8a8-int8-static", "--algorithm", "smoothquant+gptq", "--windows", "8", "--length", "32")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save(folder / "model", tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16))
    (folder / "text").write_text("".join(chr(97 + i * i % 26) for i in range(1500)))
    (folder / "other").write_text("".join(chr(97 + i * i * i % 25) for i in range(600)))
    return folder


def arguments(teacher: Path, output: Path) -> list[str]:
    texts = ("--calibration", str(teacher / "text"), "--evaluation", str(teacher / "other"))
    return ["quantize", str(teacher / "model"), "--output", str(output), *OPTIONS, *texts]


def run(teacher: Path, output: Path) -> Result:
    return CliRunner().invoke(app.create_app(), arguments(teacher, output))


@pytest.fixture(scope="module")
def whole(teacher: Path) -> dict[str, torch.Tensor]:
    """What an uninterrupted run writes."""
    result = run(teacher, teacher / "whole")
    assert result.exit_code == 0, result.output
    return load_file(teacher / "whole" / "model.safetensors")


def check_it_goes_on(teacher: Path, output: Path, whole: dict[str, torch.Tensor]) -> None:
    assert not output.exists()
    result = run(teacher, output)
    assert result.exit_code == 0, result.output
    found = load_file(output / "model.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    assert json.loads((output / "config.json").read_text())["quantization_config"]["config_groups"]
    assert list(output.parent.iterdir()) == [output]


POINTS: dict[str, tuple[Any, str]] = {
    "opening the checkpoint": (jobs, "Checkpoint"),
    "checking the model": (jobs, "check_model"),
    "cutting the text": (jobs, "read_windows"),
    "loading": (jobs, "opened"),
    "opening the store": (jobs, "Store"),
    "measuring": (jobs, "perplexity"),
    "recording": (walking, "record"),
    "folding": (work, "foldings"),
    "rounding": (one_weight, "gptq"),
    "fixing scales": (work.InputWatch, "freeze"),
    "keeping a block": (jobs.Store, "write"),
    "reading blocks again": (jobs, "save"),
    "writing": (models.Writer, "close"),
    "carrying files over": (models.Checkpoint, "copy_other_files"),
    "opening the result": (jobs.page, "load"),
    "drawing": (jobs.page, "render"),
    "clearing up": (jobs.Store, "discard"),
}


INTERRUPTED = (KeyboardInterrupt(), 130, "interrupted")
FULL = (OSError(28, "No space left on device"), 1, "No space left on device")
WRITES = ("opening the store", "keeping a block", "writing", "carrying files over")


@pytest.mark.parametrize(
    ("point", "raised", "code", "message"),
    [(point, *INTERRUPTED) for point in POINTS] + [(point, *FULL) for point in WRITES],
)
def test_run_resumes_after_any_interruption(
    teacher: Path,
    tmp_path: Path,
    whole: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    raised: BaseException,
    code: int,
    message: str,
) -> None:
    """The second time that a run comes by, so that something was finished, where it comes by twice."""
    place, name = POINTS[point]
    real, calls = getattr(place, name), [0]
    passes = 1 if name in ("write", "freeze", "gptq", "perplexity") else 0

    def stop(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > passes:
            raise raised
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, stop)
        result = run(teacher, tmp_path / "out")
    assert calls[0] == passes + 1
    assert result.exit_code == code, result.output
    last = result.output.strip().splitlines()[-1]
    assert message in last and last.startswith("epiloq quantize: ") and len(last) < 300
    if point == "clearing up":  # The result was there before.
        assert (tmp_path / "out" / "config.json").is_file()
        return
    check_it_goes_on(teacher, tmp_path / "out", whole)


def test_slices_are_those_of_the_interrupted_run(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guided = ("--scheme", "w4a16-g32", "--algorithm", "gptq-guided", "--slices")

    def quantised(name: str, slices: int) -> Result:
        return CliRunner().invoke(app.create_app(), [*arguments(teacher, tmp_path / name), *guided, str(slices)])

    real = jobs.Store.write

    def stop(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Store, "write", stop)
        assert quantised("out", 2).exit_code == 130
    for other in (1, 3):
        refused = quantised("out", other)
        assert refused.exit_code == 2 and "with other settings (slices)" in " ".join(refused.output.split())
    resumed, whole = quantised("out", 2), quantised("whole", 2)
    assert (resumed.exit_code, whole.exit_code) == (0, 0), resumed.output + whole.output
    assert "1 of them kept" in resumed.output
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# The command, which stays where it draws the report: its output is written aside, and not yet in place.
HELD = """
import runpy, time
from epiloq.quantize import job

def hold(*_):
    print("held", flush=True)
    time.sleep(600)

job.page.render = hold
runpy.run_module("epiloq", run_name="__main__")
"""


def process(
    teacher: Path, output: Path, *, before: Callable[[], None] | None = None, program: Sequence[str] = ("-m", "epiloq")
) -> subprocess.Popen[str]:
    command = [sys.executable, *program, *arguments(teacher, output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, preexec_fn=before, env=environment, **streams)  # type: ignore[call-overload,no-any-return]


@pytest.mark.slow
def test_a_disk_that_is_full(teacher: Path, tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    """Files may not grow beyond what a block takes, so the kernel refuses in the middle of one."""
    small = max(file.stat().st_size for file in (teacher / "whole").iterdir() if file.suffix != ".safetensors")
    limit = max(small, 60_000) + 4096
    assert limit < (teacher / "whole" / "model.safetensors").stat().st_size
    stopped = process(
        teacher, tmp_path / "out", before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    output, _ = stopped.communicate(timeout=600)
    assert stopped.returncode == 1, output
    last = output.strip().splitlines()[-1]
    assert "too large" in last.lower() and "continues from there" in last and "Traceback" not in output
    check_it_goes_on(teacher, tmp_path / "out", whole)


@pytest.mark.slow
def test_control_c_in_the_middle(teacher: Path, tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    """A real signal, once the run has begun to write."""

    def listens() -> None:  # A shell that starts a job in the background tells it to ignore the signal.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    running = process(teacher, tmp_path / "out", before=listens, program=("-c", HELD))
    assert running.stdout is not None
    assert any("held" in line for line in running.stdout)
    assert (tmp_path / ".out.partial").exists()
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=600)
    assert running.returncode == 130, output
    assert "interrupted" in output.strip().splitlines()[-1] and "Traceback" not in output
    check_it_goes_on(teacher, tmp_path / "out", whole)


def test_output_created_by_another_process_is_not_overwritten(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(*args: Any) -> str:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("x")
        return ""

    monkeypatch.setattr(jobs.page, "render", appear)
    result = run(teacher, tmp_path / "out")
    assert result.exit_code == 1 and "was created in the meantime" in result.output
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_dangling_link_is_an_output_that_exists(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    result = run(teacher, tmp_path / "out")
    assert result.exit_code == 2 and "exists already" in result.output
    assert (tmp_path / "out").is_symlink() and not (tmp_path / "nowhere").exists()


def test_evaluation_text_used_for_calibration_is_refused(teacher: Path, tmp_path: Path) -> None:
    options = arguments(teacher, tmp_path / "out")
    options[options.index("--evaluation") + 1] = options[options.index("--calibration") + 1]
    for length in ("512", "100"):
        options[options.index("--length") + 1] = length
        result = CliRunner().invoke(app.create_app(), options)
        assert result.exit_code == 2 and "text that calibration sees" in result.output
        assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_stop_static_scales(teacher: Path, tmp_path: Path) -> None:
    """Rounding to nearest looks at no inputs, but static scales do."""
    model = models.load_float(models.Checkpoint(teacher / "model"))
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[5:100, 2] = torch.inf
    save(tmp_path / "broken", model)
    texts = ("--calibration", teacher / "text", "--windows", 8, "--length", 32)
    options = ("--scheme", "w8a8-int8-static", "--algorithm", "rtn", "--output", tmp_path / "out", *texts)
    result = CliRunner().invoke(app.create_app(), ["quantize", str(tmp_path / "broken"), *map(str, options)])
    last = result.output.strip().splitlines()[-1]
    assert result.exit_code == 2 and "model.embed_tokens.weight: expected finite numbers" in last
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]  # nothing to go on from, or to delete
