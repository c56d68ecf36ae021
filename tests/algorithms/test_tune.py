"""End-to-end tuning: the divergence falls, never rises; codes stay; what is returned computes what was measured."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the models need the extra hf")

from safetensors.torch import load_file

from command_line import ROUND, quantize, run, teacher_and_text, text
from epiloq.evaluation.divergence import divergence
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load
from epiloq.quantize import Grid, gptq, rtn
from epiloq.quantize.algorithms.trained_scales import Divergence, TrainedScales
from epiloq.quantize.algorithms.tune import Tuned, tune
from epiloq.weights.grid import InputGrid, QuantizedWeight
from epiloq.weights.rounding import Parameters, expand_parameters
from tiny_teacher import tiny_model

STEPS = 10


def sharp_model() -> Any:
    """A random model whose predictions depend on its layers."""
    model = tiny_model(**ROUND)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.15 * torch.randn_like(parameter))
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def rounded(model: Any, grid: Grid, inputs: InputGrid | None = None) -> tuple[Any, dict[str, QuantizedWeight]]:
    found, weights = copy.deepcopy(model), {}
    for name, layer in found.named_modules():
        if isinstance(layer, nn.Linear) and "layers" in name:
            weights[name] = replace(rtn(layer.weight, grid), inputs=inputs)
            layer.weight.data = weights[name].dequantize()
    return found, weights


def text_windows(count: int = 3) -> list[Tensor]:
    return [torch.randint(0, 256, (1, 24)) for _ in range(count)]


def put(model: Any, found: Tuned) -> Any:
    result = copy.deepcopy(model)
    for name, weight in found.weights.items():
        result.get_submodule(name).weight.data = weight.dequantize()
    for name, value in found.norms.items():
        result.get_parameter(name).data = value
    return result


@pytest.mark.parametrize("grid", [Grid(3, -1), Grid(4, 24, True), Grid(4, 32, scale_dtype=torch.bfloat16)])
def test_the_divergence_falls_and_is_what_the_result_computes(seed: int, grid: Grid) -> None:
    torch.manual_seed(seed)
    teacher = sharp_model()
    model, weights = rounded(teacher, grid)
    windows, before = text_windows(), copy.deepcopy(model.state_dict())
    found = tune(model, weights, teacher, windows, steps=STEPS, rate=3e-3)
    assert found.after < found.before
    assert found.before == pytest.approx(divergence(teacher, model, windows), rel=1e-3)
    assert found.after == pytest.approx(divergence(teacher, put(model, found), windows), rel=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, weight in found.weights.items():
        assert torch.equal(weight.q, weights[name].q) and weight.zero is weights[name].zero
        assert torch.equal(weight.scale, weight.scale.to(grid.scale_dtype).float()) and (weight.scale > 0).all()
    assert any(not torch.equal(w.scale, weights[n].scale) for n, w in found.weights.items())


@pytest.mark.parametrize("bfloat16", [False, True])
def test_products_in_bfloat16_are_for_training_only(seed: int, bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    monkeypatch.setattr("epiloq.quantize.algorithms.tune.multiplies_bfloat16", lambda: bfloat16)
    teacher = sharp_model()
    model, weights = rounded(teacher, Grid(3, -1))
    seen: dict[bool, set[torch.dtype]] = {False: set(), True: set()}
    model.get_submodule("model.layers.0.mlp.down_proj").register_forward_hook(
        lambda module, args, output: seen[torch.is_grad_enabled()].add(output.dtype)
    )
    windows = text_windows()
    found = tune(model, weights, teacher, windows, steps=STEPS, rate=3e-3)
    assert seen == {False: {torch.float32}, True: {torch.bfloat16 if bfloat16 else torch.float32}}
    assert found.after < found.before
    assert found.after == pytest.approx(divergence(teacher, put(model, found), windows), rel=1e-3)


def test_gradients_are_computed_of_what_is_trained_alone(seed: int) -> None:
    torch.manual_seed(seed)
    teacher = sharp_model()
    model, weights = rounded(teacher, Grid(3, -1))
    model.lm_head.weight.requires_grad_(False)
    needed = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    during: list[bool] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda *_: during.append(embedding.weight.requires_grad))
    tune(model, weights, teacher, text_windows(), steps=1)
    assert during and not any(during)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == needed


def test_tuning_without_gain_is_discarded(seed: int) -> None:
    torch.manual_seed(seed)
    teacher = sharp_model()
    model, weights = rounded(teacher, Grid(8, -1, True))
    found = tune(model, weights, teacher, text_windows(), steps=4, rate=10.0)
    assert found.after == found.before
    assert all(found.weights[name] is weight for name, weight in weights.items())
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in found.norms.items())


def test_weights_in_another_order_are_restored_in_the_layer_s(seed: int) -> None:
    torch.manual_seed(seed)
    teacher = sharp_model()
    model, weights = rounded(teacher, Grid(4, 32))
    name = "model.layers.0.mlp.down_proj"
    weight, x = teacher.get_submodule(name).weight, torch.randn(200, 96) * torch.rand(96)
    weights[name] = gptq(weight.detach(), x.t() @ x, Grid(4, 32), act_order=True, static_groups=False)
    assert weights[name].perm is not None
    model.get_submodule(name).weight.data = weights[name].dequantize()
    windows = text_windows()
    found = tune(model, weights, teacher, windows, steps=STEPS, rate=3e-3)
    assert found.before == pytest.approx(divergence(teacher, model, windows), rel=1e-3)
    assert found.after == pytest.approx(divergence(teacher, put(model, found), windows), rel=1e-3)
    assert found.after < found.before


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 24, True), Grid(3, -1), Grid(8, 40, True)])
@pytest.mark.parametrize("at_once", [1, 1000, 1 << 18])
def test_products_and_their_gradients(seed: int, grid: Grid, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes them with the whole weight in float64; blocks of rows and groups need not divide it."""
    monkeypatch.setattr("epiloq.quantize.algorithms.trained_scales.CACHED", at_once)
    value = rtn(torch.randn(90, 96), grid)
    layer = TrainedScales(value, torch.device("cpu"))
    x, dy = torch.randn(2, 5, 96, requires_grad=True), torch.randn(2, 5, 90)
    bias = torch.randn(90)
    y = layer.product(x, bias, torch.float32)
    y.backward(dy)
    scale = value.scale.double().requires_grad_()
    exact = x.detach().double().requires_grad_()
    weight = layer.codes.double() * expand_parameters(Parameters(scale), grid, layer.codes.shape).scale
    wanted = exact @ weight.t() + bias
    wanted.backward(dy.double())
    torch.testing.assert_close(weight, value.dequantize().double(), rtol=1e-6, atol=0)
    assert x.grad is not None and exact.grad is not None and scale.grad is not None and layer.change.grad is not None
    pairs = (y, wanted), (x.grad, exact.grad), (layer.change.grad, scale.grad * value.scale)
    assert all((found - right).norm() <= 1e-5 * right.norm() for found, right in pairs)


