"""``epiloq quantize`` under a launcher: the same files as by one process; what happens where a rank differs or dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

from safetensors.torch import load_file

import epiloq
from epiloq.cli import app
from epiloq.quantize import identity
from epiloq.quantize.calibration import store, work
from gloo_ranks import store_of_ranks
from tiny_mixtures import qwen3
from tiny_teacher import save, tiny_model

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)

Change = Callable[[int], None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    save(folder / "llama", tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16))
    save(folder / "mixture", qwen3(vocab_size=256))
    (folder / "text").write_text("".join(chr(97 + i * i % 26) for i in range(1500)))
    (folder / "other").write_text("".join(chr(97 + i * i * i % 25) for i in range(600)))
    return folder


def arguments(models: Path, output: Path, *more: str, model: str = "llama") -> list[str]:
    asked = ("--windows", "9", "--length", "32", *(more or ("--scheme", "w4a16-g32")))
    text = () if "rtn" in more else ("--calibration", str(models / "text"))
    return ["quantize", str(models / model), "--output", str(output), *text, *asked]


def rank_of(rank: int, world: int, address: dict[str, str], message: Path, asked: list[str], change: Change) -> None:
    """One process of a launcher's, which leaves what it displays in a file."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "COLUMNS": 200}
    os.environ |= {name: str(value) for name, value in own.items()} | address
    torch.set_num_threads(1)
    with open(message, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    change(rank)
    app.create_app()(asked)


class Launched:
    """Ranks that were run to their end: exit codes, what they displayed, and when the last ended."""

    def __init__(self, folder: Path, commands: list[list[str]], change: Change = lambda rank: None) -> None:
        context = multiprocessing.get_context("fork")
        files = [folder / f"rank-{rank}" for rank in range(len(commands))]
        with store_of_ranks() as address:
            ranks = [
                context.Process(target=rank_of, args=(rank, len(commands), address, files[rank], asked, change))
                for rank, asked in enumerate(commands)
            ]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join(timeout=600)
                each.kill()
        self.ended = time.time()
        self.codes = [each.exitcode for each in ranks]
        self.output = [file.read_text() for file in files]
        for file in files:
            file.unlink()


def same_files(one: Path, other: Path) -> None:
    found, expected = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    assert (one / "config.json").read_text() == (other / "config.json").read_text()


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("whole")
    assert Launched(folder, [arguments(models, folder / "out")]).codes == [0]
    return folder / "out"


MIXTURE = ("--scheme", "w8a8-int8-static", "--algorithm", "smoothquant+gptq", "--keep-dynamic", "auto")


@pytest.mark.slow
def test_two_and_three_ranks_write_what_one_does(models: Path, whole: Path, tmp_path: Path) -> None:
    run = Launched(tmp_path, [arguments(models, tmp_path / "two")] * 2)
    assert run.codes == [0, 0], run.output
    assert "of weights" in run.output[0] and run.output[1] == ""
    same_files(tmp_path / "two", whole)
    commands = [arguments(models, tmp_path / name, *MIXTURE, model="mixture") for name in ("one", "three")]
    assert Launched(tmp_path, commands[:1]).codes == [0]
    run = Launched(tmp_path, commands[1:] * 3)
    assert run.codes == [0, 0, 0], run.output
    same_files(tmp_path / "three", tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        ("--bits", "4.6", "--algorithm", "gptq-guided", "--tune", "2"),
        ("--scheme", "w4a8-nvfp4-fp8", "--algorithm", "awq+gptq-guided", "--slices", "3", "--head", "w8a16"),
    ],
    ids=["budget", "fp4"],
)
def test_stages_that_one_rank_runs_alone(models: Path, tmp_path: Path, asked: tuple[str, ...]) -> None:
    """The first rank chooses schemes and trains scales, and the others wait or have ended."""
    commands = [arguments(models, tmp_path / name, *asked) for name in ("one", "two")]
    assert Launched(tmp_path, commands[:1]).codes == [0]
    run = Launched(tmp_path, commands[1:] * 2)
    assert run.codes == [0, 0], run.output
    same_files(tmp_path / "two", tmp_path / "one")


