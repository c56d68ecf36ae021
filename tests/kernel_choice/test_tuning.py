"""Tuned kernels: timed by a fake timer, kept in a file, used by dispatch. The choices are those of a card that is not
there: under a forced architecture operands on the CPU ask for it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import epiloq
import tune
from epiloq import _core
from epiloq.tuning import store
from epiloq.tuning.calls import calls_of
from epiloq.tuning.problems import Problem, problems_of
from epiloq.tuning.store import Card, Entry, cache_path
from epiloq.tuning.tuner import MIN_GAIN, Tuned, tune_problems, worth_timing

CARD = Card(-1, "Card of a test", 132)
TUNED = " (tuned: measured on this card)"
SCHEMES = (
    "w8a8-int8",
    "fp8-token",
    "fp8-block",
    "w4a16-g128",
    "w4a16-g64",
    "w8a16",
    "w4a8-fp8",
    "w8a8-block",
    "w4a8-block",
)


@pytest.fixture(autouse=True)
def no_card() -> Iterator[None]:
    with epiloq.config(arch="sm90"):
        yield
    _core.clear_tuned_kernels(-1)


def constant(fast: str, us: float = 5.0) -> Any:
    """A timer by which all kernels take 10 us but one."""

    def timer(problem: Problem, candidates: Sequence[str]) -> list[float]:
        return [us if name == fast else 10.0 for name in candidates]

    return timer


def int8_operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    a, b = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8)
    return a, b.t(), torch.ones(m, 1), torch.ones(n)


def others(problem: Problem) -> list[str]:
    """Candidates that are timed and that dispatch would not choose."""
    found = problem.candidates(-1)
    return [name for name in worth_timing(found) if name != found.chosen]


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm89", "sm90"])
@pytest.mark.parametrize("m", [1, 3, 16, 64, 100, 128, 256, 1000, 4096])
def test_the_default_is_a_candidate_and_all_have_names_of_their_own(arch: str, m: int) -> None:
    problems = [p for shape in ((4096, 4096), (1280, 8192), (104, 528)) for p in problems_of([shape], (m,), SCHEMES)]
    found = 0
    with epiloq.config(arch=arch):
        for problem in problems:
            try:
                key, chosen, candidates = getattr(_core, f"candidates_{problem.operation}")(
                    -1, problem.m, problem.n, problem.k, **dict(problem.options)
                )
            except ValueError:  # not explained for this architecture
                continue
            except NotImplementedError:
                continue
            names = [name for name, _ in candidates]
            assert len(set(names)) == len(names)
            assert all(us >= 0 and math.isfinite(us) for _, us in candidates)
            if names:
                assert chosen in names, (problem, chosen)
                assert key.startswith(problem.operation)
                found += 1
    assert found > 0


def test_a_tuned_kernel_is_used_kept_and_explained(tmp_path: Path) -> None:
    operands = int8_operands(16, 4096, 4096)
    problem = Problem("scaled_mm", 16, 4096, 4096, (("dtype", "int8"),))
    default = epiloq.explain("scaled_mm", *operands)
    fast = others(problem)[0]
    path = tmp_path / "cache" / "tuning.json"
    found = tune_problems([problem], CARD, constant(fast), path)
    assert [(each.kernel, each.us, each.default, each.default_us) for each in found.measured] == [
        (fast, 5.0, default, 10.0)
    ]
    assert epiloq.explain("scaled_mm", *operands) == fast + TUNED
    # Up to the next multiple of 8, but no further.
    for m, tuned in ((8, False), (9, True), (15, True), (17, False)):
        assert epiloq.explain("scaled_mm", *int8_operands(m, 4096, 4096)).endswith(TUNED) == tuned
    assert not epiloq.explain("scaled_mm", *int8_operands(16, 4096, 4112)).endswith(TUNED)
    # A process that starts later reads it.
    _core.clear_tuned_kernels(-1)
    assert epiloq.explain("scaled_mm", *operands) == default
    store.apply(CARD, store.read(path, CARD))
    assert epiloq.explain("scaled_mm", *operands) == fast + TUNED
    with epiloq.config(arch="sm80"):
        assert not epiloq.explain("scaled_mm", *operands).endswith(TUNED)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_problem_of_a_layer_is_the_one_that_dispatch_sees(scheme: str) -> None:
    m, n, k = 300, 136, 272
    layer = epiloq.schemes.SCHEMES[scheme].convert(nn.Linear(k, n, dtype=torch.bfloat16)).requires_grad_(False)
    (problem,) = problems_of([layer], (m,))
    assert (problem,) == tuple(problems_of([(n, k)], (m,), (scheme,)))
    if problem.operation == "w4a8_mm":
        pytest.skip("its kernels are chosen on a CUDA device only")
    fast = others(problem)[-1]
    tune_problems([problem], CARD, constant(fast), None)
    assert explained(problem, layer) == fast + TUNED


@pytest.mark.parametrize("activation", ["fp8", "int8"])
@pytest.mark.parametrize("zeros", ["none", "zero"])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_w4a8_tunes_the_products_of_its_numbers_of_tokens(group_size: int, zeros: str, activation: str) -> None:
    n, k = 136, 272
    options: Any = {"group_size": group_size, "zeros": zeros, "activation": activation}
    layer = epiloq.nn.W4A8Linear(k, n, dtype=torch.bfloat16, **options)
    found = [problems_of([layer], (m,))[0] for m in (20, 100, 1000)]
    is_float8 = activation == "fp8"
    registers = "w4a8_mm" if is_float8 and zeros == "none" else "weight_only_mm"
    many = registers
    if group_size == -1:
        many = "scaled_mm"
    elif group_size == 32:
        many = "weight_only_mm"
    elif is_float8 and group_size != 64:
        many = "groupwise_mm"
    assert [problem.operation for problem in found] == ["weight_only_mm", registers, many]
    if many == "scaled_mm":
        assert dict(found[-1].options) == {"dtype": "float8_e4m3fn" if is_float8 else "int8"}


def test_scales_of_whole_rows_are_tuned_apart() -> None:
    """`groupwise_mm` with a scale per token, as w4a8_mm calls it: another choice than with one per group."""
    m, n, k = 1000, 4096, 4096
    (problem,) = problems_of([epiloq.nn.W4A8Linear(k, n, dtype=torch.bfloat16)], (m,))
    operands = (torch.zeros(m, k, dtype=torch.float8_e4m3fn), torch.zeros(n, k, dtype=torch.float8_e4m3fn).t())
    scale_b = torch.ones(k // 128, n)

    def explanation(scale_a: torch.Tensor) -> str:
        return epiloq.explain("groupwise_mm", *operands, scale_a, scale_b, recipe=(1, 1, 128))

    scales = torch.ones(m, k // 128)
    default = explanation(scales)
    fast = others(problem)[0]
    tune_problems([problem], CARD, constant(fast), None)
    assert explanation(scales[:, :1].expand(-1, k // 128)) == fast + TUNED
    assert explanation(scales) == default


def explained(problem: Problem, layer: Any) -> str:
    m, n, k = problem.m, problem.n, problem.k
    x = torch.zeros(m, k, dtype=torch.bfloat16)
    if problem.operation == "weight_only_mm":
        return epiloq.explain("weight_only_mm", x, layer.packed)
    if problem.operation == "online_quant_mm":
        return epiloq.explain("online_quant_mm", x, layer.prepared)
    if problem.operation == "groupwise_mm":
        q, scale = epiloq.quantize_fp8(x, granularity="group", scale_layout="column", pad_to=16)
        weight_q, _, weight_scale = layer._parts()
        return epiloq.explain(
            "groupwise_mm", q, weight_q.t(), scale, weight_scale.t(), recipe=(1, 128, 128), out_dtype=x.dtype
        )
    a, b, scale_a, scale_b = int8_operands(m, n, k)
    if dict(problem.options)["dtype"] != "int8":
        a, b = a.view(torch.float8_e4m3fn), b.t().view(torch.float8_e4m3fn).t()
    return epiloq.explain("scaled_mm", a, b, scale_a, scale_b)


def test_candidates_within_noise_are_not_kept(tmp_path: Path) -> None:
    problem = Problem("scaled_mm", 16, 4096, 4096, (("dtype", "int8"),))
    fast, path = others(problem)[0], tmp_path / "tuning.json"
    for us, kept in ((10 * (1 - MIN_GAIN) + 0.01, 0), (10.5, 0), (10 * (1 - MIN_GAIN) - 0.01, 1)):
        found = tune_problems([problem], CARD, constant(fast, us), path)
        assert [each.better for each in found.measured] == [bool(kept)]
        assert len(store.read(path, CARD)) == kept
    # A kernel that the device refuses is never kept; nor is a choice that a later run does not confirm.
    broken = tune_problems([problem], CARD, lambda p, names: [math.inf] * len(names), path)
    assert broken.measured == []
    assert len(store.read(path, CARD)) == 1
    tune_problems([problem], CARD, constant(fast, 10.0), path)
    assert store.read(path, CARD) == {}
    assert not epiloq.explain("scaled_mm", *int8_operands(16, 4096, 4096)).endswith(TUNED)


def test_measurements_before_an_interruption_are_kept(tmp_path: Path) -> None:
    problems = [Problem("scaled_mm", m, 4096, 4096, (("dtype", "int8"),)) for m in (16, 32)]
    fast = others(problems[0])[0]

    def timer(problem: Problem, candidates: Sequence[str]) -> list[float]:
        if problem.m == 32:
            raise KeyboardInterrupt
        return constant(fast)(problem, candidates)

    with pytest.raises(KeyboardInterrupt):
        tune_problems(problems, CARD, timer, tmp_path / "tuning.json")
    assert [entry.kernel for entry in store.read(tmp_path / "tuning.json", CARD).values()] == [fast]


def test_batch_invariance_and_forced_kernels_come_first() -> None:
    operands = int8_operands(16, 4096, 4096)
    problem = Problem("scaled_mm", 16, 4096, 4096, (("dtype", "int8"),))
    first, second = others(problem)[:2]
    tune_problems([problem], CARD, constant(first), None)
    _core.force_kernel(second)
    try:
        assert epiloq.explain("scaled_mm", *operands) == second
        _core.force_kernel("no such kernel")
        with pytest.raises(ValueError, match="scaled_mm: kernel: expected one of this problem's candidates"):
            epiloq.explain("scaled_mm", *operands)
    finally:
        _core.force_kernel("")
    assert epiloq.explain("scaled_mm", *operands) == first + TUNED
    with epiloq.config(batch_invariant=True):
        assert not epiloq.explain("scaled_mm", *operands).endswith(TUNED)


def test_choices_of_another_card_or_version_are_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    store.save(path, CARD, {"key": Entry("a", 1.0, "b", 2.0)})
    other = Card(-1, "Another card", 132)
    with pytest.raises(
        ValueError, match="tuned on Card of a test, 132 SMs, which do not apply to Another card, 132 SMs"
    ):
        store.read(path, other)
    store.save(path, other, {"key": Entry("c", 1.0, "b", 2.0)})  # one file for both
    assert store.read(path, CARD)["key"].kernel == "a" and store.read(path, other)["key"].kernel == "c"
    monkeypatch.setattr(store, "_kernels", lambda: "9.9.9 0123456789ab")
    with pytest.raises(ValueError, match=r"was tuned with epiloq .*, this is 9\.9\.9 0123456789ab: tune again"):
        store.read(path, CARD)
    # What dispatch calls warns, and never raises.
    monkeypatch.setenv(store.VARIABLE, str(path))
    monkeypatch.setattr(store, "card_of", lambda index: CARD)
    with pytest.warns(UserWarning, match="epiloq: tuned kernels are ignored: .* tune again"):
        store.load(-1)
    for content in ("{", "[]", '{"format": 7, "cards": {}}'):
        path.write_text(content)
        with pytest.warns(UserWarning, match="epiloq: tuned kernels are ignored: "):
            store.load(-1)
        with pytest.raises(ValueError):
            tune_problems([], CARD, constant(""), path)
        assert path.read_text() == content  # somebody else's


def test_path_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_path() == tmp_path / ".cache/epiloq/tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_path() == tmp_path / "x/epiloq/tuning.json"
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "own.json"))
    assert cache_path() == tmp_path / "own.json"
    assert cache_path("given.json") == Path("given.json")
    monkeypatch.setenv(store.VARIABLE, "off")
    assert cache_path() is None


def test_tunable_problems() -> None:
    quantised = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 512))
    epiloq.quantize_(quantised, "w8a8-int8")
    assert problems_of(quantised, (1, 16, 1)) == [
        Problem("scaled_mm", m, n, k, (("dtype", "int8"),)) for n, k in ((512, 256), (256, 512)) for m in (1, 16)
    ]
    # A float model's layers, under each scheme; odd sizes as kernels see them.
    assert problems_of(nn.Linear(100, 30), (4,), ("fp8-token",)) == [
        Problem("scaled_mm", 4, 32, 112, (("dtype", "float8_e4m3fn"),))
    ]
    for wrong, message in (
        (dict(what=nn.ReLU(), tokens=(1,)), "what: found no linear layer"),
        (dict(what=[(0, 4)], tokens=(1,)), "what: expected sizes"),
        (dict(what=[(4, 4)], tokens=(0,)), "tokens: expected integers"),
        (dict(what=[(4, 4)], tokens=(1,), schemes=("w9",)), "schemes: expected some of"),
    ):
        with pytest.raises(ValueError, match=message):
            problems_of(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="what: expected a model, quantised layers or shapes"):
        problems_of(3, (1,))  # type: ignore[arg-type]


def test_the_sweep_times_complete_problems() -> None:
    """tools/tune.py's options suffice to make the operands of each operation."""
    for operation, variants in tune.OPTIONS.items():
        for options in variants:
            problem = Problem(operation, 3, 256, 384, options)
            assert len(calls_of(problem, torch.device("cpu"), 2)) == 2


