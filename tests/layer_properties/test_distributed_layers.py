"""Layers in two processes: DDP's broadcast, FSDP2's shards, and checkpoints of torch.distributed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from every_layer import LAYERS, arguments, run

WORLD = 2
SIZE = (37, 21)


class Model(nn.Module):
    """A layer beside one that is trained."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.inner, self.head = name, LAYERS[name](*SIZE), nn.Linear(3, 2)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return run(self.name, self.inner, given) + self.head(x).sum()


def made(name: str, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(name)


def _same(model: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def _broadcast(name: str, model: Model, given: tuple[Any, ...], rank: int) -> None:
    """Every rank ends with the first's tensors, and what it made of its own is not used any more."""
    own = made(name, 7 + rank) if rank else copy.deepcopy(model)
    x = torch.ones(2, 3)
    own(x, *given)
    wrapped = DistributedDataParallel(own)
    assert _same(own, model), name
    assert torch.equal(wrapped(x, *given), model(x, *given)), name
    if name not in ("table", "quantize"):
        wrapped(x, *given).sum().backward()
        assert own.head.weight.grad is not None


def _shards(name: str, model: Model, given: tuple[Any, ...], folder: Path) -> None:
    """Shards gather to what they were cut from, also after other tensors were loaded into them."""
    x = torch.ones(2, 3)
    sharded = copy.deepcopy(model)
    fully_shard(sharded.inner)
    fully_shard(sharded)
    assert torch.equal(sharded(x, *given), model(x, *given)), name
    # A checkpoint of both ranks, read back into a model of another seed, sharded and not.
    state = get_model_state_dict(sharded)
    dcp.save(state, checkpoint_id=folder)
    other = made(name, 99)
    fully_shard(other.inner)
    other(x, *given)
    found = get_model_state_dict(other)
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(other, found)
    assert torch.equal(other(x, *given), model(x, *given)), name
    plain = made(name, 97)
    found = get_model_state_dict(plain)
    dcp.load(found, checkpoint_id=folder)
    plain.load_state_dict(found)
    assert _same(plain, model) and torch.equal(plain(x, *given), model(x, *given)), name


def _mixed(name: str, model: Model, given: tuple[Any, ...]) -> None:
    """Sharded without a policy of its own, a layer keeps its scales' type beside layers in bfloat16."""
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    mixed = copy.deepcopy(model)
    fully_shard(mixed.inner)
    fully_shard(mixed, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    expected = run(name, model.inner, given) + copy.deepcopy(model.head).bfloat16()(x).sum()
    assert torch.equal(mixed(x, *given), expected), name


def _rank(rank: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    try:
        for name in names:
            model = made(name, 5)
            given = arguments(name, SIZE[0])
            _broadcast(name, model, given, rank)
            _shards(name, model, given, Path(folder) / name)
            _mixed(name, model, given)
            (Path(folder) / f"{name}.{rank}").touch()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Path) -> None:
    """Of every class of layers, in one pair of processes, for starting one costs more than what it does."""
    multiprocessing.spawn(_rank, (list(LAYERS), str(tmp_path)), WORLD)  # raises what a process raised
    finished = {path.name for path in tmp_path.glob("*.[0-9]")}
    assert finished == {f"{name}.{rank}" for name in LAYERS for rank in range(WORLD)}
