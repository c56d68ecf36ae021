"""Sums through symmetric memory: what is refused on a CPU, and the sums of two GPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from epiloq.nn import Int8Linear
from epiloq.parallel import RowwiseParallel
from epiloq.parallel.symmetric import LIMIT, SymmetricSum
from gloo_ranks import Ranks

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)
K, N = 512, 256
UNITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def _layer() -> Int8Linear:
    torch.manual_seed(3)
    return Int8Linear.from_linear(nn.Linear(K, N, bias=True, dtype=torch.bfloat16))


def test_output_layouts_that_are_no_sum_are_refused() -> None:
    for options in ({"output_layouts": Shard(0)}, {"use_local_output": False}):
        with pytest.raises(ValueError, match="symmetric_memory: expected replicated local outputs"):
            RowwiseParallel(symmetric_memory=True, **options)


def test_meshes_without_gpus_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(ValueError, match=r"symmetric_memory: expected GPUs of one host .*, got a mesh of cpu"):
            parallelize_module(_layer(), mesh, RowwiseParallel(symmetric_memory=True))
    finally:
        dist.destroy_process_group()


def test_large_outputs_and_other_dtypes_are_left_to_the_all_reduce() -> None:
    takes = SymmetricSum.__new__(SymmetricSum).takes
    rows = LIMIT // 2 // N
    assert takes(torch.zeros(rows, N, dtype=torch.bfloat16)) and takes(torch.zeros(rows // 2, N))
    assert not takes(torch.zeros(rows + 1, N, dtype=torch.bfloat16))  # too large
    assert not takes(torch.zeros(0, N, dtype=torch.bfloat16)) and not takes(torch.zeros(1, 7, dtype=torch.bfloat16))
    assert not takes(torch.zeros(1, N, dtype=torch.float16))
    wanted = torch.zeros(1, N, requires_grad=True)
    assert not takes(wanted)
    with torch.no_grad():
        assert takes(wanted)


Sums: TypeAlias = "dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]]"
"""A rank's summand, and the sum that it got, by type and number of rows."""


def _sums(folder: Path, world: int, rank: int) -> None:
    """Write the sums of a rank, and the outputs of a layer whose parts are summed in both ways."""
    torch.cuda.set_device(rank)
    mesh, found = init_device_mesh("cuda", (world,)), {}
    for dtype in UNITS:
        torch.manual_seed(rank)
        sums = SymmetricSum(mesh)
        for rows in (1, 16, LIMIT // N // dtype.itemsize):
            y = torch.randn(rows, N, device="cuda").to(dtype)
            for _ in range(3):  # the memory is used again by the next call
                total = sums(y)
            found[dtype, rows] = y.cpu(), total.cpu()
    torch.manual_seed(7)
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16).chunk(world, 1)[rank].contiguous()
    layers = [
        parallelize_module(_layer().cuda(), mesh, RowwiseParallel(symmetric_memory=symmetric))
        for symmetric in (False, True)
    ]
    with torch.no_grad():
        torch.save((found, [layer(x).cpu() for layer in layers]), folder / f"sums-{rank}.pt")


def _check_sums(ranks: list[tuple[Sums, list[Tensor]]]) -> None:
    """Sums within the roundings of their additions, with the same bits on every rank."""
    world, (first, (plain, symmetric)) = len(ranks), ranks[0]
    for case, (_, total) in first.items():
        summands = [sums[case][0].double() for sums, _ in ranks]
        bound = 2 * world * UNITS[case[0]] * sum(y.abs() for y in summands)
        assert bool(((total.double() - sum(summands)).abs() <= bound).all()), case
        assert all(torch.equal(sums[case][1], total) for sums, _ in ranks), f"{case}: ranks with other bits"
    # Both round each addition to bfloat16, in an order of their own.
    assert bool(((plain.double() - symmetric.double()).abs() <= 2.0**-7 * world * plain.double().abs().max()).all())


def test_the_check_of_sums(seed: int) -> None:
    """It accepts what two ranks may get, and neither a lost summand nor other bits on one rank."""
    y = [torch.randn(3, N).bfloat16() for _ in range(2)]
    case, total = (torch.bfloat16, 3), y[0] + y[1]
    outputs = [total, total]
    _check_sums([({case: (part, total)}, outputs) for part in y])
    for wrong in ([y[0], y[0]], [total, -total]):
        with pytest.raises(AssertionError, match=r"torch.bfloat16"):
            _check_sums([({case: (part, other)}, outputs) for part, other in zip(y, wrong, strict=True)])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_of_two_gpus(tmp_path: Path) -> None:
    Ranks(tmp_path, 2, partial(_sums, tmp_path, 2), backend="nccl", start_method="spawn").check()
    _check_sums([torch.load(tmp_path / f"sums-{rank}.pt") for rank in range(2)])
