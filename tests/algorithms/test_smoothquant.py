"""SmoothQuant: the formula, what is found foldable and what is not, that only ranges change, and the gain."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq.quantize import fold_, search_smooth_scale, smooth_scale, smoothquant_
from epiloq.quantize.algorithms.smoothquant import INT8, foldings
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.inputs import observe


class Block(nn.Module):
    """A gated block with two norms, in the manner of a Llama layer but for attention."""

    def __init__(self, width: int, hidden: int, *, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.norm, self.mlp_norm = norm(width), norm(width)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + torch.tanh(self.q(y)) * self.k(y)
        y = self.mlp_norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Residual(nn.Module):
    """A norm whose output is also a residual (as in BERT): folding it would change the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.linear(y)


class OffsetNorm(nn.RMSNorm):
    """Multiplies by 1 + weight, as Gemma's norms do: dividing the weight does not divide the output."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) * (1 + self.weight)


def with_outliers(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)
                module.weight[::7] *= 40
    return model.eval()


def test_scale_is_the_formula(seed: int) -> None:
    amax, weights = torch.rand(17) * 10, [torch.randn(5, 17), torch.randn(9, 17)]
    amax[3] = 0
    weights[0][:, 4] = weights[1][:, 4] = 0
    for alpha in (0.0, 0.3, 0.5, 1.0):
        columns = np.maximum(*(np.abs(w.double().numpy()).max(0) for w in weights))
        with np.errstate(divide="ignore"):
            expected = amax.double().numpy() ** alpha / columns ** (1 - alpha)
        expected[3] = expected[4] = 1
        np.testing.assert_allclose(smooth_scale(amax, weights, alpha).numpy(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="alpha"):
        smooth_scale(amax, weights, 1.5)


def test_searched_scale_has_the_best_alpha(seed: int) -> None:
    x, weights = torch.randn(200, 48), [torch.randn(20, 48), torch.randn(12, 48)]
    x[:, ::11] *= 30
    amax = x.abs().amax(0)
    found = search_smooth_scale(x, amax, weights)

    def error(s: Tensor) -> float:
        def int8(value: Tensor) -> np.ndarray:
            exact = value.double().numpy()
            step = 2 * np.abs(exact).max(1, keepdims=True) / 255
            return np.clip(np.round(exact / step), -128, 127) * step

        return sum(float(((int8(x / s) @ int8(w * s).T - (x @ w.t()).double().numpy()) ** 2).sum()) for w in weights)

    errors = {alpha: error(smooth_scale(amax, weights, alpha)) for alpha in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)}
    # The largest of a row is a tie at 127.5 steps, which float32 breaks differently.
    assert error(found) <= 1.05 * min(errors.values())
    assert error(found) < 0.5 * error(torch.ones(48))


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_finds_a_blocks_foldings_and_changes_nothing(seed: int, norm: type[nn.Module]) -> None:
    model = with_outliers(nn.Sequential(Block(24, 40, norm=norm), Block(24, 40, norm=norm)))
    x = torch.randn(3, 11, 24)
    before = model(x)
    smoothed = smoothquant_(model, lambda m: m(x))
    assert [(s.producer, s.consumers) for s in smoothed] == [
        (f"{i}.{producer}", tuple(f"{i}.{consumer}" for consumer in consumers))
        for i in range(2)
        for producer, consumers in (("norm", ("q", "k")), ("mlp_norm", ("gate", "up")), ("up", ("down",)))
    ]
    assert all((s.scale != 1).any() for s in smoothed)
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-3)  # Outputs reach 100 and cancel.


def test_keeps_convolutions_with_other_readers(seed: int) -> None:
    for model in (Residual(16), Block(16, 24, norm=OffsetNorm)):
        with_outliers(model)
        x = torch.randn(5, 16)
        weights = copy.deepcopy(model.state_dict())
        producers = {s.producer for s in smoothquant_(model, lambda m, x=x: m(x))}
        assert producers <= {"up"}
        untouched = {name: value for name, value in model.state_dict().items() if not name.startswith(("up.", "down."))}
        assert all(torch.equal(value, weights[name]) for name, value in untouched.items())


def test_quantises_better(seed: int) -> None:
    """Outlier channels that spoil a scale per token: smoothing wins back most of the error."""
    plain = smoothed = 0.0
    for _ in range(12):  # One such model may gain little.
        model = with_outliers(nn.Sequential(*(Block(64, 96) for _ in range(2))))
        calibration, x = torch.randn(200, 64), torch.randn(50, 64)
        reference = model(x)

        def error(candidate: nn.Module, x: Tensor = x, reference: Tensor = reference) -> float:
            epiloq.quantize_(candidate, "w8a8-int8")
            return float(((candidate(x) - reference).norm() / reference.norm()).detach())

        plain += error(copy.deepcopy(model))
        smoothquant_(model, lambda m, calibration=calibration: m(calibration))
        smoothed += error(model)
    assert smoothed < 0.85 * plain


def test_a_layer_that_is_not_quantised_is_not_smoothed(seed: int) -> None:
    model = with_outliers(Block(16, 24))
    x = torch.randn(5, 16)
    smoothed = smoothquant_(model, lambda m: m(x), filter_fn=lambda module, name: name == "down")
    assert [s.producer for s in smoothed] == ["up"]


def test_errors(seed: int) -> None:
    model = Block(16, 24)
    with pytest.raises(ValueError, match="calibrate"):
        smoothquant_(model, lambda m: None)
    with pytest.raises(ValueError, match="alpha"):
        smoothquant_(model, lambda m: m(torch.randn(2, 16)), alpha=-0.1)
    with pytest.raises(ValueError, match="q: expected inputs with values, got tensors on meta"):
        smoothquant_(Block(16, 24).to("meta"), lambda m: m(torch.randn(2, 16, device="meta")))
    with pytest.raises(ValueError, match="producer"):
        fold_(nn.LayerNorm(8), [nn.Linear(16, 4)], torch.ones(16))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize("first", [False, True])
def test_samples_that_are_not_finite_are_refused(seed: int, wrong: float, first: bool) -> None:
    """1e25 overflows in the product of gate and up alone."""
    model = nn.Sequential(Block(16, 24))
    model[0].mlp_norm = nn.Identity()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(4, 16)
    bad = torch.cat((x[:1] * wrong, x))
    layer = "0.down" if wrong == 1e25 else r"0\.(q|k|gate)"
    with pytest.raises(ValueError, match=f"smoothquant_: calibrate: {layer}: expected finite inputs, got NaN"):
        smoothquant_(model, lambda m: [m(each) for each in ((bad, x) if first else (x, bad))])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_scales_of_numbers_that_are_not_finite_are_refused(seed: int) -> None:
    x, weight = torch.randn(20, 8), torch.randn(4, 8)
    amax = x.abs().amax(0)
    for wrong in (float("nan"), float("inf")):
        bad = amax.index_fill(0, torch.tensor([3]), wrong)
        for name, arguments in (("amax", (bad, [weight])), ("weight", (amax, [weight, weight * wrong]))):
            with pytest.raises(ValueError, match=f"{name}: expected finite numbers"):
                smooth_scale(*arguments)  # type: ignore[arg-type]
        for name, given in (("x", (x * wrong, amax)), ("amax", (x, bad))):
            with pytest.raises(ValueError, match=f"{name}: expected finite numbers"):
                search_smooth_scale(*given, [weight])
    with pytest.raises(ValueError, match="squares are finite"):
        search_smooth_scale(x * 1e25, amax * 1e25, [weight])


def test_weights_that_folding_would_overflow_are_left(seed: int) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).half()
    with torch.no_grad():
        model[0].weight[3] = 2e4
        model[1].weight[:, 3] = 1e-5
    before, x = copy.deepcopy(model.state_dict()), torch.randn(20, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"smoothquant_: 1: scale: expected scales that keep .* torch.float16"):
        smoothquant_(model, lambda m: m(x), alpha=0.3)
    for scale in (torch.full((8,), 1e6), torch.zeros(8)):
        with pytest.raises(ValueError, match="fold_: scale"):
            fold_(model[0], [model[1]], scale)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_outputs_that_are_nan_are_refused(seed: int) -> None:
    """No folding would seem exact."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].bias[2] = float("nan")
    with pytest.raises(ValueError, match="outputs of the first sample: expected numbers, got NaN"):
        smoothquant_(model, lambda m: m(torch.randn(3, 8)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 2.0**-8])
