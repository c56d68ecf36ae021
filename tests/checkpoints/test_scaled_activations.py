"""AWQ's models whose activation functions are divided by a vector: files of GPT-NeoX, GPT-J, Bloom and others."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from epiloq.formats import convert
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.models.scaled_activation import ScaledActivation
from opened_models import logits, opened

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")

SIZES = {"vocab_size": 192, "n_embd": 64, "n_head": 4, "n_layer": 2}


def gptj() -> Any:
    config = transformers.GPTJConfig(**SIZES, rotary_dim=8, n_positions=64, n_inner=128)
    return transformers.GPTJForCausalLM(config).eval()


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=192, hidden_size=64, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config).eval()


def starcoder() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Starcoder2Config(vocab_size=192, **sizes, num_key_value_heads=2)
    return transformers.Starcoder2ForCausalLM(config).eval()


# The name of the function, and of the layer that it is before.
FAMILIES: dict[str, tuple[Any, str, str]] = {
    "gpt_neox": (foreign.gpt_neox, "act", "dense_4h_to_h"),
    "gptj": (gptj, "act", "fc_out"),
    "bloom": (bloom, "gelu_impl", "dense_4h_to_h"),
    "starcoder2": (starcoder, "act", "c_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_opened_saved_and_converted(family: str, seed: int, tmp_path: Path) -> None:
    make, act, after = FAMILIES[family]
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    exact = foreign.write_as(tmp_path / "in", make(), lambda _, linear: foreign.awq(linear), config, shards=1)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    for name, linear in exact.named_modules():
        if name.endswith(after):
            scales = torch.rand(linear.in_features) + 0.5
            tensors[f"{name.removesuffix(after)}{act}.scales"] = scales
            linear.weight.data = linear.weight.data / scales
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    model, wanted = models.load(Checkpoint(tmp_path / "in"))[0], logits(exact)
    found = logits(model)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert sum(isinstance(module, ScaledActivation) for module in model.modules()) == 2
    theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), found)
    theirs.save_pretrained(tmp_path / "saved")
    after_saving = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: t.dtype for name, t in tensors.items()} == {name: t.dtype for name, t in after_saving.items()}
    assert all(torch.equal(after_saving[name], t) for name, t in tensors.items())
    for layout in ("epiloq", "gptq"):
        convert.perform(convert.prepare(tmp_path / "in", tmp_path / layout, layout))
        assert torch.equal(logits(models.load(Checkpoint(tmp_path / layout))[0]), found)
        assert torch.equal(logits(opened(tmp_path / layout)), found)
    optimised = copy.deepcopy(theirs)
    epiloq.optimize_(optimised)
    again = logits(optimised)
    assert float((again - wanted).norm() / wanted.norm()) < 1e-5


def test_the_definition(seed: int) -> None:
    x = torch.randn(3, 5, 24, dtype=torch.bfloat16)
    layer = ScaledActivation(torch.nn.GELU(), 24, torch.bfloat16, "cpu")
    layer.load_state_dict({"scales": torch.rand(24) + 0.5})
    exact = torch.nn.functional.gelu(x).double() / layer.scales.double()
    assert torch.equal(layer(x), exact.float().to(torch.bfloat16))
    assert layer.state_dict().keys() == {"scales"}


def test_ranks_cannot_share_the_vector(seed: int) -> None:
    from epiloq.integrations.hf_quantizer.parallel import _check

    model = starcoder()
    _check(model, SimpleNamespace(tp_size=2))
    model.model.layers[1].mlp.act = ScaledActivation(model.model.layers[1].mlp.act, 128, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.act: expected an activation function without scales"):
        _check(model, SimpleNamespace(tp_size=2))
