"""Checkpoints in the manner of DeepSeek-V3: to files, back, through transformers, and what is wrong with bad ones."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epiloq
from epiloq.formats import deepseek_fp8
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp8BlockLinear
from tiny_teacher import tiny_model

EVEN = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
ODD = {"hidden_size": 136, "intermediate_size": 200, "num_attention_heads": 4, "head_dim": 34}
DOWN = "model.layers.1.mlp.down_proj"


def make(dtype: torch.dtype = torch.float32, sizes: dict[str, int] | None = None) -> Any:
    """Weights of many magnitudes, so that blocks differ."""
    model = tiny_model(**(EVEN if sizes is None else sizes))
    for parameter in model.parameters():
        # The rotary frequencies, a buffer, stay in float32, as transformers has them when it loads.
        parameter.data = (parameter.data * torch.exp(torch.randn(parameter.shape) / 2)).to(dtype)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] * 5, use_cache=False).logits  # type: ignore[no-any-return]


def layers(model: nn.Module) -> dict[str, Fp8BlockLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8BlockLinear)}


def dequantised(quantised: Any, original: Any) -> Any:
    """`original` with the weights that a quantised model stands for."""
    model = copy.deepcopy(original)
    for name, layer in layers(quantised).items():
        n, k = layer.out_features, layer.in_features
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        model.get_submodule(name).weight.data = (layer.weight_q.view(torch.float8_e4m3fn).float() * scale).to(
            original.dtype
        )
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest_shard", [10**9, 100_000])
@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.filterwarnings("ignore:transformers dequantises")
def test_a_model_comes_back_bit_for_bit(
    dtype: torch.dtype, largest_shard: int, sizes: dict[str, int], seed: int, tmp_path: Path
) -> None:
    model = epiloq.quantize_(make(dtype, sizes), "fp8-block")
    deepseek_fp8.save(model, tmp_path / "out", largest_shard)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) == 1) == (largest_shard > 10**6)
    again = deepseek_fp8.load(tmp_path / "out")
    assert len(layers(again)) == 14
    assert next(again.parameters()).dtype == dtype
    assert not again.training
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    same, quantization = models.load(Checkpoint(tmp_path / "out"))
    assert quantization is None
    assert torch.equal(logits(same), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_opens_it_with_equal_logits(dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    original = make(dtype)
    model = epiloq.quantize_(copy.deepcopy(original), "fp8-block")
    deepseek_fp8.save(model, tmp_path / "out")
    config = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=config, dtype="auto"
    )
    exact = dequantised(model, original)
    assert torch.equal(logits(theirs), logits(exact))
    assert not torch.equal(logits(theirs), logits(original))
    # Ours quantises activations too: 0.04 to 0.07 over random weights.
    assert float((logits(model) - logits(exact)).norm() / logits(exact).norm()) < 0.2
    found = transformers.AutoConfig.from_pretrained(tmp_path / "out").quantization_config
    assert found["modules_to_not_convert"] == ["lm_head"]
    assert transformers.FineGrainedFP8Config(**found).weight_block_size == [128, 128]


def test_file_contents(seed: int, tmp_path: Path) -> None:
    model = epiloq.quantize_(make(), "fp8-block")
    deepseek_fp8.save(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors[f"{DOWN}.weight"].dtype == torch.float8_e4m3fn
    assert tensors[f"{DOWN}.weight"].shape == (128, 256)
    assert tensors[f"{DOWN}.weight_scale_inv"].shape == (1, 2)
    assert tensors["model.embed_tokens.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_layers_left_in_floating_point_and_biases(seed: int, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=1, attention_bias=True, num_key_value_heads=2, **EVEN
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    epiloq.quantize_(model, "fp8-block", lambda module, name: name.endswith(("q_proj", "up_proj", "lm_head")))
    deepseek_fp8.save(model, tmp_path / "out")
    again = deepseek_fp8.load(tmp_path / "out")
    assert sorted(name.rpartition(".")[2] for name in layers(again)) == ["lm_head", "q_proj", "up_proj"]
    assert torch.equal(again(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)


def test_user_defined_model(seed: int, tmp_path: Path) -> None:
    """Any module whose tensors have the checkpoint's names."""
    model = epiloq.quantize_(make(), "fp8-block")
    deepseek_fp8.save(model, tmp_path / "out")
    own = make()
    assert deepseek_fp8.read(own, Checkpoint(tmp_path / "out")) is own
    assert torch.equal(logits(own), logits(model))


