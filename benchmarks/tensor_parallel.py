"""A decode step of a 70B-shaped model (8192 x 28672, 64 and 8 heads of 128) over 1, 2 or 4 GPUs of one host.

    torchrun --nproc-per-node 4 benchmarks/tensor_parallel.py --scheme w4a16 --batch 16

One decoder layer's linear layers are made a few times over, so that weights come from memory and not from a cache,
and run under a CUDA graph. Prints microseconds a layer: the step, its products alone, its two all-reduces alone.
Attention itself is left out. `--hidden 512 --intermediate 1024 --device cpu` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from epiloq.nn import Fp8Linear, WeightOnlyLinear
from epiloq.parallel import shard_columns, shard_rows
from epiloq.parallel.shards import part_of
from epiloq.parallel.styles import summed
from epiloq.parallel.symmetric import SymmetricSum

SCHEMES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "w4a16": WeightOnlyLinear.from_linear,
    "fp8": Fp8Linear.from_linear,
}


def layers(options: Any, mesh: Any, device: torch.device) -> list[tuple[nn.Module, ...]]:
    """The parts of this rank: query, key and value together, output, gate and up together, down."""
    hidden, inner, make = options.hidden, options.intermediate, SCHEMES[options.scheme]
    rank, world = mesh.get_local_rank(), mesh.size()
    found = []
    for _ in range(options.layers):
        parts = []
        for cut, k, n in (
            (shard_rows, hidden, hidden + hidden // 4),
            (shard_columns, hidden, hidden),
            (shard_rows, hidden, 2 * inner),
            (shard_columns, inner, hidden),
        ):
            whole = make(nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16))
            own = part_of(n if cut is shard_rows else k, rank, world)
            parts.append(cut(whole, own.start, own.stop))
        found.append(tuple(parts))
    return found


def step(
    x: Tensor, all_layers: list[Any], mesh: Any, symmetric: SymmetricSum | None, products: bool, sums: bool
) -> Tensor:
    """All layers once."""
    for qkv, out, gate_up, down in all_layers:
        for first, second in ((qkv, out), (gate_up, down)):
            y = x
            if products:
                width = len(second.shard.columns)
                y = second(first(x)[:, :width].contiguous())
            x = x + (summed(y.clone(), mesh, symmetric) if sums and mesh.size() > 1 else y) * 1e-3
    return x


def time_of(run: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of a call, the median of ten runs of five, under a CUDA graph on a GPU."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        run()
    sync()
    call: Callable[[], Any] = run
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        call = graph.replay
    times = []
    for _ in range(10):
        dist.barrier()
        sync()
        begin = time.perf_counter()
        for _ in range(5):
            call()
        sync()
        times.append((time.perf_counter() - begin) / 5)
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", choices=SCHEMES, default="w4a16")
    for name, value in (("batch", 16), ("layers", 4), ("hidden", 8192), ("intermediate", 28672)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--symmetric-memory", action="store_true", help="sum through it instead of NCCL's all-reduce")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    symmetric = SymmetricSum(mesh) if options.symmetric_memory and mesh.size() > 1 else None
    torch.manual_seed(0)
    made, x = layers(options, mesh, device), torch.randn(options.batch, options.hidden, device=device).bfloat16()
    result = vars(options) | {
        "ranks": mesh.size(),
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    for name, products, sums in (("step", True, True), ("products", True, False), ("all_reduces", False, True)):
        seconds = time_of(lambda p=products, s=sums: step(x, made, mesh, symmetric, p, s), device)
        result[f"{name}_us_per_layer"] = round(seconds / options.layers * 1e6, 2)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
