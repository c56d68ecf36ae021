"""int32 sums on the CPU are exact whatever instructions it has; the choice of product shows in `explain`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

import epiloq
from epiloq.ops.convolutions.conv2d_host import exact_int_mm
from reference import make_problem

VALUES = (-128, -1, 127)
SIZES = ((1, 1, 2), (1, 8, 3), (2, 3, 5), (16, 16, 16), (17, 33, 100), (64, 64, 64), (3, 100, 576), (100, 17, 4095))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small products; threads that wait for one another on a busy machine would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(a: Tensor, b: Tensor) -> Tensor:
    # Sums below 2^53 are exact in float64.
    return (a.double() @ b.double()).to(torch.int32)


def wrong_products() -> list[str]:
    """Sizes and values where exact_int_mm differs from the exact sums; the subprocesses below call this too."""
    wrong = []
    for (m, n, k), (value_a, value_b) in product(SIZES, product(VALUES, repeat=2)):
        a, weight = torch.full((m, k), value_a, dtype=torch.int8), torch.full((n, k), value_b, dtype=torch.int8)
        if (exact_int_mm(a, weight.t()) != value_a * value_b * k).any():
            wrong.append(f"{m}x{n}x{k} of {value_a} and {value_b}")
    for m, n, k in (*SIZES, (5, 7, 1), (576, 100, 1025)):
        a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        if not torch.equal(exact_int_mm(a, weight.t()), reference(a, weight.t())):
            wrong.append(f"{m}x{n}x{k}, random")
    return wrong


def test_this_cpu(seed: int) -> None:
    assert wrong_products() == []


def test_epiloqs_own_product(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used where oneDNN's saturates, and is exact at the largest K and with the largest sums."""
    monkeypatch.setattr(sys.modules["epiloq.ops.convolutions.conv2d_host"], "_int_mm_is_exact", lambda: False)
    assert wrong_products() == []
    for value_a, value_b in ((-128, -128), (-128, 127), (127, 127)):
        a = torch.full((3, 131071), value_a, dtype=torch.int8)
        weight = torch.full((2, 131071), value_b, dtype=torch.int8)
        assert torch.equal(
            exact_int_mm(a, weight.t()), torch.full((3, 2), value_a * value_b * 131071, dtype=torch.int32)
        )
    assert epiloq.explain("scaled_mm", a, weight.t(), torch.ones(1), torch.ones(1)).startswith("cpu, int8 products")


RUN = """
import torch
torch.set_num_threads(1)
from test_cpu_exactness import reference, wrong_products
from epiloq.ops.convolutions.conv2d_host import describe_int_mm
a = torch.full((64, 64), 127, dtype=torch.int8)
print("saturates" if not torch.equal(torch._int_mm(a, a), reference(a, a)) else "exact")
print("epiloq" if "epiloq" in describe_int_mm() else "torch")
print(wrong_products())
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_older_instructions(isa: str) -> None:
    """oneDNN held to what older CPUs have: without VNNI its int8 products saturate, and epiloq's stay exact."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True)
    onednn, ours, wrong = run.stdout.splitlines()
    assert wrong == "[]"
    # Another architecture's oneDNN ignores the variable; its product may be exact.
    assert (onednn, ours) in {("saturates", "epiloq"), ("exact", "torch")}


def test_threads_do_not_change_a_bit(seed: int) -> None:
    p = make_problem(200, 300, 1500, bias=True, zero_point="token")
    x = torch.randn(200, 1500)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out = epiloq.scaled_mm_azp(p.a, p.b, p.scale_a, p.scale_b, p.azp_adj, p.azp, p.bias)
        results.append((out, *epiloq.quantize_int8(x, symmetric=False)))
    assert all(torch.equal(one, other) for one, *others in zip(*results, strict=True) for other in others)
