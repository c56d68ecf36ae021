"""``epiloq quantize`` and ``epiloq eval`` on tiny models: round trips, other readers, interruptions, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from packaging.version import Version
from safetensors.torch import load_file

from command_line import ROUND, logits, quantize, run, text
from epiloq.demo.layers import weight_bytes
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint, Writer
from epiloq.formats.layers import Layers
from epiloq.nn import Int8Linear, WeightOnlyLinear
from epiloq.quantize import job as jobs
from epiloq.quantize import streaming
from tiny_teacher import save, tiny_model


def dequantised(layers: Layers, name: str) -> nn.Module:
    """In the place of ``Layers.module``: the float layer with the values that the file stands for."""
    linear, weight = layers.linears[name], layers.weight(name)
    linear.weight = nn.Parameter(weight.dequantize().to(linear.weight.dtype), requires_grad=False)
    return linear


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (("--scheme", "w4a16-g32", "--algorithm", "gptq"), "compressed-tensors"),
        (("--scheme", "w4a16-g32", "--algorithm", "awq"), "awq"),
        (("--scheme", "w4a16-g32", "--algorithm", "awq+gptq"), "gptq"),
        (("--scheme", "w4a16-g64", "--algorithm", "rtn", "--symmetric"), "gptq"),
        (("--scheme", "w8a16", "--algorithm", "rtn-mse"), "compressed-tensors"),
    ],
)
def test_a_reloaded_model_is_bit_equal(teacher: Path, tmp_path: Path, options: tuple[str, ...], layout: str) -> None:
    """The calibrated model in memory (it ends with the quantised weights) against the directory."""
    kept: list[Any] = []

    def keep(checkpoint: Checkpoint) -> Any:
        kept.append(models.load_float(checkpoint))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "streamed", lambda *_: "kept in memory, to be looked at")
        patch.setattr(streaming, "load_float", keep)
        result = quantize(teacher, tmp_path / "out", *options, "--format", layout, "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    again, quantization = models.load(Checkpoint(tmp_path / "out"))
    assert quantization is not None
    with pytest.MonkeyPatch.context() as patch:  # The same sums, for another product adds up in another order.
        patch.setattr(Layers, "module", dequantised)
        plain, _ = models.load(Checkpoint(tmp_path / "out"))
    assert torch.equal(logits(plain), logits(kept[0]))
    layers = {name: module for name, module in again.named_modules() if isinstance(module, WeightOnlyLinear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.weight.dequantize(), kept[0].get_parameter(f"{name}.weight")), name
    assert torch.allclose(logits(again), logits(plain), rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits(again), logits(models.load_float(Checkpoint(teacher))))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["bytes_after"] < report["bytes_before"] and report["blocks"] == 2
    assert set(tmp_path.iterdir()) == {tmp_path / "out", tmp_path / "r.json"}
    carried = {file.name for file in teacher.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == carried | {"report.html"}


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-int8-azp"])
def test_int8_has_its_module(teacher: Path, tmp_path: Path, scheme: str) -> None:
    assert quantize(teacher, tmp_path / "out", "--scheme", scheme, "--algorithm", "smoothquant+gptq").exit_code == 0
    model, _ = models.load(Checkpoint(tmp_path / "out"))
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert len(layers) == 14 and all(layer.symmetric == (scheme == "w8a8-int8") for layer in layers)
    exact = logits(models.load_float(Checkpoint(teacher)))
    assert float((logits(model) - exact).norm() / exact.norm()) < 0.05
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    assert weight.dtype == torch.int8 and weight.shape == (64, 96)


def test_low_bits_have_their_module(teacher: Path, tmp_path: Path) -> None:
    """As `epiloq eval` runs it: the values in the file, multiplied as they are."""
    options = ("--scheme", "w4a16-g64", "--algorithm", "awq+gptq", "--format", "gptq")
    assert quantize(teacher, tmp_path / "out", *options).exit_code == 0
    model, _ = models.load(Checkpoint(tmp_path / "out"))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, WeightOnlyLinear)}
    assert len(layers) == 14 and {(layer.bits, layer.group_size) for layer in layers.values()} == {(4, 64)}
    assert all(layer.weight_scale.dtype == torch.float16 for layer in layers.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layers, "module", dequantised)
        plain, _ = models.load(Checkpoint(tmp_path / "out"))
    for name, layer in layers.items():
        assert torch.equal(layer.weight.dequantize(), plain.get_parameter(f"{name}.weight")), name
    assert torch.allclose(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    result = run("eval", tmp_path / "out", "--text", text(teacher), "--length", 8, "--json", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["bits"] == 4 and report["memory_bytes"] == weight_bytes(model)
    assert report["perplexity"] == pytest.approx(256, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
def test_transformers_opens_compressed_tensors(teacher: Path, tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    if scheme == "w8a8-int8" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("it quantises activations of dequantised layers, and rounds scales to the model's type")
    original = models.load_float(Checkpoint(teacher)).to(dtype)
    save(tmp_path / "model", original)
    (tmp_path / "text.txt").write_text(text(teacher).read_text())
    result = quantize(tmp_path / "model", tmp_path / "out", "--scheme", scheme)
    assert result.exit_code == 0, result.output
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=config, dtype="auto"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layers, "module", dequantised)
        ours, _ = models.load(Checkpoint(tmp_path / "out"))
    for name, parameter in ours.named_parameters():
        other = theirs.get_parameter(name).to(dtype)  # W8A8 has float32 scales, and their weights that type.
        assert parameter.dtype == dtype and torch.equal(other, parameter), name
    if dtype == torch.float32 or scheme == "w4a16-g32":
        assert torch.equal(logits(theirs), logits(ours))


def test_eval(teacher: Path, tmp_path: Path) -> None:
    assert quantize(teacher, tmp_path / "out", "--scheme", "w8a8-int8").exit_code == 0
    found = []
    for folder in (teacher, tmp_path / "out"):
        options = ("--text", text(teacher), "--json", tmp_path / "e.json", "--length", 32, "--tokens", 320)
        result = run("eval", folder, *options)
        assert result.exit_code == 0, result.output
        found.append(json.loads((tmp_path / "e.json").read_text()))
        assert found[-1]["tokens"] == 320
    assert found[1]["perplexity"] == pytest.approx(found[0]["perplexity"], rel=0.02)
    assert found[1]["file_bytes"] < found[0]["file_bytes"] and found[0]["perplexity"] == pytest.approx(256, rel=0.2)


@pytest.mark.slow
def test_interrupted_command_resumes(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--scheme", "w4a16-g32", "--algorithm", "awq+gptq")
    assert quantize(teacher, tmp_path / "whole", *options).exit_code == 0
    write, done = jobs.Store.write, []

    def stop_after_one(store: jobs.Store, block: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(block.name)
        write(store, block)

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Store, "write", stop_after_one)
        stopped = quantize(teacher, tmp_path / "out", *options)
    assert stopped.exit_code == 130 and "continues from there" in stopped.output
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
    other = quantize(teacher, tmp_path / "out", "--scheme", "w4a16-g32")
    assert other.exit_code == 2 and "other settings (algorithm)" in other.output

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "close", no_space)
        full = quantize(teacher, tmp_path / "out", *options)
    assert full.exit_code == 1 and "No space left" in full.output and "continues from there" in full.output
    assert not (tmp_path / "out").exists()
    written = []
    monkeypatch.setattr(jobs.Store, "write", lambda store, block: written.append(block.name))
    assert quantize(teacher, tmp_path / "out", *options).exit_code == 0
    assert written == [] and not (tmp_path / ".out.partial").exists()
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_shards_and_their_index(teacher: Path, tmp_path: Path) -> None:
    tensors = dict(Checkpoint(teacher).tensors())
    writer = Writer(tmp_path / "shards", largest_shard=60_000)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close({"architectures": ["x"]})
    again = Checkpoint(tmp_path / "shards")
    assert len(set(again.files.values())) > 2
    read = dict(again.tensors())
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = {file.name for file in (tmp_path / "shards").iterdir()} - {"config.json", "model.safetensors.index.json"}
    assert files == set(again.files.values()) == set(index["weight_map"].values())


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "epiloq"])
@pytest.mark.parametrize("std", [8e-4, 1e-5])
def test_small_weights_of_a_float16_model(tmp_path: Path, std: float, layout: str) -> None:
    """Scales are below float16's normal numbers; formats that can hold float32 ones have those where need be."""
    model = tiny_model(**ROUND)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
    save(tmp_path / "model", model.half())
    options = ("--scheme", "w8a16", "--algorithm", "rtn", "--format", layout, "--json", tmp_path / "r.json")
    result = run("quantize", tmp_path / "model", "--output", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    worst = max(json.loads((tmp_path / "r.json").read_text())["layer_errors"].values())
    assert worst < (0.008 if std > 1e-4 or layout != "gptq" else 0.012)
    found = models.from_directory(tmp_path / "out")
    source = models.load_float(Checkpoint(tmp_path / "model"))
    for name, layer in found.named_modules():
        if isinstance(layer, WeightOnlyLinear):
            exact = source.get_parameter(f"{name}.weight").detach().float()
            assert float((layer.weight.dequantize() - exact).norm() / exact.norm()) == pytest.approx(
                json.loads((tmp_path / "r.json").read_text())["layer_errors"][name], rel=1e-3
            )
