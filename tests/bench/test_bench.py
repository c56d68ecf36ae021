"""Benchmarks: the case data, the floor, the timing, and the checks of results."""

# torch.cuda's events are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epiloq.bench import floor
from epiloq.bench.cases import SUITES, Case
from epiloq.bench.contract import Unavailable
from epiloq.bench.floor import ReadSample, fit
from epiloq.bench.operations import OPERATIONS, default_peers, expand
from epiloq.bench.timing import (
    CACHE_MULTIPLE,
    FEWEST_SETS,
    MOST_SETS,
    CpuTimer,
    CudaTimer,
    cache_bytes,
    kernel_us,
    rotate,
)

CPU = torch.device("cpu")


# --- case data


@pytest.mark.parametrize("name", SUITES)
def test_suite_is_sane(name: str) -> None:
    suite = SUITES[name]
    assert len(set(suite.shapes)) == len(suite.shapes)
    assert len({shape.layer for shape in suite.shapes}) == len(suite.shapes)
    assert all(shape.n > 0 and shape.k > 0 for shape in suite.shapes)
    assert len(set(suite.tokens)) == len(suite.tokens) and min(suite.tokens) > 0
    for operation, variants in suite.variants.items():
        assert variants and set(variants) <= set(OPERATIONS[operation].variants)
    peers = {peer for operation in suite.variants for peer in OPERATIONS[operation].peers}
    assert set(default_peers([name])) == (set(suite.peers) or peers) <= peers
    cases = expand([name])
    assert cases and len(set(cases)) == len(cases)
    assert all((case.n > 0) == OPERATIONS[case.operation].has_weight for case in cases)


def test_required_shapes_and_tokens_are_there() -> None:
    seven = {(6144, 4096), (28672, 4096), (4096, 14336), (2112, 7168), (24576, 1536), (7168, 16384), (8192, 8192)}
    assert {(shape.n, shape.k) for shape in SUITES["h200"].shapes} == seven
    for name in ("h200", "llama3-8b", "llama3-70b", "deepseek-v3"):
        assert {1, 16, 64, 256, 1024, 4096} <= set(SUITES[name].tokens)


def test_quantisers_are_timed_beside_a_copy_of_64_megabytes_and_more() -> None:
    suite = SUITES["quantisers"]
    assert sum(2 * case.m * case.k >= 64e6 for case in expand(["quantisers"], ["quantize_int8"], ["token"])) == 2
    assert all("copy" in OPERATIONS[operation].peers for operation in suite.variants) and "copy" in suite.peers
    assert default_peers(["quantisers", "h200"]) == ["copy", "unfused", *OPERATIONS["scaled_mm"].peers]


def test_expand_filters_and_merges() -> None:
    assert expand(["quick", "quick"]) == expand(["quick"])
    chosen = expand(["quick"], operations=["scaled_mm"], variants=["azp", "bias", "static"], tokens=[100])
    assert {(c.operation, c.variant, c.m) for c in chosen} == {("scaled_mm", "azp", 100), ("scaled_mm", "bias", 100)}
    quantisers = expand(["llama3-8b"], operations=["quantize_int8"], tokens=[1])
    assert sorted(case.k for case in quantisers) == [4096, 14336], "shapes of one K are one case without a weight"


# --- the floor


@given(st.floats(0.1, 50), st.floats(1e3, 1e7))
def test_fit_recovers_overhead_and_bandwidth(overhead: float, bandwidth: float) -> None:
    sizes = [mib << 20 for mib in floor.READ_MIB["cuda"]]
    fitted = fit([ReadSample(size, overhead + size / bandwidth, "exact") for size in sizes])
    assert fitted.bytes_per_us == pytest.approx(bandwidth, rel=1e-6)
    # The overhead is a difference: its error is relative to the times that it is taken from.
    assert fitted.overhead_us == pytest.approx(overhead, rel=1e-6, abs=1e-9 * sizes[0] / bandwidth)
    assert fitted.us(sizes[3]) == pytest.approx(overhead + sizes[3] / bandwidth)


def test_fit_stands_noise(seed: int) -> None:
    noise = random.Random(seed)
    sizes = [mib << 20 for mib in floor.READ_MIB["cuda"]]
    samples = [ReadSample(size, (1.5 + size / 4.6e6) * noise.uniform(0.99, 1.01), "noisy") for size in sizes]
    fitted = fit(samples)
    assert fitted.bytes_per_us == pytest.approx(4.6e6, rel=0.02)
    assert fitted.overhead_us == pytest.approx(1.5, rel=0.1)


def test_fit_of_times_that_do_not_grow_takes_the_best_rate() -> None:
    fitted = fit([ReadSample(1000, 10.0, "disturbed"), ReadSample(2000, 8.0, "undisturbed")])
    assert (fitted.overhead_us, fitted.bytes_per_us) == (0, 250)


