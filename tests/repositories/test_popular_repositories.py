"""Directories of the shape of much downloaded repositories: the right numbers, or a sentence that names the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import foreign_checkpoints as foreign
from command_line import run, teacher_and_text
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import from_directory
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from popular_configs import REFUSED, REPOSITORIES

SIZES: dict[str, int] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=False, **SIZES)).eval()


def llama3() -> Any:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = rope | {"original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(tie_word_embeddings=True, rope_scaling=scaling, rope_theta=5e5, **SIZES)
    return transformers.LlamaForCausalLM(config).eval()


def phi4() -> Any:
    """Queries, keys and values in one layer, gate and up in another."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = transformers.Phi3Config(pad_token_id=0, bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.Phi3ForCausalLM(config).eval()


def gemma3() -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES)).eval()


def symmetric(layout: str) -> Callable[[nn.Linear], foreign.Layer]:
    """Integers of groups of 128 whose zero point is the middle."""

    def made(linear: nn.Linear) -> foreign.Layer:
        found = foreign.Integers.random(linear.out_features, linear.in_features, 128)
        found.zero[:] = 8
        packed = {"gptq": _gptq, "w4a16": _w4a16}[layout](found, linear)
        return packed, found.weight

    return made


def _gptq(found: foreign.Integers, linear: nn.Linear) -> dict[str, Tensor]:
    return {
        "qweight": foreign.words(found.q.numpy()).T.contiguous(),
        "qzeros": foreign.words((found.zero - 1).T.numpy()),
        "scales": found.scale.T.contiguous(),
        "g_idx": found.groups.int(),
    }


def _w4a16(found: foreign.Integers, linear: nn.Linear) -> dict[str, Tensor]:
    found.scale = found.scale.bfloat16()
    shape = torch.tensor([linear.out_features, linear.in_features])
    return {"weight_packed": foreign.words(found.q.numpy()), "weight_scale": found.scale, "weight_shape": shape}


def awq(linear: nn.Linear) -> foreign.Layer:
    found = foreign.Integers.random(linear.out_features, linear.in_features, 128)

    def interleaved(values: Tensor) -> Tensor:
        eights = values.T.reshape(values.shape[1], -1, 8)[:, :, foreign.AWQ_ORDER]
        return foreign.words(eights.reshape(values.shape[1], -1).numpy())

    packed = {"qweight": interleaved(found.q), "qzeros": interleaved(found.zero), "scales": found.scale.T.contiguous()}
    return packed, found.weight


PACKERS: dict[str, Callable[[nn.Linear], foreign.Layer]] = {
    "awq": awq,
    "gptq": symmetric("gptq"),
    "w4a16": symmetric("w4a16"),
    "fp8": foreign.deepseek_fp8,
    "int-quantized": foreign.int_quantized,
    "float-quantized": foreign.fp8_channels,
    "static float-quantized": foreign.fp8_static,
}
EXACT = {"awq", "gptq", "w4a16"}
"""Packers of weights whose activations stay in floating point."""


FAMILIES = (qwen3, llama3, phi4, gemma3)
PAIRS = [(repository, FAMILIES[i % len(FAMILIES)]) for i, repository in enumerate(sorted(REPOSITORIES))]


@pytest.mark.parametrize(("repository", "family"), PAIRS)
def test_it_opens_with_the_right_weights(repository: str, family: Callable[[], Any], tmp_path: Path, seed: int) -> None:
    packer, config = REPOSITORIES[repository]
    model = foreign.write(tmp_path / "model", family(), (PACKERS[packer], config))
    layers = Layers(Checkpoint(tmp_path / "model"))
    for name, module in model.named_modules():
        if name in layers.readers:
            found = layers.dequantize(name)
            assert found is not None
            torch.testing.assert_close(found, module.weight.float(), rtol=2e-7, atol=0)
    assert len(layers.readers) == sum(isinstance(module, nn.Linear) for module in model.modules()) - 1
    opened = from_directory(tmp_path / "model")
    tokens = torch.arange(40)[None] * 3
    with torch.no_grad():
        found, expected = opened(tokens).logits, model(tokens).logits
    bound = 1e-5 if packer in EXACT else 0.25
    assert (found - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path, seed: int) -> None:
    foreign.write_as(tmp_path / "model", foreign.llama(), lambda *_: None, {"quant_method": method} | REFUSED[method])
    found = run("inspect", tmp_path / "model")
    assert found.exit_code == 2 and f"got '{method}'" in " ".join(found.output.split())


def changed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    foreign.write_as(folder, foreign.llama(), lambda *_: None, None, 1)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


