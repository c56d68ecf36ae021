"""online_quant_mm by kernels that are asked for: every row, every number of CTAs that split K, a stream-K last wave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import epiloq
from blockwise_kernels import arguments, run_kernel, some
from blockwise_kernels import kernel as chosen_kernel
from blockwise_reference import assert_close, make_weight
from epiloq import _core
from online_quant_sweep import TILES, Kernel, name_of

ROWS = {"sm75": range(6), "sm80": range(len(TILES["sm80"])), "sm90": range(len(TILES["sm90"]))}
N, K = 4100, 9 * 128 - 60  # 33 tiles of SM90 along N, as many steps as blocks of a cluster and one more


def kernels(family: str) -> list[Kernel]:
    if family != "sm90":
        return [Kernel(family, row) for row in ROWS[family]]
    shared = [Kernel(family, row, split) for row in ROWS[family] for split in range(1, 9)]
    return shared + [Kernel(family, row, 2, last_wave=True) for row in ROWS[family]]


def tokens_of(kernel: Kernel) -> int:
    """165 tiles of SM90, ragged ones among them: a wave of 132 SMs, and 33 that pairs of blocks can share."""
    return 5 * (TILES["sm90"][kernel.row] if kernel.family == "sm90" else 24) - 3


def explained(kernel: Kernel | None, m: int, n: int, k: int, bits: int = 8, group: int = 128) -> str:
    weight = make_weight(n, k, group, bits=bits).prepared()
    return _core.explain_online_quant_mm(*arguments(torch.ones(m, k), weight, torch.empty(m, n)), kernel=kernel)


def skip_unless_here(family: str) -> None:
    """Sizes are such that 132 SMs have a last wave to share."""
    card = torch.cuda.get_device_properties()
    on_hopper = (card.major, card.minor, card.multi_processor_count) == (9, 0, 132)
    runs = {"sm75": True, "sm80": card.major >= 8, "sm90": on_hopper}
    if family not in _core.built_archs() or not runs[family]:
        pytest.skip(f"needs {family} and its kernels")


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ROWS)
def test_integers_are_exact_by_every_kernel(seed: int, family: str, bits: int) -> None:
    """Blocks of -128 to 127 keep their integers, and sums of at most 2^23 are exact in any order."""
    skip_unless_here(family)
    weight = make_weight(N, K, 128, bits=bits, offset=False, device="cuda")
    weight = replace(weight, q=weight.q.clamp(-32, 32), scale=torch.ones_like(weight.scale))
    prepared = weight.prepared()
    with epiloq.config(arch=family):
        for kernel in kernels(family):
            x = torch.randint(-128, 128, (tokens_of(kernel), K), device="cuda").float()
            x[:, ::128], x[:, 127::128], x[:, -1] = -128, 127, 127
            expected = (x.double() @ weight.q.double().t()).float()
            assert torch.equal(run_kernel(kernel, x, prepared), expected), kernel


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ROWS)
def test_every_kernel_is_near_float64(seed: int, family: str, bits: int, offset: bool) -> None:
    """With scales, offsets, a bias, and 16-bit outputs, whose full tiles are stored on another path."""
    skip_unless_here(family)
    weight = make_weight(N, K, 128, bits=bits, offset=offset, device="cuda")
    prepared, bias = weight.prepared(), torch.randn(N, device="cuda", dtype=torch.bfloat16)
    columns = some(N, 60).cuda()
    of_columns = replace(
        weight,
        q=weight.q[columns],
        scale=weight.scale[columns],
        offset=weight.offset[columns] if weight.offset is not None else None,
    )
    with epiloq.config(arch=family):
        for kernel in kernels(family):
            m = tokens_of(kernel)
            x = (torch.randn(m, K) * torch.rand(m, 1) + 0.2).to("cuda", torch.bfloat16)
            out, rows = run_kernel(kernel, x, prepared, bias=bias), some(m, 40).cuda()
            assert not out.isnan().any(), kernel
            assert_close(out[rows][:, columns], x[rows], of_columns, bias[columns])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_chosen_kernels_can_be_forced(bits: int) -> None:
    """And every name differs."""
    for m, n, k in ((7, 600, 700), (60, 300, 1100), (100, 1000, 600), (317, N, 300), (477, N, 200)):
        names = {}
        with epiloq.config(arch="sm90"):
            for kernel in (*kernels("sm80"), *kernels("sm90")):
                try:
                    names[name_of(explained(kernel, m, n, k, bits))] = kernel
                except ValueError as refusal:
                    assert "kernel: expected one that fits" in str(refusal)
            chosen = explained(None, m, n, k, bits)
        assert chosen == chosen_kernel(m, n, k, 128, bits, "sm90")
        steps = -(-k // 128)
        assert name_of(chosen) in names and len(names) >= 8 + 5 * min(steps, 8)
        assert ("last wave" in " ".join(names)) == (m > 300)


@pytest.mark.parametrize(
    ("kernel", "arch", "group", "words"),
    [
        (("sm85", 0, 1, False), "sm90", 128, "expected sm75, sm80 or sm90, got sm85"),
        (("sm90", 5, 1, False), "sm90", 128, "no such row"),
        (("sm90", -1, 1, False), "sm90", 128, "no such row"),
        (("sm80", 8, 1, False), "sm90", 128, "no such row"),
        (("sm90", 0, 1, False), "sm80", 128, "not for this architecture"),
        (("sm75", 0, 1, False), "sm80", 128, "not for this architecture"),
        (("sm80", 0, 1, False), "sm75", 128, "not for this architecture"),
        (("sm90", 0, 1, False), "sm90", 64, "group size"),
        (("sm80", 0, 1, False), "sm90", 48, "group size"),
        (("sm80", 0, 2, False), "sm90", 128, "no such split"),
        (("sm90", 0, 4, False), "sm90", 128, "no such split"),
        (("sm90", 0, 9, False), "sm90", 128, "no such split"),
        (("sm90", 0, 0, False), "sm90", 128, "no such split"),
        (("sm80", 0, 1, True), "sm90", 128, "no such split"),
        (("sm90", 0, 2, True), "sm90", 128, "no last wave"),
        (("sm90", 0, 1, True), "sm90", 128, "no last wave"),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(kernel: Any, arch: str, group: int, words: str) -> None:
    with epiloq.config(arch=arch), pytest.raises(ValueError, match=r"epiloq\.online_quant_mm: kernel: .*" + words):
        explained(kernel, 64, 256, 300, 8, group)
