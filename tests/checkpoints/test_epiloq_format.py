"""epiloq's own format: every scheme saved and reloaded bit for bit, and `epiloq quantize` for each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epiloq
from command_line import ROUND, logits
from epiloq.formats import epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.weights import Weight
from epiloq.nn import Fp8Linear, WeightOnlyLinear
from epiloq.quantize.outputs import schemes
from tiny_teacher import tiny_model


def quantised(model: Any, scheme: str) -> Any:
    return epiloq.quantize_(model, scheme, calibrate=logits)


def biased() -> Any:
    """A Qwen2, whose attention has biases, of odd sizes, its head its own."""
    config = transformers.Qwen2Config(
        vocab_size=256,
        num_hidden_layers=2,
        hidden_size=36,
        intermediate_size=100,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("make", [tiny_model, biased])
@pytest.mark.parametrize("scheme", schemes())
def test_every_scheme_comes_back_bit_for_bit(scheme: str, make: Callable[[], Any], seed: int, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if make is biased else torch.float32
    model = make()
    for parameter in model.parameters():
        # The rotary frequencies, a buffer, stay in float32, as transformers has them when it loads.
        parameter.data = parameter.data.to(dtype)
    quantised(model, scheme)
    epiloq_modules.save(model, tmp_path / "out", largest_shard=20_000)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again, _ = models.load(Checkpoint(tmp_path / "out"))
    assert torch.equal(logits(again), logits(model))
    state, found = model.state_dict(), again.state_dict()
    assert state.keys() == found.keys()
    for name, tensor in state.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor.float(), found[name].float()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["format_version"], config["scheme"]) == ("epiloq", 4, scheme)


# By the first part that a scheme's name contains. MXFP4's scales leave up to 8 times themselves, of which 6 can be
# represented; NVFP4's numbers are 2 apart at most, in blocks of 6, with scales that are rounded to E4M3.
BOUNDS = (("mxfp4", 1 / 4), ("nvfp4", 1 / 6 + 1 / 16), ("w4", 1 / 14), ("fp8", 1 / 16), ("w8", 1 / 250))


@pytest.mark.parametrize("scheme", schemes())
def test_state_determines_the_weight(scheme: str, seed: int, tmp_path: Path) -> None:
    """Against the rounding error of each scheme's own quantiser, in units of the largest weight."""
    model = tiny_model()
    exact = {name: module.weight.clone() for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    epiloq_modules.save(quantised(model, scheme), tmp_path / "out")
    layers = Layers(Checkpoint(tmp_path / "out"))
    assert len(layers.readers) == 14
    for name in layers.readers:
        found: Weight = layers.weight(name)
        error = (found.dequantize() - exact[name]).abs().amax() / exact[name].abs().amax()
        assert 0 < error < next(bound for part, bound in BOUNDS if part in scheme)


def test_real_offsets_and_activation_order(seed: int, tmp_path: Path) -> None:
    """States that `quantize_` does not make, of layers made by hand."""
    model = tiny_model(**ROUND)
    block = model.model.layers[0].mlp
    q, scale = torch.randint(0, 16, (96, 64)), torch.rand(96, 2)
    packed = epiloq.pack_weight(q, scale, offset=torch.randn(96, 2), bits=4, group_size=32)
    block.gate_proj = WeightOnlyLinear.from_packed(packed)
    order = torch.randperm(64)
    block.up_proj = WeightOnlyLinear.from_packed(
        epiloq.pack_weight(q, scale, q[:, :2], bits=4, group_size=32, perm=order)
    )
    block.down_proj = Fp8Linear.from_linear(block.down_proj, activation="static", input_scale=0.5)
    epiloq_modules.save(model.eval(), tmp_path / "out")
    again, quantization = models.load(Checkpoint(tmp_path / "out"))
    assert quantization is None
    assert torch.equal(logits(again), logits(model))
    layers = Layers(Checkpoint(tmp_path / "out"))
    for name in ("gate_proj", "up_proj"):
        found = layers.weight(f"model.layers.0.mlp.{name}").dequantize()
        assert torch.allclose(found, block.get_submodule(name).weight.dequantize(), rtol=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    epiloq_modules.save(epiloq.quantize_(tiny_model(), "w8a8-block"), folder)
    return folder


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=1), "format_version: expected 4, got 1"),
        (lambda c: c.pop("modules"), "modules: expected a list"),
        (lambda c: c["modules"].append({}), "modules: class: expected one of Int8Linear"),
        (lambda c: c["modules"][0].update({"class": "Sequential"}), "class: expected one of"),
        (lambda c: c["modules"][0]["options"].pop("bits"), "options: expected bits, group_size, symmetric"),
        (lambda c: c["modules"][0]["options"].update(bits="x"), "bits"),
        (lambda c: c["modules"][0]["options"].update(bits=3), "bits: expected 4 or 8, got 3"),
        (lambda c: c["modules"][0]["options"].update(bits=4), "weight: expected"),
        (lambda c: c["modules"][0]["options"].update(group_size=64), "weight_scale: expected"),
        (lambda c: c["modules"][0].update(layers=[]), "layers: expected names"),
        (lambda c: c["modules"][0]["layers"].append(DOWN), f"each layer once, got {DOWN} twice"),
        (lambda c: c["modules"][0]["layers"].append("model.norm"), "model.norm: not a linear layer"),
        (lambda c: c["modules"][0]["layers"].remove(DOWN), f"{DOWN}.weight_scale: not a tensor of this model"),
    ],
)
def test_bad_configurations(saved: Path, tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "model.safetensors").symlink_to(saved / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    change(config["quantization_config"])
    (bad / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        models.load(Checkpoint(bad))
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize("bits", [3, 4])
def test_few_bits_of_former_versions(seed: int, tmp_path: Path, bits: int) -> None:
    """Version 3 had another order of 2- and 3-bit values."""
    model = tiny_model()
    layer = WeightOnlyLinear.from_linear(model.get_submodule(DOWN), bits=bits, group_size=-1)
    model.set_submodule(DOWN, layer)
    epiloq_modules.save(model, tmp_path / "model")
    models.load(Checkpoint(tmp_path / "model"))
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["format_version"] = 3
    file.write_text(json.dumps(config))
    if bits == 4:
        models.load(Checkpoint(tmp_path / "model"))
    else:
        with pytest.raises(FormatError, match=f"format_version: expected 4 with 3 bits .{re.escape(DOWN)}"):
            models.load(Checkpoint(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{DOWN}.weight", None, f"{DOWN}: .*weight"),
        (f"{DOWN}.weight", torch.zeros(36, 99, dtype=torch.int8), f"{DOWN}: .*expected torch.int8 .*36, 100"),
        (f"{DOWN}.weight_scale", torch.ones(36, 1, dtype=torch.int32), f"{DOWN}: .*weight_scale: expected"),
        (f"{DOWN}.weight_offset", torch.ones(36, 1), f"{DOWN}: .*weight_offset"),
        ("model.norm.weight", None, "model.norm.weight: expected a tensor"),
        ("model.norm.weight", torch.ones(7), r"model.norm.weight: expected torch.float32 \[36\], got F32 \[7\]"),
    ],
)
def test_bad_states(saved: Path, tmp_path: Path, name: str, value: Tensor | None, message: str) -> None:
    tensors = {n: t for n, t in load_file(saved / "model.safetensors").items() if n != name}
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    save_file(tensors | ({} if value is None else {name: value}), tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=message):
        models.load(Checkpoint(tmp_path))
    with pytest.raises(FormatError, match=message):
        layers = Layers(Checkpoint(tmp_path))
        list(map(layers.weight, layers.readers))


def test_save_refuses(seed: int, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="expected quantised layers, found none"):
        epiloq_modules.save(tiny_model(), tmp_path / "out")
    with pytest.raises(FormatError, match="exists already"):
        epiloq_modules.save(epiloq.quantize_(tiny_model(), "w8a16"), tmp_path)
    other = epiloq.quantize_(tiny_model(), "w8a16")
    other.extra = epiloq.nn.Fp8BlockExperts(2, 16, 16)
    with pytest.raises(FormatError, match=r"extra: expected one of .*, got Fp8BlockExperts"):
        epiloq_modules.save(other, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
