"""Hessians weighted by the gradient of the end loss: the weights, the sums, and what the model gains."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from epiloq.models.mixtures import unstack_experts_
from epiloq.quantize import Float8Grid, Fp4Grid, Grid, InputStatistics, OffsetGrid
from epiloq.quantize.algorithms.one_weight import round_weight
from epiloq.quantize.algorithms.table import ALGORITHMS, Algorithm
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.guide import _loss, token_weights
from epiloq.quantize.job import perform, prepare
from epiloq.quantize.settings import Settings
from model_families import FAMILIES, VOCABULARY, llama
from tiny_mixtures import qwen3
from tiny_teacher import save, tiny_model

PLAIN, GUIDED = ALGORITHMS["gptq+refine"], ALGORITHMS["gptq-guided"]


def texts(count: int, length: int = 24) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (1, length)) for _ in range(count)]


def parts(model: nn.Module) -> tuple[list[nn.Module], dict[str, nn.Linear]]:
    blocks = list(model.get_submodule("model.layers"))
    names = {f"model.layers.{i}.{n}": m for i, b in enumerate(blocks) for n, m in b.named_modules()}
    return blocks, {n: m for n, m in names.items() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("slices", [1, 3])
def test_weights_are_squared_gradients(seed: int, slices: int) -> None:
    model = llama().eval()
    blocks, layers = parts(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    windows = texts(2)
    found = token_weights(model, blocks, layers, windows, slices)
    for window, weights in zip(windows, found, strict=True):
        made: dict[str, Tensor] = {}

        def keep(name: str, made: dict[str, Tensor], out: Tensor) -> None:
            out.retain_grad()
            made[name] = out

        handles = [
            layer.register_forward_hook(lambda m, a, out, name=name, made=made: keep(name, made, out))
            for name, layer in layers.items()
        ]
        _loss(model, window).backward()
        for handle in handles:
            handle.remove()
        for name, out in made.items():
            assert out.grad is not None
            expected = torch.stack([p.square().mean(1) for p in out.grad[0].tensor_split(slices, 1)], 1)
            torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-9)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in vars(block) for block in blocks)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_of_a_window_are_one_tensor(seed: int) -> None:
    """A small tensor for each layer, allocated between activations that are freed, would fragment the heap: memory
    grew with the number of windows."""
    model = llama().eval()
    _, layers = parts(model)
    for weights in token_weights(model, *parts(model), texts(3), 2):
        assert len(weights) == len(layers) > 1
        assert len({part.untyped_storage().data_ptr() for part in weights.values()}) == 1


def test_weighted_sums(seed: int) -> None:
    x, weights, scale = torch.randn(60, 10), torch.rand(60, 2), torch.rand(10) + 0.5
    whole, part, rest = (InputStatistics(10, weightings=2, dtype=torch.float64) for _ in range(3))
    whole.add(x, weights)
    part.add(x[:20], weights[:20])
    rest.add(x[20:], weights[20:])
    part.merge(rest)
    part.divide(scale)
    for index, hessian in enumerate(part.weighted):
        divided = (x / scale).double()
        products = divided.t() @ (divided * weights[:, index : index + 1])
        off = ~torch.eye(10, dtype=torch.bool)
        found, expected = hessian[off], products[off]
        torch.testing.assert_close(found / found.norm(), expected / expected.norm(), rtol=0, atol=1e-6)
        assert (torch.linalg.eigvalsh(hessian) > 0).all()
    with pytest.raises(ValueError, match="weights: expected"):
        whole.add(x)
    with pytest.raises(ValueError, match="weights: expected"):
        whole.add(x, weights[:5])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_reproducible(seed: int, family: str) -> None:
    model, windows = FAMILIES[family]().eval(), texts(2, 9)
    again = copy.deepcopy(model)
    first = list(calibrate(model, windows, Grid(4, 16), GUIDED))
    second = list(calibrate(again, windows, Grid(4, 16), GUIDED))
    for block, other in zip(first, second, strict=True):
        assert all(torch.equal(value.q, other.weights[name].q) for name, value in block.weights.items())
        assert block.errors == other.errors


SEPARATE = [Grid(3, 16), Grid(4, -1, True), Float8Grid(), Fp4Grid("nvfp4"), OffsetGrid(4, 32)]
SHARED = [Float8Grid(128, 128), Float8Grid(rows=-1)]
"""Grids whose rows share scales."""


@pytest.mark.parametrize(
    ("grid", "slices"), [*((grid, n) for grid in SEPARATE for n in (1, 4)), *((grid, 1) for grid in SHARED)], ids=str
)
def test_slices_and_grids(seed: int, grid: Any, slices: int) -> None:
    model = llama().eval()
    blocks = list(calibrate(model, texts(1), grid, replace(GUIDED, slices=slices)))
    for block in blocks:
        for name, weight in block.weights.items():
            layer = model.get_submodule(name)
            assert weight.q.shape == layer.weight.shape and torch.equal(weight.dequantize(), layer.weight)


@pytest.mark.parametrize("slices", [2, 3])
def test_each_slice_is_rounded_by_its_own_hessian(seed: int, slices: int) -> None:
    model, grid, (window,) = llama().eval(), Grid(4, 16), texts(1)
    name = "model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    statistics = InputStatistics(layer.in_features, weightings=slices)
    (weights,) = token_weights(model, *parts(model), [window], slices)
    handle = layer.register_forward_pre_hook(lambda module, args: statistics.add(args[0], weights[name]))
    with torch.no_grad():
        model(window)
    handle.remove()
    pairs = zip(layer.weight.detach().clone().tensor_split(slices), statistics.weighted, strict=True)
    expected = [round_weight(rows, grid, GUIDED, hessian).q for rows, hessian in pairs]
    first, *_ = calibrate(model, [window], grid, replace(GUIDED, slices=slices))
    assert torch.equal(first.weights[name].q, torch.cat(expected))


def test_layers_with_fewer_rows_than_slices(seed: int) -> None:
    model = tiny_model(num_key_value_heads=1, head_dim=2).eval()
    first, *_ = calibrate(model, texts(1), Grid(4, 16), replace(GUIDED, slices=4))
    key = first.weights["model.layers.0.self_attn.k_proj"]
    assert len(key.q) == 2 and torch.isfinite(key.dequantize()).all()


@pytest.mark.parametrize("algorithm", ["gptq-guided", "awq+gptq-guided"])
def test_slices_of_a_run(seed: int, tmp_path: Path, algorithm: str) -> None:
    """Each number of slices has other Hessians, and so other weights; by default there is one."""
    model = tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    source = save(tmp_path / "model", model)
    (tmp_path / "text").write_text("".join(chr(97 + i * i % 26) for i in range(700)))
    usual: Any = {"calibration": tmp_path / "text", "count": 4, "length": 32, "force": True}

    def files(name: str, **more: int) -> dict[str, Tensor]:
        perform(prepare(Settings(source, tmp_path / name, "w4a16-g32", algorithm, **usual, **more)))
        return load_file(tmp_path / name / "model.safetensors")

    def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

    default, found = files("default"), [files(f"{n}", slices=n) for n in range(1, 5)]
    assert equal(found[0], default)
    assert not any(equal(one, other) for one, other in combinations(found, 2))


@pytest.mark.slow
def test_a_model_whose_loss_ignores_some_tokens_gains(seed: int) -> None:
    """Where gradients differ much between tokens, the end loss gains by Hessians that know it."""

    def divergence(algorithm: Algorithm) -> float:
        changed = copy.deepcopy(model)
        list(calibrate(changed, windows, Grid(2, 16), algorithm))
        with torch.no_grad():
            pairs = [(model(w).logits[0].log_softmax(-1), changed(w).logits[0].log_softmax(-1)) for w in windows]
        return float(sum((p.exp() * (p - q)).sum() for p, q in pairs))

    lost = {PLAIN.name: 0.0, GUIDED.name: 0.0}
    for _ in range(12):  # of one model alone the difference is as large as its spread
        model, windows = llama().eval(), texts(16)
        with torch.no_grad():
            model.get_submodule("lm_head").weight.mul_(20)
        for algorithm in (PLAIN, GUIDED):
            lost[algorithm.name] += divergence(algorithm)
    assert lost[GUIDED.name] < lost[PLAIN.name]


def test_refused(seed: int) -> None:
    mixture = qwen3()
    unstack_experts_(mixture)
    with pytest.raises(ValueError, match=r"experts.*expected each token of a window"):
        list(calibrate(mixture.eval(), [torch.randint(1, 40, (1, 9))], Grid(4, 16), GUIDED))
    model = llama().eval()
    with pytest.raises(ValueError, match="model with logits"):
        list(calibrate(model.get_submodule("model"), texts(2), Grid(4, 16), GUIDED))
    with pytest.raises(ValueError, match="slices: expected"):
        token_weights(model, *parts(model), texts(1), 0)
    of_layer: dict[str, Any] = {"model.layers.0.mlp.up_proj": SHARED[0]}
    for grid, grids in ((SHARED[0], None), (SHARED[1], None), (Grid(4, 16), of_layer)):
        with pytest.raises(ValueError, match="gptq-guided: slices: expected 1, as rows share scales, got 2"):
            calibrate(model, texts(1), grid, replace(GUIDED, slices=2), grids=grids)