def test_read_floor_and_ceiling_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floor.MEASURED_EDGE, "cpu", 256)
    measured = floor.measure_read_floor(CPU, CpuTimer(0.01), [1, 8])
    assert [sample.nbytes for sample in measured.samples] == [1 << 20, 8 << 20]
    assert 1e2 < measured.bytes_per_us < 1e8 and measured.overhead_us == 0
    assert measured.bytes_per_us == max(sample.nbytes / sample.us for sample in measured.samples)
    ceiling = floor.CEILINGS["int8"](CPU, CpuTimer(0.01))
    assert ceiling.tops > 0 and "256^3" in ceiling.source and "epiloq.scaled_mm" in ceiling.source
    assert ceiling.us(int(ceiling.tops * 1e12)) == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_datasheet_entry_is_of_that_very_card(name: str, entry: str | None) -> None:
    assert floor.datasheet_entry(name) == entry


# --- timing


def test_rotate_stays_cold_and_keeps_strides(seed: int) -> None:
    cache = 1 << 16
    generator = torch.Generator(CPU).manual_seed(seed)
    inputs = OPERATIONS["scaled_mm"].inputs(Case("scaled_mm", "scaled", "", 17, 100, 576), generator)
    sets, cold = rotate(inputs, cache)
    assert cold and sum(t.nbytes for s in sets for t in s.values()) >= CACHE_MULTIPLE[CPU.type] * cache
    assert len({s["b"].data_ptr() for s in sets}) == len(sets)
    assert all(s["b"].stride() == (1, 576) and torch.equal(s["b"], inputs["b"]) for s in sets)
    padded = torch.arange(12.0).view(3, 4).t()[:1]
    assert all(s["x"].stride() == (1, 4) and torch.equal(s["x"], padded) for s in rotate({"x": padded}, 1)[0])
    assert len(rotate(inputs, 1)[0]) == FEWEST_SETS
    assert rotate({"x": torch.ones(1)}, cache)[1] is False
    barely = {"x": torch.ones(-(-CACHE_MULTIPLE[CPU.type] * cache // MOST_SETS), dtype=torch.int8)}
    assert len(rotate(barely, cache)[0]) == MOST_SETS and rotate(barely, cache)[1]
    assert not rotate({"x": barely["x"][1:]}, cache)[1]


def test_cpu_timer_sees_past_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the calls advance: other work makes two calls of three longer."""
    timer, now = CpuTimer(0.05), [0.0]
    monkeypatch.setattr("epiloq.bench.timing.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call_of(us: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + 1e-6 * us)

    slow, quick = call_of(2000), call_of(10)
    assert kernel_us(timer, [slow, slow, quick]) == pytest.approx(10)
    assert kernel_us(timer, [slow]) == pytest.approx(2000)
    assert timer.take_turns([timer.prepare([slow]), timer.prepare([quick])]) == pytest.approx([2000, 10])
    assert timer.take_turns([]) == []
    assert timer.host_us(quick) == pytest.approx(10) and timer.host_us(slow) == pytest.approx(2000)
    assert cache_bytes(CPU) >= 1 << 20


@pytest.mark.gpu
@pytest.mark.alone
def test_cuda_graph_time_is_that_of_the_kernel() -> None:
    device = torch.device("cuda")
    source = [torch.rand(64 << 20, device=device) for _ in range(3)]
    target = torch.empty_like(source[0])
    timer = CudaTimer()
    # The second one's inputs are held by nobody else.
    contenders = [timer.prepare([partial(target.copy_, s) for s in source])]
    contenders += [timer.prepare([partial(target.copy_, s.clone()) for s in source])]
    us, once_more = timer.take_turns(contenders)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for index in range(30):
        target.copy_(source[index % 3])
    end.record()
    torch.cuda.synchronize()
    assert us == pytest.approx(1e3 * start.elapsed_time(end) / 30, rel=0.3)
    assert once_more == pytest.approx(us, rel=0.1)


@pytest.mark.gpu
@pytest.mark.alone
def test_turns_that_settle_longer_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    a, out = torch.rand(2048, 2048, device=device), torch.empty(2048, 2048, device=device)
    for settle_ms, turns in ((8.0, 8), (150.0, 3)):
        timer = CudaTimer(settle_ms)
        contender, counts = timer.prepare([partial(torch.mm, a, a, out=out)]), []

        def replay_ms(graph: object, count: int, counts: list[int] = counts) -> list[float]:
            counts.append(count)
            return [1.0] * count

        monkeypatch.setattr(timer, "_replay_ms", replay_ms)
        timer.take_turns([contender])
        assert len(counts) == 1 + 2 * turns  # once to begin with; then what settles, and what counts
        assert all(count * contender.ms >= settle_ms for count in (counts[0], *counts[1::2]))


# --- checks of results


@pytest.mark.parametrize(
    ("operation", "variant"), [(operation.name, v) for operation in OPERATIONS.values() for v in operation.variants]
)
@pytest.mark.parametrize("m", [1, 17, 300])
def test_check_accepts_right_and_refuses_wrong(operation: str, variant: str, m: int, seed: int) -> None:
    row = OPERATIONS[operation]
    generator = torch.Generator(CPU).manual_seed(seed)
    # Low-bit experts lie in panels of 16 rows.
    n = 0 if not row.has_weight else 112 if operation == "grouped_packed_mm" else 100
    case = Case(operation, variant, "", m, n, 577)
    inputs = row.inputs(case, generator)
    result = row.bind(case, [inputs]).calls[0]()
    assert row.error(case, inputs, result, generator) <= 1

    def error(change: str) -> float:
        first, *rest = result if isinstance(result, tuple) else (result,)
        assert isinstance(first, torch.Tensor)
        changed = {
            # Codes of FP8 are 6 to 12 % apart.
            "scaled": (first.float() * (1.15 if first.dtype == torch.float8_e4m3fn else 1.03)).to(first.dtype),
            "rolled": first.roll(1, -1),
            "short": first[..., :-1],
            "zero": torch.zeros_like(first),
        }[change]
        return row.error(case, inputs, (changed, *rest) if rest else changed, generator)

    for change in ("scaled", "rolled", "short", "zero"):
        assert not error(change) <= 1, change


def test_int_mm_on_cuda_pads_or_refuses() -> None:
    class OnCuda:
        """Enough of a tensor to ask where it is."""

        device = torch.device("cuda")

    inputs = {"a": OnCuda(), "b": OnCuda()}
    binder = OPERATIONS["scaled_mm"].peers["_int_mm"]
    with pytest.raises(Unavailable, match="divisible by 8"):
        binder(Case("scaled_mm", "scaled", "", 64, 100, 576), [inputs])  # type: ignore[list-item]
    assert binder(Case("scaled_mm", "scaled", "", 17, 64, 576), [inputs]).note == ""  # type: ignore[list-item]


@pytest.mark.parametrize("variant", OPERATIONS["grouped_mm"].variants)
@pytest.mark.parametrize("m", [1, 30])
def test_experts_one_by_one_and_in_bf16(seed: int, device: str, variant: str, m: int) -> None:
    row, case = OPERATIONS["grouped_mm"], Case("grouped_mm", variant, "", m, 160, 256)
    generator = torch.Generator(device).manual_seed(seed)
    inputs = row.inputs(case, generator)
    counts = inputs["offs"].diff(prepend=inputs["offs"].new_zeros(1))
    assert (
        counts.min() >= 1
        and counts.sum() == inputs["a"].shape[0]
        and (counts.max() > m) == ("ragged" in variant and m > 1)
    )
    separate = row.peers["separate"](case, [inputs]).calls[0]()
    assert row.error(case, inputs, separate, generator) <= 1
    assert isinstance(separate, torch.Tensor)
    bf16 = row.peers["_grouped_mm"](case, [inputs]).calls[0]()
    assert isinstance(bf16, torch.Tensor) and bf16.shape == separate.shape


@pytest.mark.parametrize("variant", OPERATIONS["grouped_packed_mm"].variants)
def test_experts_of_4_bits_one_by_one_and_in_bf16(seed: int, device: str, variant: str) -> None:
    row, case = OPERATIONS["grouped_packed_mm"], Case("grouped_packed_mm", variant, "", 3, 48, 160)
    generator = torch.Generator(device).manual_seed(seed)
    inputs = row.inputs(case, generator)
    for bound in (row.bind, row.peers["separate"], row.peers["_grouped_mm"]):
        assert row.error(case, inputs, bound(case, [inputs]).calls[0](), generator) <= 1
    wrong = inputs | {"x": (inputs["x"].float() * 0.8).to(inputs["x"].dtype)}
    assert row.error(case, inputs, row.bind(case, [wrong]).calls[0](), generator) > 1


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "m", "k"), [("e8", 1, 256), ("e8_ragged", 50, 300), ("e32_ragged", 200, 256)])
def test_the_triton_baseline_multiplies_the_same(seed: int, variant: str, m: int, k: int) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(seed)
    for operation, kind in (("grouped_mm", variant), ("groupwise_mm", "group")):
        row, case = OPERATIONS[operation], Case(operation, kind, "", m, 200, k)
        inputs = row.inputs(case, generator)
        assert row.error(case, inputs, row.peers["triton"](case, [inputs]).calls[0](), generator) <= 1
