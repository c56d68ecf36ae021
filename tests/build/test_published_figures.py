"""README's and docs/performance.md's tables are those of benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

import documents

RESULTS = documents.ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="the documentation is in the checkout only")


def rows_of(page: Path) -> list[list[str]]:
    """The cells of every table row."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def is_published(numbers: list[str], page: str = "docs/performance.md") -> bool:
    """Whether some row ends in these cells."""
    return any(row[-len(numbers) :] == numbers for row in rows_of(documents.ROOT / page))


def summaries(name: str, peer: str) -> Iterator[tuple[str, list[str]]]:
    """Of each variant the ratios to a peer by M."""
    found: dict[str, list[str]] = {}
    for row in load(name)["summary"]:
        if row["group"].startswith("M = ") and peer in row["peers"]:
            found.setdefault(row["variant"], []).append(f"{row['peers'][peer]:.2f}")
    yield from found.items()


def test_products() -> None:
    record = load("nvidia-h200/products")
    for row in record["rows"]:
        assert is_published([f"{ratio:.2f}" for ratio in row["ratio"].values()]), row
    readme = " ".join((documents.ROOT / "README.md").read_text(encoding="utf-8").split())
    cited = (("int8", "vllm cutlass_scaled_mm"), ("fp8_rows", "torch._scaled_mm"), ("fp8_1x128", "deep_gemm"))
    for row in record["rows"]:
        if (row["variant"], row["peer"]) in (*cited, ("w4a16_g128", "vllm machete")):
            ratios = row["ratio"].values()
            assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in readme, row