def test_query_without_a_device_reads_no_file() -> None:
    """In a process of its own, where no product has been dispatched yet."""
    program = """
import epiloq
from epiloq import _core
seen = []
_core.on_first_dispatch(seen.append)
with epiloq.config(arch="sm90"):
    epiloq.explain("weight_only_mm", m=1, n=64, k=128)
print(seen)
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported_in_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"^epiloq\.tune: expected a CUDA device"):
        epiloq.tune([(64, 64)])


@pytest.mark.gpu
def test_tuning_on_a_card_finds_nothing_slower(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    found: Tuned = epiloq.tune([(1024, 512), (4096, 4096)], (1, 16, 300), SCHEMES, path=path)
    try:
        assert len(found.measured) > 20
        assert all(0 < each.us <= each.default_us for each in found.measured)
        for each in found.measured:
            if each.better:
                assert each.us < each.default_us
        choices = json.loads(path.read_text())["cards"][str(found.card)]["choices"]
        assert set(choices) == {each.key for each in found.measured if each.better}
        x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
        layer = epiloq.nn.Int8Linear.from_linear(nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16))
        tuned = layer(x)
        _core.clear_tuned_kernels(found.card.index)
        assert torch.equal(tuned, layer(x))
    finally:
        _core.clear_tuned_kernels(found.card.index)
