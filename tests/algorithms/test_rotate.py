"""Rotations folded into weights: exact matrices, the same logits, fewer outliers, and models that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from epiloq.formats.io.model import from_directory
from epiloq.quantize import Grid, hadamard, rotate_, rtn
from epiloq.quantize.algorithms.hadamard import rotation
from epiloq.quantize.algorithms.rotate import BOUNDS
from epiloq.quantize.job import perform, prepare
from epiloq.quantize.settings import Settings
from model_families import SIZES, VOCABULARY, bert, neox, opt
from tiny_teacher import save, tiny_model

KNOWN = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 64, 96, 128, 576, 896, 960, 1536)


@pytest.mark.parametrize("size", KNOWN)
def test_hadamard(size: int) -> None:
    found = hadamard(size)
    assert found is not None and (found.abs() == 1).all()
    assert torch.equal(found @ found.t(), size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 6, 9, 12, 50, 64, 92])
def test_rotations_are_orthogonal_and_repeat(seed: int, size: int) -> None:
    found, again, other = (rotation(size, torch.Generator().manual_seed(s)) for s in (seed, seed, seed + 1))
    torch.testing.assert_close(found @ found.t(), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(found, again) and not torch.equal(found, other)


def test_sizes_without_a_construction(seed: int) -> None:
    assert all(hadamard(size) is None for size in (3, 6, 10, 50, 92))
    with pytest.raises(ValueError, match="size: expected"):
        hadamard(0)


def trained(model: Any) -> Any:
    """Norms and biases as training leaves them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-1, 1) if name.endswith("bias") else parameter.uniform_(0.2, 3)
    return model.eval()


def llama() -> Any:
    return tiny_model()


def mistral() -> Any:
    config = transformers.MistralConfig(intermediate_size=52, num_key_value_heads=2, sliding_window=8, **SIZES)
    return transformers.MistralForCausalLM(config)


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(intermediate_size=72, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    )


def llama_with_biases() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(intermediate_size=60, attention_bias=True, mlp_bias=True, head_dim=10, **SIZES)
    )


MODELS: dict[str, Callable[[], Any]] = {f.__name__: f for f in (llama, mistral, qwen2, llama_with_biases)}


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens, use_cache=False).logits
    return found.double()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_stay(seed: int, name: str, dtype: torch.dtype) -> None:
    model = trained(MODELS[name]()).to(dtype)
    before, tied = copy.deepcopy(model), model.config.tie_word_embeddings
    found = rotate_(model, seed=seed)
    tokens = torch.randint(0, VOCABULARY, (2, 30))
    expected = logits(before, tokens)
    assert (logits(model, tokens) - expected).norm() <= 2 * BOUNDS[dtype] * expected.norm()
    assert found.untied == tied and not model.config.tie_word_embeddings and found.error <= BOUNDS[dtype]
    if tied:
        assert model.lm_head.weight is not model.model.embed_tokens.weight
    changed = dict(before.named_parameters())
    weights = [n for n, p in model.named_parameters() if p.ndim == 2 and n in changed]
    assert all(not torch.equal(model.get_parameter(n), changed[n]) for n in weights if "q_proj" in n or "o_proj" in n)
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm" in n)


def test_outliers_spread(seed: int) -> None:
    """A few large channels make rounding per channel cost much, until they are rotated."""
    model = trained(mistral())
    block = model.model.layers[0]
    with torch.no_grad():
        block.input_layernorm.weight[::11] *= 30

    def relative(weight: Tensor) -> float:
        return float((rtn(weight, Grid(4)).dequantize() - weight).norm() / weight.norm())

    folded = block.self_attn.q_proj.weight.detach() * block.input_layernorm.weight.detach()
    before = relative(folded)
    rotate_(model, seed=seed)
    after = block.self_attn.q_proj.weight.detach()
    torch.testing.assert_close(after.norm(), folded.norm())
    peak = after.abs().amax(1).mean() / folded.abs().amax(1).mean()
    assert peak < 0.8 and relative(after) < 1.5 * before


@pytest.mark.parametrize("make", [neox, opt, bert], ids=lambda make: make.__name__)
def test_other_models_are_refused(seed: int, make: Callable[[], Any]) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=type(model).__name__):
        rotate_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(seed: int, wrong: float) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[2, 3] = wrong
    with pytest.raises(ValueError, match=r"rotate_: model\.layers\.1\.mlp\.down_proj\.weight: expected finite numbers"):
        rotate_(model)


def test_other_readers_of_hidden_states_are_detected(seed: int) -> None:
    model = trained(llama())
    model.model.layers[0].register_forward_hook(lambda m, a, out: out + 1 if isinstance(out, Tensor) else out)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="expected logits within"):
        rotate_(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_rotated_checkpoint(seed: int, tmp_path: Path, name: str) -> None:
    """Tied or not, the checkpoint has the model's architecture, and reloads as what was calibrated."""
    source = save(tmp_path / "model", trained(MODELS[name]()))
    job = prepare(Settings(source, tmp_path / "out", "w8a16", "rtn", rotate=True))
    assert any("head" in warning for warning in job.warnings)
    perform(job)
    model = from_directory(tmp_path / "out")
    assert not model.config.tie_word_embeddings
    tokens = torch.randint(0, VOCABULARY, (1, 30))
    expected, found = logits(from_directory(source), tokens), logits(model, tokens)
    assert (found - expected).norm() < 0.1 * expected.norm()
    torch.testing.assert_close(found, logits(job.model, tokens), rtol=1e-3, atol=1e-3)


def test_a_tied_head_is_quantised_by_itself(seed: int, tmp_path: Path) -> None:
    source = save(tmp_path / "model", trained(llama()))
    job = prepare(Settings(source, tmp_path / "out", "w8a16", "rtn", rotate=True, head="w8a16", embedding="w8a16"))
    perform(job)
    tokens = torch.randint(0, VOCABULARY, (1, 30))
    expected = logits(from_directory(source), tokens)
    assert (logits(from_directory(tmp_path / "out"), tokens) - expected).norm() < 0.1 * expected.norm()


def test_other_models_are_refused_before_they_are_read(seed: int, tmp_path: Path) -> None:
    source = save(tmp_path / "model", opt())
    with pytest.raises(ValueError, match="OPTForCausalLM"):
        prepare(Settings(source, tmp_path / "out", "w8a16", "rtn", rotate=True))
    assert not (tmp_path / "out").exists()
