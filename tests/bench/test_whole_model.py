"""`epiloq bench --model`: a whole model by its phases, schemes and modes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from epiloq.bench import whole_model
from epiloq.bench.cli import bench
from epiloq.bench.whole_model import Plan, run_plan, table

PLAN = Plan("tiny", ["w4a16-g32", "w8a8-int8"], ["eager"], [1, 3], 16)


def test_every_contender(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(whole_model._REPEATS, "cpu", 1)
    said: list[str] = []
    results = run_plan(PLAN, "cpu", said.append)
    assert len(results) == len(said) == 5 * 3
    assert {(r.scheme, r.optimized) for r in results} >= {("none", False), ("w8a8-int8", True)}
    for result in results:
        count = result.batch * (16 if result.phase == "prefill" else 1)
        assert result.tokens_per_second == pytest.approx(1e3 * count / result.milliseconds)
        assert result.milliseconds > 0 and result.us_a_layer >= 0
    weights = {r.scheme: r.weight_megabytes for r in results}
    assert weights["w4a16-g32"] < weights["w8a8-int8"] < weights["none"]
    lines = table(results).splitlines()
    assert len(lines) == 16 and lines[1].endswith("1.00") and "w4a16-g32 optimised" in lines[8]


def test_command(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    record, picture = tmp_path / "m.json", tmp_path / "m.png"
    options = {"scheme": ["w8a16"], "context": 8, "device": "cpu"}
    bench(model="tiny", json=record, plot=picture, **options)  # type: ignore[arg-type]
    rows = json.loads(record.read_text())["rows"]
    assert [row["scheme"] for row in rows] == 2 * ["none"] + 4 * ["w8a16"] and picture.stat().st_size > 1000
    assert "w8a16 optimised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no-such"}, "bench: --model: expected a directory or one of llama-3-8b"),
        ({"model": "tiny", "scheme": ["w5"]}, "bench: --scheme: expected one of w8a8-int8"),
        ({"model": "tiny", "scheme": ["w8a8-int8-static"]}, "bench: --scheme: expected one of"),
        ({"model": "tiny", "mode": ["fast"]}, "bench: --mode: expected one of eager, graph, compile, got 'fast'"),
        ({"model": "tiny", "batch": [0]}, "bench: --batch: expected at least 1, got 0"),
        ({"model": "tiny", "json": Path("/no/such/m.json")}, "bench: --json: expected a file in a folder that exists"),
    ],
)
def test_refusals(options: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench(device="cpu", **options)  # type: ignore[arg-type]
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("compile", marks=pytest.mark.slow)])
def test_on_a_gpu(seed: int, mode: str) -> None:
    results = run_plan(Plan("tiny", ["fp8-token", "w4a16-g32"], [mode], [2], 32), "cuda", lambda _: None)
    assert len(results) == 10 and all(r.milliseconds > 0 and r.peak_megabytes > 0 for r in results)
    assert torch.cuda.is_available()