def test_foldings_are_found_in_16_bits(seed: int, dtype: torch.dtype, size: float) -> None:
    """Halved, small float16 numbers are rounded; folding what was found still changes ranges alone."""
    model = nn.Sequential(Block(48, 64), Block(48, 64), Residual(48)).to(dtype)
    with torch.no_grad():
        for module in with_outliers(model).modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(size)
    tensors = {name: (id(value), value.data_ptr(), value.clone()) for name, value in model.named_parameters()}
    x = torch.randn(4, 64, 48, dtype=dtype)
    found = foldings(model, observe(model, lambda m: m(x)), lambda module, name: True)
    assert [folding.producer for folding in found] == [
        f"{i}.{name}" for i in (0, 1) for name in ("norm", "mlp_norm", "up")
    ]
    for name, value in model.named_parameters():
        assert tensors[name][:2] == (id(value), value.data_ptr()) and torch.equal(value, tensors[name][2]), name
    assert all(value.dtype == dtype for value in model.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_calibrating_folds_alike_in_every_type(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `calibrate`, whose probe is a block's recorded call with its mask and its embedded positions."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = with_outliers(transformers.LlamaForCausalLM(config)).to(dtype)
    names, folded = {module: name.rpartition(".")[2] for name, module in model.named_modules()}, []
    monkeypatch.setattr("epiloq.quantize.calibration.work.fold_", lambda producer, *_: folded.append(names[producer]))
    list(calibrate(model, [torch.randint(0, 64, (1, 20))], INT8, ALGORITHMS["smoothquant"]))
    assert folded == 2 * ["input_layernorm", "post_attention_layernorm", "up_proj", "v_proj"]


def test_a_transformers_model(seed: int) -> None:
    """Attention in between, token numbers in, an output object out."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = with_outliers(transformers.LlamaForCausalLM(config))
    ids = torch.randint(0, 64, (2, 30))
    with torch.no_grad():
        before = model(ids).logits
        smoothed = smoothquant_(model, lambda m: m(input_ids=ids, use_cache=False))
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-3, atol=1e-4)
    leaves = [s.producer.rpartition(".")[2] for s in smoothed]
    assert leaves == ["input_layernorm", "post_attention_layernorm", "up_proj"] * 2 + ["v_proj"] * 2
