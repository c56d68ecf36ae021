"""`epiloq bench --model`: a whole model by its phases, schemes and modes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from epiloq.bench.cli import bench
from epiloq.bench.models import contenders, measure
from epiloq.bench.models.measure import run_plan
from epiloq.bench.models.plan import Extras, Plan
from epiloq.bench.models.report import table
from epiloq.bench.peers.whole_models import PEERS

PLAN = Plan("tiny", ["w4a16-g32", "w8a8-int8"], ["eager"], [1, 3], 16)


@pytest.mark.slow
def test_every_contender(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure._REPEATS, "cpu", 1)
    text: list[str] = []
    results = run_plan(PLAN, "cpu", text.append)
    assert len(results) == len(text) == 5 * 3
    assert {(r.scheme, r.optimized) for r in results} >= {("none", False), ("w8a8-int8", True)}
    for result in results:
        count = result.batch * (16 if result.phase == "prefill" else 1)
        assert result.tokens_per_second == pytest.approx(1e3 * count / result.milliseconds)
        assert result.milliseconds > 0 and result.us_a_layer >= 0
    weights = {r.scheme: r.weight_megabytes for r in results}
    assert weights["w4a16-g32"] < weights["w8a8-int8"] < weights["none"]
    lines = table(results).splitlines()
    assert len(lines) == 16 and lines[1].endswith("1.00") and "w4a16-g32 optimised" in lines[8]


def test_layer_time_excludes_embedding_and_head(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock by which the model itself takes 100 ms and a layer one."""
    model, clock = contenders.build("tiny", 3, torch.bfloat16, "cpu"), [0]

    def takes(module: torch.nn.Module, milliseconds: int) -> None:
        module.register_forward_pre_hook(lambda *_: clock.append(milliseconds))

    def timed(run: Callable[[], object], device: str, repeats: int) -> float:
        clock.clear()
        run()
        return sum(clock)

    takes(model.model, 100)
    for layer in model.model.layers:
        takes(layer, 1)
    monkeypatch.setattr(measure, "_timed", timed)
    for phase in ("prefill", "decode"):
        row = measure.measure(model, "none", False, "eager", phase, 1, 8)
        assert row.milliseconds == 103 and row.us_a_layer == 1000
    assert model.config.num_hidden_layers == 3


def test_a_mixture_of_experts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure._REPEATS, "cpu", 1)
    plan = Plan("tiny-moe", ["w4a16-g32"], ["eager"], [2], 8, forms=["optimised"])
    results = run_plan(plan, "cpu", lambda _: None)
    assert [(r.scheme, r.phase) for r in results] == [
        (s, p) for s in ("none", "w4a16-g32") for p in ("prefill", "decode")
    ]
    before, after = (r.layer_megabytes for r in results[::2])
    assert after < before / 2  # so the experts are quantised
    without = run_plan(replace(plan, ignore=["*self_attn*"]), "cpu", lambda _: None)
    assert after < without[2].layer_megabytes < before
    assert [r.ignore for r in without] == [(), (), ("*self_attn*",), ("*self_attn*",)]


@pytest.mark.slow
def test_figures_of_more_layers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure._REPEATS, "cpu", 1)
    plan = Plan("tiny", ["w4a16-g32"], ["eager"], [2], 8, prompt=24, forms=["optimised"])
    kept: list[int] = []
    results = run_plan(plan, "cpu", lambda _: None, keep=lambda rows: kept.append(len(rows)))
    assert kept == [2, 4] and [r.optimized for r in results] == 2 * [False] + 2 * [True]
    assert [(r.phase, r.batch, r.tokens) for r in results] == 2 * [("prefill", 1, 24), ("decode", 2, 8)]
    for row in results:
        model = contenders.prepare(contenders.build("tiny", 5, torch.bfloat16, "cpu"), row.scheme, row.optimized)
        more = row.of_layers(5)
        assert more.weight_megabytes == pytest.approx(sum(p.nbytes for p in model.parameters()) / 1e6)
        assert more.milliseconds == pytest.approx(row.milliseconds + 3e-3 * row.us_a_layer)
        count = row.batch * (24 if row.phase == "prefill" else 1)
        assert more.tokens_per_second == pytest.approx(1e3 * count / more.milliseconds)
        assert row.of_layers(2) == row


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("cache", [None, "int8"])
def test_generate(seed: int, monkeypatch: pytest.MonkeyPatch, mode: str, cache: str | None) -> None:
    """As many new tokens as asked for, also of a model for which every token ends the text."""
    model = contenders.prepare(contenders.build("tiny", 2, torch.bfloat16, "cpu"), "w8a16", True)
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    generate, shapes = model.generate, set()

    def observed(*arguments: Any, **options: Any) -> Any:
        found = generate(*arguments, **options)
        shapes.add(tuple(found.shape))
        return found

    monkeypatch.setattr(model, "generate", observed)
    row = measure.measure_generate(model, "w8a16", True, mode, 2, 8, 5, cache)
    assert shapes == {(2, 8 + 5)} and row.phase == "generate" and row.tokens == 5
    assert row.tokens_per_second == pytest.approx(1e3 * 2 * 5 / row.milliseconds)
    assert " - " in table([row]).splitlines()[1]


