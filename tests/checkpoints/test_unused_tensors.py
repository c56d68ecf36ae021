"""Files that hold more than the model that config.json describes: more layers are refused, other tensors named."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import foreign_checkpoints
from command_line import ROUND, quantize, run, teacher_and_text
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import from_directory
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from opened_models import rotary_frequencies_of_old
from tiny_teacher import save


def described_as(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "layer_types"}
    (folder / "config.json").write_text(json.dumps(config | values))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)


@pytest.mark.parametrize(
    ("command", "count"),
    [("eval", 0), ("inspect", 0), ("compare", 0), ("eval", 1), ("inspect", 1), ("quantize", 1), ("compare", 1)],
)
def test_fewer_layers_than_the_files_hold(tmp_path: Path, command: str, count: int, seed: int) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    described_as(model, num_hidden_layers=count)
    if command == "quantize":
        found = quantize(model, tmp_path / "out", "--scheme", "w8a16")
    else:
        text = ("--text", tmp_path / "text.txt")
        found = run(command, model, *{"inspect": (), "eval": text, "compare": (model, *text)}[command])
    reported = " ".join(found.output.split())
    assert found.exit_code == 2 and f"model.layers.{count}" in reported and "not a tensor of this model" in reported
    assert f"whose model.layers has {count} by config.json" in reported
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


@pytest.mark.parametrize("make", ["gpt_neox", "opt"])
def test_other_model_families(tmp_path: Path, make: str, seed: int) -> None:
    foreign_checkpoints.MODELS[make]().save_pretrained(tmp_path / "model")
    described_as(tmp_path / "model", num_hidden_layers=1)
    for read in (from_directory, lambda folder: Layers(Checkpoint(folder))):
        with pytest.raises(FormatError, match=r"layers\.1\..*layers has 1 by config.json"):
            read(tmp_path / "model")


def test_other_tensors_are_left_out_with_a_warning(tmp_path: Path, seed: int) -> None:
    model = teacher_and_text(tmp_path, ROUND)
    add(model, score__weight=torch.zeros(2, 64), a__b=torch.zeros(1), a__c=torch.zeros(1), a__d=torch.zeros(1))
    named = r"left out, because LlamaForCausalLM has no such .*: a\.b, a\.c, a\.d and 1"
    for read in (from_directory, lambda folder: Layers(Checkpoint(folder))):
        with pytest.warns(UserWarning, match=named):
            read(model)
    with pytest.warns(UserWarning, match="left out"):
        found = quantize(model, tmp_path / "out", "--scheme", "w8a16")
    assert found.exit_code == 0, found.output
    assert not any(name.startswith(("a.", "score")) for name in load_file(tmp_path / "out/model.safetensors"))


def test_tables_in_old_state_dicts_are_accepted(tmp_path: Path, seed: int) -> None:
    model = save(tmp_path / "model")
    plain = from_directory(model).state_dict()
    add(model, **rotary_frequencies_of_old(2))
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        found = from_directory(model).state_dict()
        Layers(Checkpoint(model))
    assert [str(one.message) for one in reported if "rotary" in str(one.message)] == []
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("tool", ["gptq", "awq", "pack-quantized"])
def test_nor_are_they_in_quantised_files(tmp_path: Path, tool: str, seed: int) -> None:
    model = foreign_checkpoints.write(tmp_path / "model", foreign_checkpoints.llama(), tool, shards=1)
    add(tmp_path / "model", **rotary_frequencies_of_old(2))
    inputs = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(from_directory(tmp_path / "model")(inputs).logits, model(inputs).logits)


def test_layers_that_predict_further_tokens_are_no_further_layers(tmp_path: Path, seed: int) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    described_as(tmp_path / "model", num_nextn_predict_layers=1)
    add(tmp_path / "model", model__layers__2__eh_proj__weight=torch.zeros(4, 4))
    with pytest.warns(UserWarning, match=r"left out.*model\.layers\.2\.eh_proj\.weight"):
        from_directory(tmp_path / "model")
