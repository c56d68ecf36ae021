"""The cost models of online_quant_mm and w4a8_mm on SM90: their terms as `explain` prints them."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

import epiloq
from epiloq import _core
from epiloq.ops.w4a8 import unpacked
from epiloq.ops.w4a8_mm import FLOAT8_TOKENS, float8_tokens

NUMBER = r"([\d.]+)"
EXPECTED = re.compile(rf"  expected {NUMBER} us: (\d+) CTA tiles on (\d+) SMs, start {NUMBER} us")
STEPS = rf"(\d+) K steps of {NUMBER} us \+ epilogue {NUMBER} us"
WAVES = re.compile(rf"  (\d+) waves?, (?:each )?{STEPS}")
SPLIT = re.compile(rf"  (\d+) tiles with K over (\d+) CTAs, {STEPS} \+ reduction {NUMBER} us")
LAST = re.compile(rf"  splitting the last wave must save {NUMBER} us")
MMA = re.compile(
    rf"  expected {NUMBER} us: the p-norm of products, latency and memory, \+ end\n"
    rf"  products {NUMBER} us: (\d+) CTAs? on the busiest SM, (?:each )?(\d+) K steps\n"
    rf"  latency {NUMBER} us, memory {NUMBER} us, end of (\d+) waves? {NUMBER} us"
)
CYCLES = re.compile(
    rf"  expected {NUMBER} us, (\d+) cycles: (\d+) CTA tiles on (\d+) SMs\n"
    r"  (\d+) waves?, (?:each )?(\d+) K steps of (\d+) cycles \+ prologue and epilogue (\d+)\n"
    r"  a K step: the longest of products (\d+), conversions (\d+) and loads (\d+) cycles, \+ (\d+)"
    r"(?:\n  partial sums to other CTAs (\d+) cycles)?"
)
HALF = {2: 0.0051, 3: 0.00051}  # of the last of so many decimals
SIZES = ((1024, 4096), (4096, 4096), (3584, 18944), (28672, 4096), (5120, 1280))
ROWS = (1, 16, 64, 100, 256, 1000, 4096)


def kernels(terms: str) -> list[tuple[str, str]]:
    """The kernels of `explain`'s terms, the chosen one first, each with its terms."""
    parts = re.split(r"^(?:chosen|runner-up): ", terms, flags=re.MULTILINE)[1:]
    return [(name, text.rstrip("\n")) for name, _, text in (part.partition("\n") for part in parts)]


def check_wgmma(text: str, k: int) -> float:
    """Check that the terms of a WGMMA kernel add up to its expected time, and return it."""
    first, *lines = text.splitlines()
    head = EXPECTED.fullmatch(first)
    assert head and head[3] == "132", first
    us, total, rounding, tiles = float(head[1]), float(head[4]), 2 * HALF[2], 0
    for line in lines:
        waves, split, last = WAVES.fullmatch(line), SPLIT.fullmatch(line), LAST.fullmatch(line)
        if last:
            total += float(last[1])
            continue
        assert waves or split, line
        ctas = int(split[2]) if split else 1
        steps, step, end = (waves or split).groups()[2 if split else 1 :][:3]
        assert int(steps) == math.ceil(math.ceil(k / 128) / ctas)
        repeated = 1 if split else int(waves[1])
        total += repeated * (int(steps) * float(step) + float(end)) + (float(split[6]) if split else 0)
        rounding += repeated * (int(steps) * HALF[3] + HALF[2]) + HALF[2]
        tiles += int(split[1]) if split else 0
    assert tiles <= int(head[2]) and abs(total - us) < rounding + HALF[2]
    return us


def check_mma(text: str, k: int) -> float:
    """The same for mma.sync: the longest term is a lower bound of a p-norm, their sum an upper one."""
    found = MMA.fullmatch(text)
    assert found, text
    us, products, latency, memory, end = (float(found[i]) for i in (1, 2, 5, 6, 8))
    assert int(found[4]) == math.ceil(k / 128)
    longest, total = max(products, latency, memory), products + latency + memory
    assert longest + end - 3 * HALF[2] <= us <= total + end + 5 * HALF[2]
    return us


@pytest.mark.parametrize("bits", [4, 8])
def test_terms_of_online_quant_mm(bits: int) -> None:
    seen = set()
    for (n, k), m in itertools.product(SIZES, ROWS):
        problem = {"m": m, "n": n, "k": k, "bits": bits}
        parts = kernels(epiloq.explain("online_quant_mm", **problem, terms=True))
        assert len(parts) == 2 and parts[0][0] == epiloq.explain("online_quant_mm", **problem)
        with epiloq.config(arch="sm90"):
            expected = dict(_core.candidates_online_quant_mm(-1, **problem)[2])
        times = [(check_mma if "mma.sync" in name else check_wgmma)(text, k) for name, text in parts]
        best = sorted(expected.values())[:2]
        for (name, _), us, least in zip(parts, times, best, strict=True):
            assert abs(us - expected[name]) < HALF[2] and abs(us - least) < HALF[2]
            seen.add("mma" if "mma.sync" in name else "last" if "last wave" in name else "K over" in name)
    assert seen == {"mma", "last", True, False}


