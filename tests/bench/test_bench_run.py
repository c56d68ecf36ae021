"""Benchmarks: the rows of a run, what a wrong result does, the picture, the command line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import epiloq
from epiloq.bench import cli, environment, floor
from epiloq.bench.cases import Case
from epiloq.bench.contract import Bound, Inputs, Operation
from epiloq.bench.floor import Ceiling, ReadFloor, ReadSample
from epiloq.bench.operations import OPERATIONS, expand
from epiloq.bench.plot import plot
from epiloq.bench.report import Report, render
from epiloq.bench.runner import Bench, Row
from epiloq.bench.summary import summarise
from epiloq.bench.timing import TIMERS, CpuTimer, CudaTimer, cache_bytes

CPU = torch.device("cpu")
READ = ReadFloor(overhead_us=2.0, bytes_per_us=5e4, samples=(ReadSample(1 << 20, 23.0, "made up"),))
INT8 = Ceiling(0.5, "made up")
CASES = [Case("scaled_mm", "bias", "odd", 17, 100, 33), Case("quantize_int8", "token_azp", "", 5, 0, 577)]


def make_bench(seed: int, **changes: object) -> Bench:
    generator = torch.Generator(CPU).manual_seed(seed)
    bench = Bench(CPU, CpuTimer(0.002), READ, {"int8": INT8}, OPERATIONS, generator, cache=1 << 16)
    return replace(bench, **changes)  # type: ignore[arg-type]


def make_report(bench: Bench, cases: Sequence[Case]) -> Report:
    rows = [row for case in cases for row in bench.run(case)]
    return Report({"torch": torch.__version__}, READ, {"int8": INT8}, rows)


# --- the runner


def test_rows_relate_time_to_work_bytes_and_floor(seed: int) -> None:
    report = make_report(make_bench(seed, peer_names=("_int_mm", "eager")), CASES)
    gemm, quantiser = report.rows
    assert gemm.status == quantiser.status == "ok" and not report.failed
    assert gemm.time_us and gemm.tops == pytest.approx(2 * 17 * 100 * 33 / gemm.time_us / 1e6)
    nbytes = 17 * 33 + 33 * 100 + 4 * 17 + 4 * 100 + 2 * 100 + 2 * 17 * 100
    assert gemm.gb_s == pytest.approx(nbytes / gemm.time_us / 1e3)
    floors = {"read": READ.us(nbytes), "arithmetic": 2 * 17 * 100 * 33 / 0.5e6}
    assert gemm.floor_us == pytest.approx(max(floors.values())) and gemm.bound == max(floors, key=floors.__getitem__)
    assert gemm.percent_of_floor == pytest.approx(100 * max(floors.values()) / gemm.time_us)
    for peer in gemm.peers.values():
        assert peer.time_us is None or peer.ratio == pytest.approx(peer.time_us / gemm.time_us)
    assert quantiser.tops is None and quantiser.bound == "read"
    assert quantiser.floor_us == pytest.approx(READ.us(5 * 577 * 2 + 5 * 577 + 5 * 8))


def test_a_measured_rate_that_a_case_exceeds_gives_no_percentage(seed: int) -> None:
    slow = {"int8": Ceiling(1e-6, "made up")}
    (row,) = make_report(make_bench(seed, ceilings=slow, peer_names=("_int_mm",)), CASES[:1]).rows
    assert row.status == "ok" and row.time_us and row.floor_us and row.floor_us > row.time_us
    assert row.percent_of_floor is None


def test_json_has_the_schema(seed: int, tmp_path: Path) -> None:
    bench = make_bench(seed, peer_names=("_int_mm", "eager"))
    report = make_report(bench, CASES)
    report.host = list(bench.host_times(CASES))
    target = tmp_path / "run.json"
    report.write(target)
    read = json.loads(target.read_text())
    assert {"schema", "environment", "floor", "ceilings", "rows", "host", "summary", "absent_peers"} == set(read)
    assert read["schema"] == 1 and list(tmp_path.iterdir()) == [target]
    assert [(r["operation"], r["m"], r["n"], r["k"]) for r in read["rows"]] == [
        ("scaled_mm", 17, 100, 33),
        ("quantize_int8", 5, 0, 577),
    ]
    assert set(read["rows"][0]) == set(Row.__dataclass_fields__)
    assert list(read["rows"][0]["peers"]) == ["_int_mm"] and read["rows"][0]["peers"]["_int_mm"]["time_us"] > 0
    assert {entry["contender"] for entry in read["host"]} == {"epiloq", "_int_mm", "eager"}
    assert read["floor"]["samples"][0]["nbytes"] == 1 << 20 and read["ceilings"]["int8"]["tops"] == 0.5
    text = render(report)
    assert "scaled_mm, geometric means" in text and "x _int_mm" in text and "read floor: 2.00 us" in text


SCALED_MM = OPERATIONS["scaled_mm"]


def _wrong(case: Case, sets: Sequence[Inputs]) -> Bound:
    def call(inputs: Inputs) -> torch.Tensor:
        right = SCALED_MM.bind(case, [inputs]).calls[0]()
        assert isinstance(right, torch.Tensor)
        return torch.full_like(right, math.nan)

    return Bound([partial(call, s) for s in sets])


def _raises(error: Exception, case: Case, sets: Sequence[Inputs]) -> Bound:
    raise error


@pytest.mark.parametrize(
    ("binder", "status", "reason"),
    [
        (_wrong, "FAILED", "tolerance"),
        (partial(_raises, RuntimeError("launch failed")), "FAILED", "launch failed"),
        (partial(_raises, NotImplementedError("no kernel")), "unsupported", "no kernel"),
    ],
)
def test_wrong_result_is_reported_and_not_timed(binder: object, status: str, reason: str, seed: int) -> None:
    wrong: Operation = replace(OPERATIONS["scaled_mm"], bind=binder)  # type: ignore[arg-type]
    report = make_report(make_bench(seed, operations={"scaled_mm": wrong}, peer_names=("_int_mm",)), CASES[:1])
    (row,) = report.rows
    assert row.status == status and reason in row.reason
    assert row.time_us is None and row.peers["_int_mm"].ratio is None
    assert bool(report.failed) == (status == "FAILED")
    assert status in render(report) and json.dumps(report.as_json(), allow_nan=False)


def test_missing_peers_give_their_reasons(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    peers = dict(OPERATIONS["scaled_mm"].peers)
    peers["broken"] = partial(_raises, TypeError("other signature"))
    operations = {**OPERATIONS, "scaled_mm": replace(OPERATIONS["scaled_mm"], peers=peers)}
    report = make_report(make_bench(seed, operations=operations), CASES[:1])
    absent = report.absent_peers()
    assert set(absent) == {"scaled_mm: vllm", "scaled_mm: sgl_kernel", "scaled_mm: broken"}
    assert "sgl_kernel" in absent["scaled_mm: sgl_kernel"] and "other signature" in absent["scaled_mm: broken"]
    assert report.rows[0].peers["vllm"].time_us is None and report.rows[0].status == "ok"


def test_forced_arch_is_a_row_beside_the_default(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[str] = []

    class Config:
        def __init__(self, arch: str) -> None:
            forced.append(arch)

        def __enter__(self) -> None: ...
        def __exit__(self, *details: object) -> None: ...

    monkeypatch.setattr(epiloq, "config", Config)
    report = make_report(make_bench(seed, archs=("auto", "sm80"), peer_names=("_int_mm",)), CASES)
    assert forced == ["sm80"] and [row.arch for row in report.rows] == ["auto", "sm80", "auto"]
    own = report.rows[1].peers["epiloq"]
    assert own.time_us == report.rows[0].time_us and "epiloq" not in report.rows[0].peers
    assert {summary.arch for summary in summarise(report.rows)} == {"auto", "sm80"}


def test_geometric_means_by_rows_of_m(seed: int) -> None:
    cases = [replace(CASES[0], m=m, k=k) for m in (1, 1024) for k in (32, 64)]
    report = make_report(make_bench(seed, peer_names=("_int_mm",)), cases)
    means = {summary.group: summary for summary in summarise(report.rows)}
    assert set(means) == {"M = 1", "M = 1024", "M <= 64", "M >= 1024", "every M"}
    ratios = [row.peers["_int_mm"].ratio or math.nan for row in report.rows]
    assert means["M = 1"].peers["_int_mm"] == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    assert means["every M"].rows == 4
    assert means["every M"].peers["_int_mm"] == pytest.approx(math.prod(ratios) ** 0.25)


# --- the picture


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_is_a_picture(suffix: str, seed: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report(make_bench(seed, peer_names=("_int_mm", "bf16", "eager")), CASES)
    target = tmp_path / f"run.{suffix}"
    plot(report.rows, target, "title")
    if suffix == "png":
        from matplotlib.image import imread

        picture = imread(target)
        assert target.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and picture.ndim == 3 and picture.std() > 0
    else:
        assert ElementTree.parse(target).getroot().tag.endswith("svg")
    with pytest.raises(ValueError, match="at least one row"):
        plot([], target, "nothing")


# --- the command line


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "cache_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(floor, "cache_bytes", lambda device: 1 << 20)
    monkeypatch.setitem(floor.READ_MIB, "cpu", (1, 4))
    monkeypatch.setitem(floor.MEASURED_EDGE, "cpu", 256)
    monkeypatch.setitem(TIMERS, "cpu", partial(CpuTimer, 0.002))


def test_bench_writes_text_json_and_picture(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "run.json", tmp_path / "run.png"]
    options = ["--suite", "smollm2", "--op", "scaled_mm", "--m", "1", "--m", "17", "--peer", "_int_mm", "--seed", "3"]
    options += ["--device", "cpu", "--commit", "abc", "--json", str(files[0]), "--plot", str(files[1])]
    monkeypatch.setattr(sys, "argv", ["epiloq", *options])
    cli.main()
    out, err = capsys.readouterr()
    assert "[8/8] scaled_mm scaled 576x1536 M=17" in err and "scaled_mm, geometric means" in out
    run = json.loads(files[0].read_text())
    assert len(run["rows"]) == 8 and run["environment"]["commit"] == "abc" and run["environment"]["seed"] == 3
    assert run["environment"]["command"].startswith("epiloq bench --suite smollm2") and files[1].stat().st_size > 1000
    # Results are read on other machines: files are named without their folders.
    assert run["environment"]["command"].endswith("--json run.json --plot run.png")


def test_commands_name_no_folders_of_the_machine() -> None:
    typed = ["bench", "--json=/somewhere/else/run.json", "/a/b", "results/run.json", "--m", "1"]
    assert environment.command(typed) == "epiloq bench --json=run.json b results/run.json --m 1"


def test_bench_exits_with_1_on_a_wrong_result(
    small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATIONS, "scaled_mm", replace(OPERATIONS["scaled_mm"], bind=_wrong))
    with pytest.raises(SystemExit) as exit_:
        cli.bench(suite=["smollm2"], op=["scaled_mm"], m=[1], peer=["_int_mm"], device="cpu")
    assert exit_.value.code == 1
    out, err = capsys.readouterr()
    assert "4 of 4 rows FAILED" in err and out.count("FAILED: error nan times the tolerance") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": ["llama2"]}, "--suite: expected one of"),
        ({"op": ["fp8"]}, "--op: expected one of"),
        ({"variant": ["bais"]}, "--variant: expected one of"),
        ({"peer": ["cublas"]}, "--peer: expected one of"),
        ({"device": "tpu9"}, "--device: expected"),
        ({"device": "cuda:99"}, "--device: expected"),
        ({"device": "cpu", "settle": 8.0}, "--settle: expected 1 to 1000 milliseconds on a GPU, got 8 on cpu"),
        ({"variant": ["static"], "op": ["scaled_mm"]}, "at least one case"),
        ({"json": Path("no/such/folder/run.json")}, "--json: expected a file in a folder that exists"),
        ({"plot": Path("run.pdf")}, "--plot: expected a name that ends in .png or .svg"),
    ],
)
def test_bad_options_exit_with_2(options: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.bench(**options)  # type: ignore[arg-type]
    assert exit_.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_runs_without_typer_rich_and_matplotlib() -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib')));"
    code = f"{absent} sys.argv = ['bench', '--help']; from epiloq.bench.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all(f"--{name}" in done.stdout for name in ("suite", "arch", "json", "plot"))


def test_typer_reads_the_same_options() -> None:
    typer = pytest.importorskip("typer")
    command = typer.main.get_command(_typer_app(typer))
    parser = {action.dest: action.help for action in cli._parser()._actions if action.dest != "help"}
    assert {p.name: p.help for p in command.params if p.name in parser} == parser


def _typer_app(typer: object) -> object:
    app = typer.Typer(add_completion=False)  # type: ignore[attr-defined]
    app.command()(cli.bench)
    return app


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.alone
def test_rows_on_a_gpu(seed: int) -> None:
    device = torch.device("cuda")
    timer = CudaTimer()
    measured = floor.measure_read_floor(device, timer, [1, 16, 64])
    ceilings = {"int8": floor.CEILINGS["int8"](device, timer)}
    generator = torch.Generator(device).manual_seed(seed)
    peers = ("_int_mm", "eager")
    bench = Bench(device, timer, measured, ceilings, OPERATIONS, generator, cache_bytes(device), peer_names=peers)
    for case in expand(["quick"], tokens=[16, 256]):
        for row in bench.run(case):
            assert row.status == "ok", row
            assert row.percent_of_floor and row.percent_of_floor > 1, row
            assert not row.cold or row.percent_of_floor < 120, row
            assert row.host_us and row.host_us < 1000, row
            assert any(peer.time_us for peer in row.peers.values()), row
