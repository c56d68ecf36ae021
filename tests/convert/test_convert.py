"""`epiloq convert`: the same weights in another format, and the reason where a format cannot represent them."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import epiloq
from command_line import ROUND, run
from epiloq.formats import convert, deepseek_fp8, epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.quantize import Grid
from rounded_models import INT4, SAYABLE, same, unchanged, weights, written
from tiny_teacher import save, tiny_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save(folder, tiny_model(**ROUND))
    (folder / "LICENSE").write_text("mine")
    (folder / "templates").mkdir()
    (folder / "templates" / "tool.jinja").write_text("{{ x }}")
    for name in ("pytorch_model.bin", "quantize_config.json", ".hidden", "pytorch_model.bin.index.json"):
        (folder / name).write_text("{}")
    return folder


PAIRS = [(kind, *pair) for kind, (_, names) in SAYABLE.items() for pair in permutations(names, 2)]


@pytest.mark.parametrize(("kind", "source", "target"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_weights_do_not_change(teacher: Path, tmp_path: Path, kind: str, source: str, target: str) -> None:
    written(teacher, tmp_path / "in", source, SAYABLE[kind][0], unchanged)
    report = convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", target), largest_shard=40_000)
    assert report["layers"] == 14 and (report["from"], report["to"]) == (source, target)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    layers = Layers(Checkpoint(tmp_path / "out"))
    assert layers.format == target
    described = layers.quantization
    assert described is not None and described.activations == SAYABLE[kind][0].activations
    assert layers.unquantised == ["lm_head"]
    back = convert.perform(convert.prepare(tmp_path / "out", tmp_path / "back", source))
    assert back["bytes_after"] == report["bytes_before"]
    assert same(dict(Checkpoint(tmp_path / "back").tensors()), dict(Checkpoint(tmp_path / "in").tensors()))
    message = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "back")]
    assert message[0] == message[1]


@pytest.mark.parametrize("symmetric", [False, True])
def test_three_bits(tmp_path: Path, symmetric: bool) -> None:
    """Fields that go on in the next word, of sizes that fill periods of 32."""
    save(tmp_path / "model", tiny_model(**{**ROUND, "head_dim": 32}))
    kind, chain = Quantization(Grid(3, 32, symmetric)), ("gptq", "compressed-tensors", "epiloq", "gptq")
    written(tmp_path / "model", tmp_path / "0", chain[0], kind, unchanged)
    for step, layout in enumerate(chain[1:]):
        convert.perform(convert.prepare(tmp_path / f"{step}", tmp_path / f"{step + 1}", layout))
        assert same(weights(tmp_path / "0"), weights(tmp_path / f"{step + 1}"))
    first, last = (dict(Checkpoint(tmp_path / name).tensors()) for name in "03")
    assert same(first, last)
    with pytest.raises(FormatError, match="cannot represent 3 bits, only 4 bits"):
        convert.prepare(tmp_path / "0", tmp_path / "no", "awq")


def test_zero_biases_are_ignored(teacher: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes them for layers without one."""
    written(teacher, tmp_path / "in", "gptq", INT4, unchanged)
    file = tmp_path / "in" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.bias"
    save_file(tensors | {name: torch.zeros(96, dtype=torch.float16)}, file)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert model.get_submodule("model.layers.0.mlp.up_proj").bias is None
    save_file(tensors | {name: torch.ones(96, dtype=torch.float16)}, file)
    with pytest.raises(FormatError, match=f"{name}: not a tensor of this model"):
        Layers(Checkpoint(tmp_path / "in"))


def test_symmetric_weights_in_awq(teacher: Path, tmp_path: Path) -> None:
    """awq has zero points always: 8 for symmetric weights, and no way back to none."""
    written(teacher, tmp_path / "in", "gptq", SAYABLE["int4 symmetric"][0], unchanged)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "awq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    convert.perform(convert.prepare(tmp_path / "out", tmp_path / "again", "epiloq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "again"))


@pytest.mark.parametrize("target", ["deepseek-fp8", "epiloq"])
def test_fp8_blocks(tmp_path: Path, target: str) -> None:
    """Sizes above and below 128 that are no multiples of it."""
    odd = {"hidden_size": 136, "intermediate_size": 200, "num_attention_heads": 4, "head_dim": 34}
    model = epiloq.quantize_(tiny_model(**odd), "fp8-block")
    stores = {"deepseek-fp8": deepseek_fp8.save, "epiloq": epiloq_modules.save}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        stores.pop(target)
        (store,) = stores.values()
        store(model, tmp_path / "in")
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", target))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    tokens = torch.arange(40)[None] * 5
    again, _ = models.load(Checkpoint(tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_other_files_of_the_directory(teacher: Path, tmp_path: Path) -> None:
    written(teacher, tmp_path / "in", "awq", INT4, unchanged)
    result = run("convert", tmp_path / "in", tmp_path / "out", "--format", "gptq", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "r.json").read_text())["layers"] == 14
    expected = {"config.json", "model.safetensors", "LICENSE", "templates/tool.jinja", "generation_config.json"}
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert expected <= found and {name for name in found - expected if not name.startswith("tokenizer")} == set()
    for name in found - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (teacher / name).read_bytes()