@pytest.mark.slow
def test_modes_that_generate(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure._REPEATS, "cpu", 1)
    plan = Plan("tiny", [], ["eager", "graph"], [1, 2], 8, generate=3)
    found = [(row.mode, row.batch) for row in run_plan(plan, "cpu", lambda _: None) if row.phase == "own loop"]
    assert found == [("eager", 1), ("eager", 2)]


def test_command(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    record, picture = tmp_path / "m.json", tmp_path / "m.png"
    options = {"scheme": ["w8a16"], "context": 8, "device": "cpu"}
    bench(model="tiny", json=record, plot=picture, **options)  # type: ignore[arg-type]
    rows = json.loads(record.read_text())["rows"]
    assert [row["scheme"] for row in rows] == 2 * ["none"] + 4 * ["w8a16"] and picture.stat().st_size > 1000
    assert "w8a16 optimised" in capsys.readouterr().out


@pytest.mark.slow
def test_shares_head_and_cache(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    record, picture = tmp_path / "m.json", tmp_path / "m.png"
    options = {"scheme": ["w4a16-g32"], "context": 8, "device": "cpu", "head": "w8a16", "cache": "int8", "shares": 3}
    bench(model="tiny", json=record, plot=picture, **options)  # type: ignore[arg-type]
    found = json.loads(record.read_text())
    for contender in ("none", "w4a16-g32", "w4a16-g32 optimised"):
        own = [share for share in found["shares"] if share["contender"] == contender]
        parts = [share["share"] for share in own]
        assert len(own) > 3 and sum(parts) == pytest.approx(1) and parts == sorted(parts, reverse=True)
        assert all(share["calls"] > 0 for share in own)
    text = capsys.readouterr().out
    lines = text[text.index("share of a decode step") :].splitlines()
    assert len(lines) == 1 + 3 * 4 and lines[4].endswith("others")
    assert picture.with_stem("m_shares").stat().st_size > 1000
    heads = {row["scheme"]: row["weight_megabytes"] for row in found["rows"]}
    assert heads["w4a16-g32"] < 0.6 * heads["none"]


@pytest.mark.slow
def test_peers(seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are installed are measured, the others named."""
    monkeypatch.setitem(measure._REPEATS, "cpu", 1)
    extras, plan = Extras(), Plan("tiny", [], ["eager"], [1], 8, peers=tuple(PEERS))
    results = run_plan(plan, "cpu", print, extras)
    assert {r.scheme for r in results} | extras.left_out.keys() == {"none", *PEERS}
    assert all(reason for reason in extras.left_out.values())
    with pytest.raises(SystemExit):
        bench(model="tiny", device="cpu", peer=["torch"])
    assert "bench: --peer: expected one of torchao-int8" in capsys.readouterr().err


class _FailsInDecode(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear, error: Exception) -> None:
        super().__init__()
        self.linear, self.error = linear, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 1:
            raise self.error
        y: torch.Tensor = self.linear(x)
        return y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("quantised", AssertionError()),
        ("measured", TypeError("no kernel\nfor this")),
        ("measured", RuntimeError("out of memory")),
    ],
)
def test_a_peer_that_fails_is_left_out(
    seed: int, monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception
) -> None:
    """By name and reason; what was measured of it before, and the others, are kept."""

    def failing(model: Any) -> Any:
        if fails == "quantised":
            raise error
        layer = model.model.layers[0].mlp
        layer.up_proj = _FailsInDecode(layer.up_proj, error)
        return model

    monkeypatch.setitem(measure._REPEATS, "cpu", 1)
    monkeypatch.setitem(PEERS, "failing", failing)
    monkeypatch.setitem(PEERS, "other", lambda model: model)
    extras, kept, text = Extras(), [], []
    plan = Plan("tiny", [], ["eager"], [1], 8, peers=("failing", "other"), shares=True)
    results = run_plan(plan, "cpu", text.append, extras, lambda rows: kept.append(len(rows)))
    of_failing = [] if fails == "quantised" else ["prefill"]
    assert [r.phase for r in results if r.scheme == "failing"] == of_failing
    assert [r.scheme for r in results if r.phase == "decode"] == ["none", "other"]
    assert kept == [2, 2 + len(of_failing), 4 + len(of_failing)]
    kind = type(error).__name__
    reason = {"": kind, "no kernel\nfor this": f"{kind}: no kernel"}.get(str(error), f"{kind}: {error}")
    expected = reason if fails == "quantised" else f"eager, decode, batch 1: {reason}"
    assert extras.left_out == {"failing": expected} and f"failing is left out: {expected}" in text
    assert {share.contender for share in extras.shares} == {"none", "other"}


def test_an_own_scheme_that_fails_stops_the_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(measure, "measure", fails)
    with pytest.raises(RuntimeError, match="a defect"):
        run_plan(Plan("tiny", [], ["eager"], [1], 8), "cpu", print)


def test_bitsandbytes_layers(seed: int) -> None:
    package = pytest.importorskip("bitsandbytes")
    model = contenders.build("tiny", None, torch.bfloat16, "cpu")
    ids = torch.arange(12)[None]
    expected = model(ids).logits
    quantised = contenders.prepare(model, "bitsandbytes-nf4", False)
    layer = quantised.get_submodule("model.layers.0.mlp.up_proj")
    assert type(layer) is package.nn.Linear4bit and layer.weight.dtype == torch.uint8
    assert type(quantised.get_submodule("lm_head")) is torch.nn.Linear
    error = (quantised(ids).logits - expected).float().norm() / expected.float().norm()
    assert 0 < float(error) < 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no-such"}, "bench: --model: expected a directory or one of llama-3-8b"),
        ({"model": "tiny", "scheme": ["w5"]}, "bench: --scheme: expected one of w8a8-int8"),
        ({"model": "tiny", "scheme": ["w8a8-int8-static"]}, "bench: --scheme: expected one of"),
        ({"model": "tiny", "mode": ["fast"]}, "bench: --mode: expected one of eager, graph, compile, got 'fast'"),
        ({"model": "tiny", "head": "w5"}, "bench: --head: expected one of w8a8-int8"),
        ({"model": "tiny", "cache": "int4"}, "bench: --cache: expected one of int8, fp8, got 'int4'"),
        ({"model": "tiny", "form": ["fast"]}, "bench: --form: expected one of plain, optimised, got 'fast'"),
        ({"model": "tiny", "prompt": -1}, "bench: --prompt: expected at least 1, got -1"),
        ({"model": "tiny", "shares": -1}, "bench: --shares: expected at least 0, got -1"),
        ({"model": "tiny", "ignore": ["lm_tail"]}, "ignore: expected"),
        ({"model": "tiny", "batch": [0]}, "bench: --batch: expected at least 1, got 0"),
        ({"model": "tiny", "json": Path("/no/such/m.json")}, "bench: --json: expected a file in a folder that exists"),
    ],
)
def test_refusals(options: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench(device="cpu", **options)  # type: ignore[arg-type]
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_quantised_directory_is_refused(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another package's reader would open it, and the figures would be that package's."""
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=32)
    config.quantization_config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        bench(device="cpu", model=str(tmp_path), scheme=["w4a16-g32"])
    assert stopped.value.code == 2 and "expected a model in floating point" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("compile", marks=pytest.mark.slow)])
def test_on_a_gpu(seed: int, mode: str) -> None:
    results = run_plan(Plan("tiny", ["fp8-token", "w4a16-g32"], [mode], [2], 32), "cuda", lambda _: None)
    assert len(results) == 10 and all(r.milliseconds > 0 and r.peak_megabytes > 0 for r in results)
    assert torch.cuda.is_available()