def test_online_quant_mm_without_a_cost_model() -> None:
    for options in ({"arch": "sm80"}, {"arch": "sm75"}):
        terms = epiloq.explain("online_quant_mm", m=64, n=4096, k=4096, terms=True, **options)
        assert terms.splitlines()[1:] == ["  no cost model: chosen by M and N (online_quant_mm/tables.h)"]
    terms = epiloq.explain("online_quant_mm", m=64, n=4096, k=4096, group_size=96, terms=True)
    assert terms.splitlines()[1:] == ["  no cost model: the only kernel for this group size"]


def test_terms_of_batch_invariant_kernels() -> None:
    """Only kernels with whole sums of K are compared."""
    with epiloq.config(batch_invariant=True):
        for m in ROWS:
            for name, text in kernels(epiloq.explain("online_quant_mm", m=m, n=4096, k=4096, terms=True)):
                assert "wgmma" in name and "K over" not in name
                check_wgmma(text, 4096)


@pytest.mark.parametrize("group_size", [32, 128])
def test_terms_of_w4a8_mm(group_size: int) -> None:
    """Of the float8 kernel, also for numbers of tokens for which a call uses another one."""
    split = 0
    for (n, k), m in itertools.product(SIZES, ROWS):
        problem = {"m": m, "n": n, "k": k, "group_size": group_size}
        parts = kernels(_core.explain_w4a8_mm_problem(**problem, terms=True))
        assert len(parts) == 2 and parts[0][0] == _core.explain_w4a8_mm_problem(**problem)
        with epiloq.config(arch="sm90"):
            expected = dict(_core.candidates_w4a8_mm(-1, **problem)[2])
        for (name, text), least in zip(parts, sorted(expected.values())[:2], strict=True):
            found = CYCLES.fullmatch(text)
            assert found, text
            us, numbers = float(found[1]), [int(x or 0) for x in found.groups()[1:]]
            cycles, _, sms, waves, steps, step, tile, products, conversions, loads, overhead, sent = numbers
            assert sms == 132 and abs(max(products, conversions, loads) + overhead - step) <= 1
            assert abs(waves * (steps * step + tile + sent) - cycles) <= waves * (steps + 2) / 2 + 2
            assert abs(us - expected[name]) < 0.06 and abs(us - least) < 0.06
            ctas = int(name.rpartition("clusters of ")[2]) if "clusters of" in name else 1
            assert steps == math.ceil(math.ceil(k / 128) / ctas) and (sent > 0) == (ctas > 1)
            split += ctas > 1
    assert split > 0


def test_other_architectures_have_no_kernel_of_w4a8_mm() -> None:
    with pytest.raises(RuntimeError, match="w4a8_mm: arch: expected sm90, which alone has a kernel, got sm80"):
        epiloq.explain("w4a8_mm", m=64, n=4096, k=4096, arch="sm80")
    with pytest.raises(
        ValueError, match="w4a8_mm: group_size: expected -1, 32, 64 or a power of two times 128, got 384"
    ):
        epiloq.explain("w4a8_mm", m=64, n=4096, k=4096, group_size=384)


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("group_size", [-1, 128, 512, 64, 32])
def test_sizes_say_what_a_call_runs(group_size: int, terms: bool) -> None:
    """As a call does, which has tensors on a GPU."""
    tokens = unpacked.MANY_TOKENS

    def explained(m: int, operation: str = "w4a8_mm") -> str:
        return epiloq.explain(operation, m=m, n=4096, k=4096, group_size=group_size, terms=terms)

    in_registers = float8_tokens(group_size)
    for m in (1, 16, FLOAT8_TOKENS - 1, *([192, tokens, 4096] if group_size == 32 else [])):
        assert explained(m) == f"activations as bfloat16: {explained(m, 'weight_only_mm')}"
    for m in (FLOAT8_TOKENS, 191, tokens - 1):
        assert (m in in_registers) == ("registers" in explained(m)) == (m < 192 or group_size != 32)
    if group_size != 32:
        assert ("registers" if group_size == 64 else "unpacked to 8 bits") in explained(tokens)
    with epiloq.config(batch_invariant=True):
        for m in (1, FLOAT8_TOKENS, tokens):
            assert explained(m) == f"activations as bfloat16: {explained(m, 'weight_only_mm')}"


def test_calls_take_terms(seed: int) -> None:
    """On a CPU there is nothing to choose."""
    x = torch.randn(3, 256)
    w, scale, offset = epiloq.quantize_blockwise_int8(torch.randn(64, 256), 128)[:3]
    names = [epiloq.explain("online_quant_mm", x, w, scale, offset, group_size=128, terms=t) for t in (False, True)]
    assert names[0] == names[1]