def test_autoround_is_refused_on_several_ranks(models: Path, tmp_path: Path) -> None:
    run = Launched(
        tmp_path, [arguments(models, tmp_path / "out", "--scheme", "w4a16-g32", "--algorithm", "autoround")] * 2
    )
    assert run.codes == [2, 2] and run.output[1] == ""
    message = " ".join(run.output[0].split())
    assert "--algorithm autoround: expected one process" in message and "got 2; start it without a launcher" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_torchrun(models: Path, whole: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(Path(epiloq.__file__).parents[1]), *sys.path])
    run = subprocess.run(
        [*launcher, "-m", "epiloq", *arguments(models, tmp_path / "out", "--scheme", "w4a16-g32", "--device", "auto")],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("of weights") == 1
    if not torch.cuda.is_available():
        same_files(tmp_path / "out", whole)


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        ("text", "tokens"),
        ("options", "options"),
        ("model", "model"),
        ("versions", "torch (2.10.1 and "),
        ("threads", "threads (2 and 1)"),
        ("sets", "oneDNN up to AVX2"),
        ("device", "device (NVIDIA L4 and NVIDIA H100)"),
    ],
)
def test_ranks_must_be_alike(models: Path, tmp_path: Path, differing: str, named: str) -> None:
    commands = [arguments(models, tmp_path / "out") for _ in range(2)]
    if differing == "text":
        commands[1][commands[1].index("--calibration") + 1] = str(models / "other")
    elif differing == "options":
        commands[1] += ["--ignore", "model.layers.0.*"]
    elif differing == "model":
        torch.manual_seed(4)
        other = tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
        commands[1][1] = str(save(tmp_path / "other", other))

    def change(rank: int) -> None:
        if differing == "versions" and rank:
            torch.__version__ = "2.10.1"
        elif differing == "threads":  # told only: a forked process that used two would wait for ever
            identity.arithmetic = lambda device: {"threads": str(1 + rank)}  # type: ignore[attr-defined]
        elif differing == "sets" and rank:
            os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
        elif differing == "device":
            name = "NVIDIA L4" if rank else "NVIDIA H100"
            identity.arithmetic = lambda device: {"device": name}  # type: ignore[attr-defined]

    run = Launched(tmp_path, commands, change)
    assert run.codes == [2, 2]
    message = " ".join(run.output[0].split())
    assert "rank 1 and rank 0 have different" in message and named in message, run.output
    assert run.output[1] == ""
    assert [path.name for path in tmp_path.iterdir() if path.name != "other"] == []


def dies(rank: int) -> None:
    """The second rank is killed in the second block."""
    before = work.Work._round

    def rounded(self: work.Work, layers: dict[str, Any], statistics: Any) -> Any:
        if rank == 1 and next(iter(layers)).startswith("model.layers.1."):
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self, layers, statistics)

    work.Work._round = rounded  # type: ignore[method-assign]


def test_a_rank_dies_and_the_run_goes_on_later(models: Path, whole: Path, tmp_path: Path) -> None:
    run = Launched(tmp_path, [arguments(models, tmp_path / "out")] * 3, dies)
    assert run.codes == [1, -signal.SIGKILL, 1]
    assert run.ended - float(run.output[1]) < 60
    for message in (run.output[0], run.output[2]):
        assert "Traceback" not in message
        assert len([line for line in message.splitlines() if line.startswith("epiloq quantize: ")]) == 1
        assert "continues from there" in message
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    run = Launched(tmp_path, [arguments(models, tmp_path / "out")] * 2)
    assert run.codes == [0, 0]
    same_files(tmp_path / "out", whole)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def full_disk(rank: int) -> None:
    """The first rank cannot keep the first block; of the last one the other ranks, which are done, would not hear."""
    before = store.Store.write

    def write(self: store.Store, block: Any) -> None:
        if block.name.endswith("0"):
            raise OSError(28, "No space left on device")
        before(self, block)

    store.Store.write = write  # type: ignore[method-assign]


def test_a_disk_fills(models: Path, whole: Path, tmp_path: Path) -> None:
    run = Launched(tmp_path, [arguments(models, tmp_path / "out")] * 2, full_disk)
    assert run.codes[0] == 1 and run.codes[1] > 0
    assert "No space left on device" in run.output[0] and "Traceback" not in "".join(run.output)
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    assert Launched(tmp_path, [arguments(models, tmp_path / "out")]).codes == [0]
    same_files(tmp_path / "out", whole)
