"""Calibration block by block: structure found by running, families of models, resuming, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from epiloq.layer_filter import default_filter
from epiloq.quantize import Float8Grid, Grid, InputStatistics, OffsetGrid, rtn
from epiloq.quantize.algorithms.table import ALGORITHMS, Algorithm
from epiloq.quantize.calibration.blocks import find_blocks, record
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.inputs import input_groups
from epiloq.quantize.calibration.work import Block
from model_families import FAMILIES, SHARED, VOCABULARY, llama, outlying


def texts(count: int = 6, length: int = 24) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (1, length)) for _ in range(count)]


@torch.no_grad()
def logits(model: nn.Module, windows: list[Tensor]) -> Tensor:
    return torch.cat([model(window, use_cache=False).logits[0] for window in windows])


def walk(model: nn.Module, windows: list[Tensor], algorithm: str, grid: Any, **options: Any) -> dict[str, Block]:
    wish = ALGORITHMS[algorithm]
    wish = replace(wish, learn=min(wish.learn, 4))
    return {block.name: block for block in calibrate(model, windows, grid, wish, **options)}


def block_calls(model: nn.Module, windows: list[Tensor]) -> tuple[dict[str, nn.Module], Any]:
    blocks = find_blocks(model, default_filter(model))
    return blocks, record(model, list(blocks.values()), windows)


@pytest.mark.parametrize("family", FAMILIES)
def test_running_recorded_blocks_is_running_the_model(seed: int, family: str) -> None:
    model, windows = FAMILIES[family]().eval(), [*texts(3), *texts(2, 9)]
    blocks, recorded = block_calls(model, windows)
    inputs: list[list[Tensor]] = [[] for _ in blocks]
    handles = [
        block.register_forward_pre_hook(
            lambda m, a, k, kept=kept: kept.append(a[0] if a else k["hidden_states"]), with_kwargs=True
        )
        for block, kept in zip(blocks.values(), inputs, strict=True)
    ]
    logits(model, windows)
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for block, calls, expected in zip(blocks.values(), recorded.calls, inputs, strict=True):
            assert all(torch.equal(h, e) for h, e in zip(recorded.hidden, expected, strict=True))
            recorded.hidden = [c.run(block, h) for c, h in zip(calls, recorded.hidden, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_inputs_are_found_and_measured(seed: int, family: str) -> None:
    model, windows = FAMILIES[family]().eval(), texts(3)
    blocks, recorded = block_calls(model, windows)
    name, block = next(iter(blocks.items()))
    layers = {f"{name}.{n}": m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
    seen: dict[str, InputStatistics] = {n: InputStatistics(m.in_features) for n, m in layers.items()}
    handles = [m.register_forward_pre_hook(lambda _, a, s=seen[n]: s.add(a[0])) for n, m in layers.items()]
    logits(model, windows)
    for handle in handles:
        handle.remove()
    pairs = zip(recorded.calls[0], recorded.hidden, strict=True)
    groups = input_groups(layers, [[lambda c=c, h=h: c.run(block, h)] for c, h in pairs])
    found = [sorted(group.names) for group in groups]
    expected = [sorted(n for n in layers if n.endswith(tuple(leaves))) for leaves in SHARED[family]]
    assert sorted(found) == sorted(expected)
    for group in groups:
        assert group.statistics.tokens == 72
        torch.testing.assert_close(group.statistics.hessian, seen[group.names[0]].hessian)


INT8, OTHER_GRIDS = Grid(8, -1, True), (Float8Grid(128, 128), Float8Grid(rows=-1), OffsetGrid(8, 16))


@pytest.mark.parametrize(
    ("family", "algorithm", "grid"),
    [
        *(("llama", name, INT8) for name in ALGORITHMS),
        *((name, "awq+gptq", INT8) for name in FAMILIES if name != "llama"),
        *((name, "gptq", grid) for name in FAMILIES for grid in OTHER_GRIDS),
    ],
)
def test_the_model_ends_as_its_quantised_weights(seed: int, family: str, algorithm: str, grid: Any) -> None:
    model, windows = outlying(FAMILIES[family]()), texts()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    blocks = walk(model, windows, algorithm, grid)
    weights = {n: w for block in blocks.values() for n, w in block.weights.items()}
    takes = default_filter(model)
    in_blocks = tuple(f"{name}." for name in blocks)
    assert set(weights) == {n for n, m in model.named_modules() if takes(m, n) and n.startswith(in_blocks)}
    for name, value in weights.items():
        assert torch.equal(model.get_submodule(name).weight, value.dequantize())
    for name, block in blocks.items():
        assert set(block.errors) == set(block.weights) and all(0 <= e < 0.2 for e in block.errors.values())
        assert all(torch.equal(model.get_submodule(name).state_dict()[n], v) for n, v in block.state.items())
    outside = {n: p for n, p in model.state_dict().items() if not n.startswith(in_blocks)}
    assert all(torch.equal(p, before[n]) for n, p in outside.items())
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(before)
    exact, got = logits(fresh, windows), logits(model, windows)
    assert ((got - exact).norm() / exact.norm()) < 0.5  # Sharp attention; a wrong model is off by more than 1.


def loss(model: nn.Module, original: nn.Module, windows: list[Tensor]) -> float:
    exact = logits(original, windows)
    return float((logits(model, windows) - exact).norm() / exact.norm())


@pytest.mark.slow
def test_algorithms_gain(seed: int) -> None:
    """At four bits, on inputs that they have not seen: GPTQ and AWQ over rounding, in models with large channels."""
    found = dict.fromkeys(("rtn", "gptq", "awq", "awq+gptq"), 0.0)
    for _ in range(8):  # One such model may do without.
        original, calibration, evaluation = outlying(llama()), texts(24), texts(8)
        for algorithm in found:
            model = copy.deepcopy(original)
            walk(model, calibration, algorithm, Grid(4, 32))
            found[algorithm] += loss(model, original, evaluation)
    assert found["gptq"] < 0.85 * found["rtn"], found
    assert found["awq"] < found["rtn"], found
    assert found["awq+gptq"] < 0.9 * found["rtn"], found


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_keeps_the_function(seed: int, family: str) -> None:
    """With 8 bits in groups of one channel nothing is lost but what folding gets wrong."""
    original, windows = outlying(FAMILIES[family]()), texts()
    model = copy.deepcopy(original)
    walk(model, windows, "smoothquant", Grid(8, 1))
    assert loss(model, original, windows) < 1e-3
    changed = [
        n for n, p in model.named_parameters() if "norm" in n.lower() and not torch.equal(p, original.get_parameter(n))
    ]
    # BERT's norms are residuals as well, so nothing may be folded into them.
    assert bool(changed) == (family != "bert")


def test_interrupted_run_resumes(seed: int) -> None:
    original, windows = outlying(llama()), texts()
    for algorithm in ("gptq", "smoothquant+gptq"):
        whole = copy.deepcopy(original)
        expected = walk(whole, windows, algorithm, Grid(4, 32))
        interrupted = calibrate(copy.deepcopy(original), windows, Grid(4, 32), ALGORITHMS[algorithm])
        kept = {block.name: block for block, _ in zip(interrupted, range(2), strict=False)}
        resumed = copy.deepcopy(original)
        again = walk(resumed, windows, algorithm, Grid(4, 32), finished=kept.get)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        assert [again[name] is block for name, block in kept.items()] == [True, True]
        assert all(torch.equal(again[b].weights[n].q, w.q) for b in expected for n, w in expected[b].weights.items())


def test_rounding_needs_no_inputs(seed: int) -> None:
    model = llama().eval()
    before = copy.deepcopy(model)
    for block in calibrate(model, [], Grid(4, 16), ALGORITHMS["rtn"]):
        for name, value in block.weights.items():
            assert torch.equal(value.q, rtn(before.get_submodule(name).weight, Grid(4, 16)).q)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_blocks_on_a_gpu(seed: int, whole: bool) -> None:
    """A model that is there, and one of which a block at a time is."""
    by_rounding, by_calibration = 0.0, 0.0
    for _ in range(3):  # one such model may gain less
        original, calibration, evaluation = outlying(llama()), texts(24), texts(8)
        nearest, found = copy.deepcopy(original), copy.deepcopy(original)
        walk(nearest, [], "rtn", Grid(4, 32))
        walk(found.cuda() if whole else found, calibration, "awq+gptq", Grid(4, 32), device="cuda")
        assert {p.device.type for p in found.parameters()} == {"cuda" if whole else "cpu"}
        by_rounding += loss(nearest, original, evaluation)
        by_calibration += loss(found.cpu(), original, evaluation)
    assert by_calibration < 0.85 * by_rounding


def test_overrides(seed: int) -> None:
    model, windows = llama().eval(), texts(2)
    blocks = walk(
        model,
        windows,
        "gptq",
        Grid(),
        blocks="model.layers",
        filter_fn=lambda m, n: n.endswith(("up_proj", "1.mlp.down_proj")),
    )
    names = [name for block in blocks.values() for name in block.weights]
    assert names == [
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.2.mlp.up_proj",
    ]


@pytest.mark.parametrize("algorithm", [name for name, wish in ALGORITHMS.items() if wish.needs_inputs])
def test_inputs_that_are_not_finite_are_refused(seed: int, algorithm: str) -> None:
    model, windows = llama().eval(), texts(2)
    windows[-1][0, 5] = 7
    model.model.embed_tokens.weight.data[7] = float("nan")
    message = r"layers\.0\.self_attn\.q_proj.*: expected finite numbers"
    if ALGORITHMS[algorithm].guided:
        message = "expected finite logits for guided Hessians, got NaN"
    state = {name: value for name, value in copy.deepcopy(model.state_dict()).items() if "embed" not in name}
    with pytest.raises(ValueError, match=message):
        walk(model, windows, algorithm, Grid(4, 16))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


@pytest.mark.parametrize(
    "window",
    [torch.zeros(1, 0, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), torch.zeros(1, 5)],
    ids=["empty", "one dimension", "float"],
)
def test_windows_that_hold_no_tokens_are_refused(seed: int, window: Tensor) -> None:
    with pytest.raises(ValueError, match=r"windows: expected int64 \[1, n\] with at least one token, got"):
        walk(llama(), [*texts(1), window], "gptq", Grid())


class Chain(nn.Module):
    """Blocks with something in between."""

    def __init__(self, between: bool, shared: bool = False) -> None:
        super().__init__()
        self.embed, self.between = nn.Embedding(VOCABULARY, 16), between
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList([layers[0], layers[0]] if shared else layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) + (x if self.between else 0)
        return x


def test_unsupported_block_structures_are_refused(seed: int) -> None:
    def run(model: nn.Module, windows: list[Tensor], **options: Any) -> None:
        list(calibrate(model, windows, Grid(), ALGORITHMS["gptq"], **options))

    run(Chain(between=False).eval(), texts(2))
    before = Chain(between=True).eval()
    weights = copy.deepcopy(before.state_dict())
    with pytest.raises(ValueError, match="chain"):
        run(before, texts(2))
    assert all(torch.equal(weights[n], p) for n, p in before.state_dict().items())
    with pytest.raises(ValueError, match="share"):
        run(Chain(between=False, shared=True).eval(), texts(2))
    with pytest.raises(ValueError, match="windows"):
        run(llama().eval(), [])
    with pytest.raises(ValueError, match="found none"):
        run(nn.Sequential(nn.Linear(4, 4)).eval(), texts(1))
    with pytest.raises(ValueError, match="blocks"):
        run(llama().eval(), texts(1), blocks="model.norm")
    broken = llama().eval()
    with torch.no_grad():
        broken.model.embed_tokens.weight[5, 2] = float("nan")
    with pytest.raises(ValueError, match=r"q_proj.*finite"):
        run(broken, [torch.full((1, 8), 5)])


def test_the_model_is_left_as_it_was_but_for_weights(seed: int) -> None:
    model = llama().eval()
    walk(model, texts(2), "awq", Grid())
    assert model.config.use_cache
    assert all("forward" not in vars(m) and not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert isinstance(ALGORITHMS["awq"], Algorithm)
