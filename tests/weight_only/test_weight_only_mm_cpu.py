"""weight_only_mm on the CPU: torch's threads, and what may go wrong with them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import epiloq
from weight_reference import KINDS, Weight, assert_close, make_weight, run_and_assert_close

# Seconds in which a child that hangs is given up.
PATIENCE = 120


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@settings(max_examples=60)
@given(
    m=st.one_of(st.integers(1, 20), st.integers(1, 70)),
    n=st.integers(1, 500),
    k=st.integers(1, 1300),
    bits=st.sampled_from([2, 3, 4, 4, 8, 8]),
    group_size=st.one_of(st.sampled_from([-1, 32, 64, 96, 128]), st.integers(1, 1400)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    threads=st.integers(1, 3),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_product_on_any_threads(
    m: int, n: int, k: int, bits: int, group_size: int, kind: str, dtype: torch.dtype, threads: int, draw: int
) -> None:
    torch.manual_seed(draw)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run_and_assert_close("cpu", m, n, k, bits, group_size, kind, dtype, bias=draw % 2 == 0, clamp=(-2.0, 3.0))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30)
@given(
    m=st.integers(129, 200),
    n=st.integers(1, 130),
    k=st.integers(1, 700),
    bits=st.sampled_from([2, 3, 4, 4, 8]),
    group_size=st.sampled_from([-1, 32, 64, 96, 160]),
    kind=st.sampled_from(KINDS),
    draw=st.integers(0, 2**32 - 1),
)
def test_weights_on_the_grid_do_not_change(
    m: int, n: int, k: int, bits: int, group_size: int, kind: str, draw: int
) -> None:
    """Many tokens of bfloat16: by scales that are powers of two only sums are rounded, whatever `explain` says."""
    torch.manual_seed(draw)
    groups = 1 if group_size == -1 else -(-k // group_size)
    low = -(2 ** (bits - 1)) if kind == "symmetric" else 0
    q = torch.randint(low, low + 2**bits, (n, k))
    scale = 2.0 ** torch.randint(-6, -1, (n, groups))
    zero = torch.randint(0, 2**bits, (n, groups)) if kind == "zero" else None
    offset = scale * torch.randint(-100, 1, (n, groups)) if kind == "offset" else None
    group = torch.arange(k) // (max(k, 1) if group_size == -1 else group_size)
    dense = scale[:, group].double() * (q if zero is None else q - zero[:, group])
    size = dense.abs()
    if offset is not None:
        dense, size = dense + offset[:, group].double(), size + offset[:, group].double().abs()
    packed = epiloq.pack_weight(q, scale, zero, offset, bits=bits, group_size=group_size)
    x = torch.randn(m, k).bfloat16()
    assert_close(epiloq.weight_only_mm(x, packed), x, Weight(q, scale, zero, offset, None, packed, dense, size))


def test_weights_are_rounded_only_for_large_m_in_bfloat16() -> None:
    def words(m: int, dtype: torch.dtype, group_size: int) -> str:
        weight = make_weight(48, 512, 4, group_size, "zero").packed
        return epiloq.explain("weight_only_mm", torch.zeros(m, 512, dtype=dtype), weight)

    if "AMX" not in words(129, torch.bfloat16, 32):
        pytest.skip("a CPU without AMX")
    assert "rounded to bfloat16" in words(129, torch.bfloat16, 128)
    for m, dtype, group_size in ((128, torch.bfloat16, 32), (129, torch.float16, 32), (129, torch.bfloat16, 256)):
        assert "rounded" not in words(m, dtype, group_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k", "group_size"), [(150, 4096, 32), (300, 4000, 64), (65, 96, -1), (130, 64, 32)])
def test_large_m_in_chunks_of_k_and_m(seed: int, m: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    for bits, kind in ((4, "zero"), (8, "symmetric")):
        run_and_assert_close("cpu", m, 40, k, bits, group_size, kind, dtype, bias=True, clamp=(-2.0, 3.0))


def test_every_token_dtype_uses_tiles_if_supported() -> None:
    weight = make_weight(48, 256, 4, 32, "zero").packed
    words = [
        epiloq.explain("weight_only_mm", torch.zeros(40, 256, dtype=dtype), weight)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    if "AMX" not in words[0]:
        pytest.skip("a CPU without AMX")
    assert words[1].endswith("AMX, tokens in two parts") and words[2].endswith("AMX, tokens in three parts")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_infinities_keep_their_sign(seed: int, dtype: torch.dtype) -> None:
    """Also where a token is a sum of parts, of which what is not finite has one."""
    weight = make_weight(48, 256, 4, 32, "zero").packed
    x = torch.randn(40, 256).to(dtype)
    clean = epiloq.weight_only_mm(x, weight)
    x[3, 17], x[20, 255], x[39, 0] = torch.inf, -torch.inf, torch.nan
    y, expected = epiloq.weight_only_mm(x, weight), x.double() @ weight.dequantize(torch.float32).double().t()
    special = [3, 20, 39]
    assert torch.equal(y[special].double().nan_to_num(7.0), expected[special].nan_to_num(7.0))
    others = [m for m in range(40) if m not in special]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("m", [1, 9, 33])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_threads_do_not_change_a_bit(seed: int, threads: int, bits: int, m: int) -> None:
    weight = make_weight(700, 900, bits, 64, "zero").packed
    x = torch.randn(m, 900)
    shared = epiloq.weight_only_mm(x, weight)
    torch.set_num_threads(1)
    assert torch.equal(epiloq.weight_only_mm(x, weight), shared)


def test_tokens_are_independent(seed: int) -> None:
    weight = make_weight(100, 640, 4, 32, "offset").packed
    x = torch.randn(16, 640)
    together = epiloq.weight_only_mm(x, weight)
    for m in (1, 2, 3, 5):
        torch.testing.assert_close(epiloq.weight_only_mm(x[:m], weight), together[:m], rtol=1e-5, atol=1e-5)


def test_calls_at_the_same_time(seed: int, threads: int) -> None:
    weights = [make_weight(600, 800, bits, 64, "zero").packed for bits in (4, 8)]
    inputs = [torch.randn(m, 800) for m in (1, 4, 30)]
    expected = [[epiloq.weight_only_mm(x, weight) for x in inputs] for weight in weights]

    def run(which: int) -> bool:
        pairs = zip(inputs, expected[which], strict=True)
        return all(torch.equal(epiloq.weight_only_mm(x, weights[which]), y) for x, y in list(pairs) * 10)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, [0, 1, 0, 1]))


def test_other_python_threads_go_on_meanwhile(seed: int) -> None:
    weight = make_weight(512, 1024).packed
    x = torch.randn(128, 1024)
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    counting = threading.Thread(target=count)
    # So long that only who gives the interpreter away lets others run; on a busy machine they may take some calls.
    sys.setswitchinterval(10 * PATIENCE)
    try:
        counting.start()
        before, end = turns, time.monotonic() + PATIENCE
        while turns == before and time.monotonic() < end:
            epiloq.weight_only_mm(x, weight)
        assert turns > before
    finally:
        done.set()
        counting.join()
        sys.setswitchinterval(interval)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_computes(seed: int, threads: int) -> None:
    weight = make_weight(600, 800, kind="zero").packed
    inputs = [torch.randn(m, 800) for m in (1, 30)]
    expected = [epiloq.weight_only_mm(x, weight) for x in inputs]
    child = os.fork()
    if child == 0:
        same = all(
            epiloq.weight_only_mm(x, weight).numpy().tobytes() == y.numpy().tobytes()
            for x, y in zip(inputs, expected, strict=True)
        )
        os._exit(0 if same else 1)
    end = time.monotonic() + PATIENCE
    status = 0
    while (finished := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    if finished[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    status = finished[1]
    assert finished[0] == child and os.waitstatus_to_exitcode(status) == 0
    assert all(torch.equal(epiloq.weight_only_mm(x, weight), y) for x, y in zip(inputs, expected, strict=True))
