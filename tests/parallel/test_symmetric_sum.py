"""Sums through symmetric memory: what is refused on a CPU, and the sums of two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from epiloq.nn import Int8Linear
from epiloq.parallel import RowwiseParallel
from epiloq.parallel.symmetric import LIMIT, SymmetricSum

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)
K, N = 512, 256


def _layer() -> Int8Linear:
    torch.manual_seed(3)
    return Int8Linear.from_linear(nn.Linear(K, N, bias=True, dtype=torch.bfloat16))


def _group(rank: int, world: int, folder: str, backend: str) -> None:
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world)


def test_output_layouts_that_are_no_sum_are_refused() -> None:
    for options in ({"output_layouts": Shard(0)}, {"use_local_output": False}):
        with pytest.raises(ValueError, match="symmetric_memory: expected replicated local outputs"):
            RowwiseParallel(symmetric_memory=True, **options)


def test_meshes_without_gpus_are_refused(tmp_path: Path) -> None:
    _group(0, 1, str(tmp_path), "gloo")
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


def _assert_sums(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    _group(rank, world, folder, "nccl")
    mesh = init_device_mesh("cuda", (world,))
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
        torch.manual_seed(rank)
        sums = SymmetricSum(mesh)
        for rows in (1, 16, LIMIT // N // dtype.itemsize):
            y = torch.randn(rows, N, device="cuda").to(dtype)
            everyone = [torch.empty_like(y) for _ in range(world)]
            dist.all_gather(everyone, y)
            for _ in range(3):  # the memory is used again by the next call
                total = sums(y)
            wanted = sum(part.double() for part in everyone)
            bound = 2 * world * unit * sum(part.double().abs() for part in everyone)
            assert bool(((total.double() - wanted).abs() <= bound).all())
            found = [torch.empty_like(total) for _ in range(world)]
            dist.all_gather(found, total)
            assert all(torch.equal(part, found[0]) for part in found), "ranks with other bits"
    torch.manual_seed(7)
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16).chunk(world, 1)[rank].contiguous()
    layers = [
        parallelize_module(_layer().cuda(), mesh, RowwiseParallel(symmetric_memory=symmetric))
        for symmetric in (False, True)
    ]
    with torch.no_grad():
        plain, symmetric = (layer(x) for layer in layers)
    # Both round each addition to bfloat16, in an order of their own.
    assert bool(((plain.double() - symmetric.double()).abs() <= 2.0**-7 * world * plain.double().abs().max()).all())
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_of_two_gpus(tmp_path: Path) -> None:
    multiprocessing.spawn(_assert_sums, (2, str(tmp_path)), nprocs=2)