def test_w4a8_and_experts_beside_vllm() -> None:
    """Geometric means over layers by number of tokens, and every layer of experts by number of tokens."""
    readme = " ".join((documents.ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = load("nvidia-h200/w4a8")["rows"]
    for peer in ("vllm_us", "fp8_us", "bf16_us"):
        of_m: dict[int, list[float]] = {}
        for row in rows:
            of_m.setdefault(row["m"], []).append(row[peer] / row["w4a8_us"])
        means = [geometric_mean(ratios) for ratios in of_m.values()]
        assert is_published([f"{mean:.2f}" for mean in means]), peer
        assert peer != "vllm_us" or f"{min(means):.2f} to {max(means):.2f} times vLLM" in readme
    ratios: dict[tuple[str, str], list[float]] = {}
    record = load("nvidia-h200/mixtures/vllm_experts")
    for row in record["rows"] + record["earlier"]["rows"]:
        ratios.setdefault((row["experts"], row["kind"]), []).append(row["vllm_us"] / row["epiloq_us"])
    for layer, of_layer in ratios.items():
        assert is_published([f"{ratio:.2f}" for ratio in of_layer], "docs/guide/engines.md"), layer
    every = [ratio for of_layer in ratios.values() for ratio in of_layer]
    assert f"experts {min(every):.2f} to {max(every):.2f} times vLLM" in readme


def test_4_bit_checkpoints_in_vllm() -> None:
    """Dense and with experts, compiled by vLLM or not; the smallest and the largest ratio."""
    record = load("nvidia-h200/engines")
    rates: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in (*record["rows"], *record["mixtures"]["rows"]):
        if row["kind"] == "w4a16":
            case = row.get("model"), row.get("compile"), row["batch"]
            rates.setdefault(case, {})[row["contender"]] = row["tok_s"]
    ratios = [of_case["epiloq"] / of_case["vllm"] for of_case in rates.values()]
    readme = (documents.ROOT / "README.md").read_text(encoding="utf-8")
    assert len(ratios) == 7 and f"{min(ratios):.2f} to {max(ratios):.2f} times as many tokens" in readme


def test_whole_engines_with_experts() -> None:
    found: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}
    for row in load("nvidia-h200/engines")["mixtures"]["rows"]:
        found.setdefault((row["model"], row["kind"], row["batch"]), {})[row["contender"]] = row
    for of_batch in found.values():
        vllm, own = of_batch["vllm"], of_batch["epiloq"]
        rates = [f"{vllm['tok_s']:,.0f}", f"{own['tok_s']:,.0f} ({own['tok_s'] / vllm['tok_s']:.2f}x)"]
        steps = [f"{vllm['step_ms']:.2f}", f"{own['step_ms']:.2f} ({vllm['step_ms'] / own['step_ms']:.2f}x)"]
        assert is_published([*rates, *steps], "docs/guide/engines.md"), of_batch


def test_gemv_for_experts() -> None:
    for row in load("nvidia-h200/mixtures/many_experts")["gemv"]["rows"]:
        if "chosen" in row:
            before, us = row["us"]["before"], row["us"][row["chosen"]]
            numbers = [f"{before:.1f}", f"{us:.1f}", f"{100 * row['bytes_us'] / us:.0f} %"]
            assert is_published([str(row["tokens"]), *numbers]), row


def test_tiles_for_experts_with_few_rows() -> None:
    shown = 0
    for row in load("nvidia-h200/experts")["few_rows"]["rows"]:
        us = [f"{row[f'us_{weights}_weights']:.1f}" for weights in (64, 128)]
        share = 100 * row["floor_us"] / row["us_128_weights"]
        shown += is_published([f"{row['tokens']}", f"{row['with_rows']:.0f}", *us, f"{share:.0f}"])
    assert shown == 7


@pytest.mark.parametrize("page", ["README.md", "docs/guide/whole_models.md"])
def test_tables_of_whole_models_are_those_of_the_record(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(documents.ROOT / "tools" / "figures"))
    tables = pytest.importorskip("model_table")  # typer is not always there
    text = (documents.ROOT / page).read_text(encoding="utf-8")
    assert "made by tools/figures/model_table.py" in text
    schemes = {
        "whole_model": {"w4a16-g128", "fp8-token"},
        "whole_model_eager": {"w4a16-g128", "fp8-token"},
        "mixtures/qwen3-30b-a3b": {"w4a16-g128", "fp8-block"},
        "mixtures/gpt-oss-20b": {"w4a16-mxfp4"},
    }
    for name, of_record in schemes.items():
        record = tables.read(RESULTS / "nvidia-h200" / f"{name}.json")
        assert tables.written(text, record) == text
        assert {row.scheme for row in record.rows} >= {"none"} | of_record


def test_models() -> None:
    for row in load("nvidia-h200/models")["rows"]:
        numbers = list(row["tokens_per_s"].values())
        assert is_published([f"{n:,}" for n in numbers]) or is_published([str(n) for n in numbers]), row


@pytest.mark.parametrize(
    ("name", "peer"),
    [("nvidia-h200/layers", "bf16"), ("nvidia-h100/weight_only", "dense"), ("nvidia-h100/online_quant", "bf16")],
)
def test_ratios_by_m(name: str, peer: str) -> None:
    for variant, ratios in summaries(name, peer):
        assert is_published(ratios), (variant, ratios)


def test_experts() -> None:
    for row in load("nvidia-h200/experts")["summary"]:
        if row["operation"] == "grouped_mm" and row["group"].startswith("M = ") and "ragged" not in row["variant"]:
            peers = [row["peers"].get(peer) for peer in ("separate", "_grouped_mm", "_scaled_grouped_mm", "triton")]
            numbers = [f"{ratio:.2f}" if ratio else "" for ratio in peers]
            assert is_published([*numbers, f"{row['percent_of_floor']:.0f}"]), row


def test_there_is_little_and_all_of_it_is_cited() -> None:
    files = list(RESULTS.rglob("*.*"))
    assert sum(file.stat().st_size for file in files) < 300_000
    text = (documents.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [file.name for file in files if f"`{file.name}`" not in text] == []
    for file in files:
        if "accuracy" in file.parts:  # rows of several commits; test_scheme_table.py holds them beside the guide
            continue
        assert load(str(file.relative_to(RESULTS).with_suffix("")))["commit"][:7] in text, file