def test_the_divergence_and_its_gradient(seed: int) -> None:
    """As torch computes them, in float64; 150 tokens are no multiple of those that are compared at once."""
    logits, teacher = 3 * torch.randn(150, 70, requires_grad=True, dtype=torch.float64), 3 * torch.randn(150, 70)
    wanted = functional.kl_div(
        logits.log_softmax(-1), teacher.double().log_softmax(-1), reduction="batchmean", log_target=True
    )
    gradient = torch.autograd.grad(2 * wanted, logits)[0]
    single = logits.detach().float().requires_grad_()
    found: Tensor = Divergence.apply(single, teacher)  # type: ignore[no-untyped-call]
    (2 * found).backward()
    assert single.grad is not None and found.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(single.grad.double(), gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("inputs", ["int8", "int8-azp", "int8-static"])
def test_activations_are_rounded_as_the_result_does(seed: int, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    teacher = sharp_model()
    # A range of 2.5 clips many inputs, so that training surely gains by it.
    static = InputGrid(torch.tensor([0.02]), torch.tensor([3], dtype=torch.int32)) if inputs == "int8-static" else None
    model, weights = rounded(teacher, Grid(8, -1, True), static)
    windows = text_windows()
    found = tune(model, weights, teacher, windows, steps=2 * STEPS, inputs=inputs)
    plain = tune(model, weights, teacher, windows, steps=0)
    assert found.before > plain.before and found.after < found.before


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": -1}, "steps: expected at least 0, got -1"), ({"steps": 1, "rate": 0.0}, "rate: expected more than 0")],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=f"tune: {message}"):
        tune(model, {}, model, text_windows(1), **options)
    with pytest.raises(ValueError, match="tune: windows: expected at least 1"):
        tune(model, {}, model, [], steps=1)
    with pytest.raises(ValueError, match=r"expected float32 parameters, got torch.bfloat16"):
        tune(copy.deepcopy(model).bfloat16(), {}, model, text_windows(1), steps=1)


def test_windows_whose_logits_are_not_finite_are_refused(seed: int) -> None:
    teacher, windows = sharp_model(), text_windows()
    model, weights = rounded(teacher, Grid(4, 32))
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="tune: model: expected logits with a finite divergence, got nan"):
        tune(model, weights, teacher, windows, steps=1)
    with pytest.raises(ValueError, match="logits of the floating-point model: expected finite numbers"):
        tune(teacher, weights, model, windows, steps=1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = teacher_and_text(tmp_path_factory.mktemp("teacher"), ROUND)
    torch.manual_seed(1)
    sharp_model().save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8-static"])
def test_the_command_writes_what_was_tuned(teacher: Path, tmp_path: Path, scheme: str) -> None:
    plain, out = tmp_path / "plain", tmp_path / "tuned"
    common = ("--scheme", scheme, "--format", "epiloq")
    assert quantize(teacher, plain, *common).exit_code == 0
    result = quantize(teacher, out, *common, "--tune", STEPS, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    tuning = json.loads((tmp_path / "r.json").read_text())["tuning"]
    assert tuning["steps"] == STEPS and tuning["kl_after"] < tuning["kl_before"]
    assert f"tuned in {STEPS} steps: KL divergence on calibration text" in result.output
    figures = []
    for folder in (plain, out):
        ran = run(
            "eval", folder, "--text", text(teacher), "--length", 32, "--kl", teacher, "--json", tmp_path / "e.json"
        )
        assert ran.exit_code == 0, ran.output
        figures.append(json.loads((tmp_path / "e.json").read_text())["kl"])
    assert figures[1] < figures[0]
    one, other = (load_file(folder / "model.safetensors") for folder in (plain, out))
    assert one.keys() == other.keys()
    assert all(one[n].shape == other[n].shape and one[n].dtype == other[n].dtype for n in one)
    changed = {n for n in one if not torch.equal(one[n], other[n])}
    assert changed and all(n.endswith(("_scale", "norm.weight")) for n in changed), changed


def test_a_half_precision_model_keeps_its_type(teacher: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    model, _ = load(Checkpoint(teacher))
    teacher_and_text(tmp_path / "other", ROUND).rename(half)
    model.bfloat16().save_pretrained(half)
    half.with_name("text.txt").write_text(text(teacher).read_text())
    result = quantize(half, tmp_path / "out", "--scheme", "w4a16-g32", "--tune", STEPS)
    assert result.exit_code == 0, result.output
    floats = {
        n: t.dtype for n, t in load_file(tmp_path / "out" / "model.safetensors").items() if n.endswith("norm.weight")
    }
    assert set(floats.values()) == {torch.bfloat16}


def test_schemes_without_integers_are_refused(teacher: Path, tmp_path: Path) -> None:
    result = quantize(teacher, tmp_path / "out", "--scheme", "fp8-token", "--tune", 4)
    assert result.exit_code == 2 and "--tune: expected a scheme of integers" in result.output
    assert not (tmp_path / "out").exists()
