"""Calibration by two and three processes: the same blocks as by one, bit for bit, and errors on all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

pytest.importorskip("transformers", reason="the models are those of transformers")

from epiloq.models.mixtures import unstack_experts_
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.ranks import STRANDS, Group, Ranks, balanced
from epiloq.quantize.calibration.static import AUTO, Static
from epiloq.quantize.calibration.store import tensors_of
from epiloq.quantize.calibration.work import Block
from epiloq.weights.codebooks import Float8Grid
from epiloq.weights.grid import Grid
from tiny_mixtures import qwen3
from tiny_teacher import tiny_model

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


def llama() -> nn.Module:
    return tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)  # type: ignore[no-any-return]


def mixture() -> nn.Module:
    model: nn.Module = qwen3()
    unstack_experts_(model)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], str, Any, int, Static | None]] = {
    "llama gptq": (llama, "gptq", Grid(4, 32), 11, None),
    "llama few windows": (llama, "gptq", Grid(4, 32), 2, None),
    "llama awq+gptq": (llama, "awq+gptq", Grid(4, 32), 5, None),
    "llama guided": (llama, "awq+gptq-guided", Grid(4, 32), 5, None),
    "llama static": (llama, "smoothquant-search", Grid(8, symmetric=True), 7, Static(AUTO)),
    "llama rtn": (llama, "rtn", Grid(4, 32), 0, None),
    "llama whole tensors": (llama, "gptq", Float8Grid(rows=-1), 3, None),
    "mixture gptq": (mixture, "gptq", Grid(4, 32), 9, None),
    "mixture static": (mixture, "smoothquant", Grid(8, symmetric=True), 9, Static(AUTO)),
}


def values(blocks: list[Block], model: nn.Module) -> dict[str, Any]:
    """Whatever came of a calibration."""
    found: dict[str, Any] = {f"model/{name}": value for name, value in model.state_dict().items()}
    for block in blocks:
        found |= {f"{block.name}/{name}": value for name, value in tensors_of(block).items()}
        found[block.name] = (block.errors, block.input_errors, list(block.weights))
    return found


def calibrated(case: str, model: nn.Module, ranks: Ranks, **options: Any) -> dict[str, Any]:
    _, algorithm, grid, count, static = CASES[case]
    generator = torch.Generator().manual_seed(count)
    windows = [torch.randint(1, 60, (1, 9 + i), generator=generator) for i in range(count)]
    blocks = list(calibrate(model, windows, grid, ALGORITHMS[algorithm], static=static, ranks=ranks, **options))
    return values(blocks, model)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        assert same, name


def in_group(rank: int, world: int, folder: str, act: Callable[[Group, Path], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        act(Group(), Path(folder))
        (Path(folder) / f"passed-{rank}").touch()
    finally:
        dist.destroy_process_group()


def passed(world: int, folder: Path, act: Callable[[Group, Path], None]) -> bool:
    """Whether what the ranks check held on every one; raises what did not."""
    multiprocessing.start_processes(in_group, (world, str(folder), act), world, start_method="fork")
    return all((folder / f"passed-{rank}").exists() for rank in range(world))


def same_blocks(ranks: Group, folder: Path) -> None:
    for case, (make, *_) in CASES.items():
        torch.manual_seed(11)
        model = make()
        alone = copy.deepcopy(model)
        found = calibrated(case, model, ranks)
        for each in ranks.gather({name: value for name, value in found.items() if "/" not in name}):
            check_same({name: found[name] for name in each}, each)
        if ranks.rank == ranks.world - 1:
            check_same(found, calibrated(case, alone, Ranks()))


def one_error(ranks: Group, folder: Path) -> None:
    """A weight that is NaN on one rank ends all, with the same sentence."""
    torch.manual_seed(11)
    model = llama()
    if ranks.rank == 1:
        with torch.no_grad():
            model.get_submodule("model.layers.1.mlp.up_proj").weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight: expected finite numbers"):
        calibrated("llama gptq", model, ranks)


def resumed(ranks: Group, folder: Path) -> None:
    """The first rank alone has what was finished."""
    torch.manual_seed(11)
    model = llama()
    alone = copy.deepcopy(model)
    _, algorithm, grid, *_ = CASES["llama gptq"]
    generator = torch.Generator().manual_seed(11)
    windows = [torch.randint(1, 60, (1, 9 + i), generator=generator) for i in range(11)]
    walk = calibrate(copy.deepcopy(model), windows, grid, ALGORITHMS[algorithm], ranks=ranks)
    first = next(walk)
    known = {first.name: first} if ranks.rank == 0 else {}
    found = calibrated("llama gptq", model, ranks, finished=known.get)
    check_same(found, calibrated("llama gptq", alone, Ranks()))


def checks_of_two(ranks: Group, folder: Path) -> None:
    same_blocks(ranks, folder)
    one_error(ranks, folder)
    resumed(ranks, folder)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    assert passed(2, tmp_path, checks_of_two)


@pytest.mark.slow
def test_three_ranks(tmp_path: Path) -> None:
    assert passed(3, tmp_path, same_blocks)


@pytest.mark.parametrize("windows", [0, 1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 8, 11])
def test_windows_are_shared_in_order(windows: int, world: int) -> None:
    """Every window once, the strands the same however many ranks there are, the first always with the first rank."""
    found = []
    for rank in range(world):
        ranks = Ranks()
        ranks.rank, ranks.world = rank, world
        found.append(ranks.strands(windows))
    together = [strand for strands in found for strand in strands]
    assert together == Ranks().strands(windows)
    assert [window for strand in together for window in strand] == list(range(windows))
    assert len(together) == min(STRANDS, windows) and all(together)
    if windows:
        assert 0 in found[0][0]
    if windows >= STRANDS:
        assert max(map(len, found)) == -(-STRANDS // min(world, STRANDS))


def test_work_is_balanced() -> None:
    assert balanced([], 3) == []
    assert balanced([1, 1, 10, 1, 1], 2) == [1, 1, 0, 1, 1]
    costs = torch.rand(50, generator=torch.Generator().manual_seed(5)).tolist()
    owners = balanced(costs, 4)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(4)]
    assert max(loads) <= 4 / 3 * sum(costs) / 4