def test_sizes_that_transformers_misreads_are_warned_of(seed: int, tmp_path: Path) -> None:
    model = epiloq.quantize_(make(sizes=ODD), "fp8-block")
    with pytest.warns(UserWarning, match=r"transformers dequantises 14 layers wrongly.*q_proj"):
        deepseek_fp8.save(model, tmp_path / "out")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    deepseek_fp8.save(epiloq.quantize_(make(), "fp8-block"), folder, largest_shard=150_000)
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> str:
    """Apply `change` to the tensors of the last shard, which holds DOWN, and name that file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"][f"{DOWN}.weight"]
    tensors = load_file(folder / file)
    names = set(tensors)
    change(tensors)
    save_file(tensors, folder / file)
    for name in names - set(tensors):
        del index["weight_map"][name]
    index["weight_map"] |= dict.fromkeys(set(tensors) - names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}.weight_scale_inv"), f"{DOWN}.weight: expected torch.float32 .*, got F8_E4M3"),
        (
            lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(2, 1)}),
            f"{DOWN}: weight_scale_inv: expected .* \\[1, 2\\], got torch.float32 \\[2, 1\\]",
        ),
        (
            lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(1, 2, dtype=torch.int32)}),
            f"{DOWN}: weight_scale_inv: expected floating point .*, got torch.int32",
        ),
        (
            lambda t: t.update({f"{DOWN}.weight": torch.zeros(128, 250).to(torch.float8_e4m3fn)}),
            f"{DOWN}: weight: expected torch.float8_e4m3fn \\[128, 256\\], got .* \\[128, 250\\]",
        ),
        (
            lambda t: t.update({f"{DOWN}.weight": torch.zeros(128, 256)}),
            f"{DOWN}: weight: expected torch.float8_e4m3fn .*, got torch.float32",
        ),
        (
            lambda t: t.update({f"{DOWN}.weight": torch.zeros(128, 256, dtype=torch.float8_e5m2)}),
            f"{DOWN}: weight: expected torch.float8_e4m3fn .*, got torch.float8_e5m2",
        ),
        (lambda t: t.update({"model.more": torch.ones(1)}), "model.more: not a tensor of this model"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(128).to(torch.float8_e4m3fn)}),
            "model.norm.weight: expected torch.float32 .*, got F8_E4M3",
        ),
    ],
)
def test_bad_tensors_are_named_with_their_file(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder = shutil.copytree(saved, tmp_path / "bad")
    file = change_tensors(folder, change)
    model = make()
    before, modules = logits(model), dict(model.named_modules())
    file = "[^/]*" if "norm" in message else file
    with pytest.raises(FormatError, match=f"bad/{file}: {message}"):
        deepseek_fp8.read(model, Checkpoint(folder))
    assert dict(model.named_modules()) == modules
    assert torch.equal(logits(model), before)


def test_missing_unquantised_tensor_is_named(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "bad")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"bad: model\.norm\.weight: expected a tensor"):
        deepseek_fp8.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method: expected fp8, got 'gptq'"),
        ({"weight_block_size": [64, 0]}, r"weight_block_size: expected rows and columns, or null, got \[64, 0\]"),
        ({"activation_scheme": "static"}, "activation_scheme: expected dynamic"),
        ({"expert_dtype": "int4"}, "expert_dtype: expected fp8 or fp4 or None, got 'int4'"),
        ({"modules_to_convert": ["embed"]}, r"modules_to_convert: epiloq does not know .*, got \['embed'\]"),
        ({"fmt": "e5m2"}, "fmt: expected e4m3"),
        ({"scale_fmt": "other"}, "scale_fmt: expected float or ue8m0"),
    ],
)
def test_another_configuration_is_refused(saved: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=f"config.json: quantization_config: {message}"):
        deepseek_fp8.load(folder)


def test_pickles_are_not_opened(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "bad")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"expected model\.safetensors or"):
        deepseek_fp8.load(folder)


def test_save_refuses(seed: int, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="expected Fp8BlockLinear layers"):
        deepseek_fp8.save(make(), tmp_path / "out")
    mixed = epiloq.quantize_(make(), "fp8-block", lambda module, name: name == DOWN)
    epiloq.quantize_(mixed, "w8a8-int8")
    with pytest.raises(FormatError, match="q_proj: expected Fp8BlockLinear, got Int8Linear"):
        deepseek_fp8.save(mixed, tmp_path / "out")
    with pytest.raises(ValueError, match="exists already"):
        deepseek_fp8.save(epiloq.quantize_(make(), "fp8-block"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_no_files(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(deepseek_fp8.Writer, "close", fails)
    with pytest.raises(OSError, match="no space"):
        deepseek_fp8.save(epiloq.quantize_(make(), "fp8-block"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