UP, ONE = "model.layers.1.mlp.up_proj", torch.ones(1)
UNDESCRIBED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "FP8 with scales, as modelopt describes elsewhere": (
        lambda held: held | {f"{UP}.weight": held[f"{UP}.weight"].to(torch.float8_e4m3fn), f"{UP}.weight_scale": ONE},
        f"{UP}.weight: expected numbers in floating point of 16 bits or more, got F8_E4M3",
    ),
    "FP8 alone": (
        lambda held: held | {f"{UP}.weight": held[f"{UP}.weight"].to(torch.float8_e5m2)},
        f"{UP}.weight: expected numbers in floating point of 16 bits or more, got F8_E5M2",
    ),
    "int8": (
        lambda held: held | {f"{UP}.weight": held[f"{UP}.weight"].to(torch.int8)},
        f"{UP}.weight: expected numbers in floating point of 16 bits or more, got I8",
    ),
    "words of MLX": (
        lambda held: held | {f"{UP}.weight": torch.zeros(192, 8, dtype=torch.uint32), f"{UP}.scales": ONE},
        f"{UP}.weight: expected numbers in floating point of 16 bits or more, got U32",
    ),
    "scales with ordinary weights": (
        lambda held: held | {f"{UP}.weight_scale": ONE},
        f"{UP}.weight_scale: not a tensor of this model, whose {UP} is a plain Linear",
    ),
    "a bias that the configuration denies": (
        lambda held: held | {f"{UP}.bias": torch.ones(192)},
        f"{UP}.bias: not a tensor of this model, whose {UP} is a plain Linear",
    ),
    "an adapter's part": (
        lambda held: held | {f"{UP}.lora_A": torch.ones(4, 64)},
        f"{UP}.lora_A: not a tensor of this model, whose {UP} is a plain Linear",
    ),
}


@pytest.mark.parametrize("how", sorted(UNDESCRIBED))
def test_numbers_that_no_configuration_describes(how: str, tmp_path: Path, seed: int) -> None:
    change, message = UNDESCRIBED[how]
    folder = changed(tmp_path / "model", change)
    with pytest.raises(FormatError) as refused:
        from_directory(folder)
    assert message in str(refused.value)
    with pytest.raises(FormatError):
        Layers(Checkpoint(folder))


def test_and_the_quantiser_refuses_them_too(tmp_path: Path, seed: int) -> None:
    for how, (change, message) in UNDESCRIBED.items():
        folder = changed(tmp_path / how, change)
        command = ("--scheme", "w8a16", "--algorithm", "rtn", "--output", tmp_path / "out")
        found = run("quantize", folder, *command)
        assert found.exit_code == 2 and (message in found.output or "disagrees" in found.output), found.output
        assert not (tmp_path / "out").exists()


def test_a_bias_of_zeros_that_the_configuration_denies_is_none(tmp_path: Path, seed: int) -> None:
    folder = changed(tmp_path / "model", lambda held: held | {f"{UP}.bias": torch.zeros(192)})
    with pytest.warns(UserWarning, match="left out"):
        assert from_directory(folder).get_submodule(UP).bias is None


@pytest.mark.parametrize("file", ["pytorch_model.bin", "qmodel.pt", "model-Q4_K_M.gguf", "consolidated.safetensors"])
def test_weights_in_another_form_are_named(file: str, tmp_path: Path) -> None:
    model = teacher_and_text(tmp_path, {})
    (model / "model.safetensors").rename(model / file)
    tool = " of hqq" if file == "qmodel.pt" else ""
    with pytest.raises(FormatError, match=f"found neither, but weights{tool} in another form: {file}"):
        from_directory(model)
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="but weights of hqq in another form"):
        from_directory(model)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"config\.json: missing: adapter_config\.json is PEFT's"):
        from_directory(tmp_path)


def test_an_adapter_beside_a_model_is_not_dropped(tmp_path: Path) -> None:
    """transformers applies it; a result without it would be another model."""
    model = teacher_and_text(tmp_path, {})
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"adapter_config\.json: describes an adapter, .*: merge it"):
        from_directory(model)
    found = run("quantize", model, "--scheme", "w8a16", "--algorithm", "rtn", "--output", tmp_path / "out")
    assert found.exit_code == 2 and "merge it" in found.output.replace("\n", " ") and not (tmp_path / "out").exists()


def test_an_index_that_a_smaller_save_left(tmp_path: Path) -> None:
    """transformers removes the shards, and leaves their index beside the one file that it writes."""
    model = from_directory(teacher_and_text(tmp_path, {}))
    model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    again = from_directory(tmp_path / "saved")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
