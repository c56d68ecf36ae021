"""Directories of bitsandbytes, LLM.int8 and 4 bits, as written here and as transformers writes them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from bitsandbytes_layers import KINDS
from command_line import logits, run
from epiloq.formats.configs.bitsandbytes import METHOD
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import SINGLE
from epiloq.formats.layouts import bitsandbytes as layout
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import TableLinear, WeightOnlyLinear
from foreign_checkpoints import MODELS, write


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "opt"])
def test_models_open(seed: int, tmp_path: Path, name: str, kind: str) -> None:
    model = write(tmp_path / "model", MODELS[name](), KINDS[kind], shards=1)
    with warnings.catch_warnings(record=True) as text:
        warnings.simplefilter("always")
        ours = models.from_directory(tmp_path / "model")
    told = [str(each.message) for each in text if "activations stay in floating point" in str(each.message)]
    assert len(told) == (kind == "int8")
    expected = logits(model)
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    layers = [m for m in ours.modules() if isinstance(m, (TableLinear, WeightOnlyLinear))]
    assert layers and all(isinstance(m, WeightOnlyLinear if kind == "int8" else TableLinear) for m in layers)
    if kind == "int8":
        assert all((m.bits, m.group_size, m.zeros) == (8, -1, "none") for m in layers)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_method(seed: int, tmp_path: Path, kind: str) -> None:
    """transformers' first files with these weights say "load_in_4bit" but no ``quant_method``."""
    pack, config = KINDS[kind]
    former = {key: value for key, value in config.items() if key != "quant_method"}
    model = write(tmp_path / "model", MODELS["llama"](), (pack, former), shards=1)
    expected = logits(model)
    found = logits(models.from_directory(tmp_path / "model"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_commands(seed: int, tmp_path: Path, kind: str) -> None:
    write(tmp_path / "model", MODELS["llama"](), KINDS[kind], shards=1)
    result = run("inspect", tmp_path / "model", "--check")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "format bitsandbytes" in words and ("int8" if kind == "int8" else "table") in words, words
    assert ("each call dequantises the weight" in words) == (kind != "int8")
    result = run("convert", tmp_path / "model", tmp_path / "own", "--format", "epiloq")
    assert result.exit_code == 0, result.output
    again, before = models.from_directory(tmp_path / "own"), models.from_directory(tmp_path / "model")
    assert torch.equal(logits(again), logits(before))
    result = run("convert", tmp_path / "model", tmp_path / "other", "--format", "awq")
    assert result.exit_code == 2 and not (tmp_path / "other").exists(), result.output


def change(folder: Path, name: str, made: Callable[[Tensor], Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE)
    changed = made(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), folder / SINGLE, {"format": "pt"})


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("kind", "name", "made", "text"),
    [
        ("int8", f"{UP}.SCB", lambda t: t[1:].clone(), r"up_proj.*SCB: expected torch.float32 \[192\]"),
        ("int8", f"{UP}.weight_format", lambda t: t + 3, "weight_format: expected 0"),
        ("nf4", f"{UP}.weight.absmax", lambda t: None, "up_proj.*absmax: expected a tensor"),
        ("nf4", f"{UP}.weight", lambda t: t[2:].clone(), "up_proj.*weight: expected 6144 bytes"),
        ("nf4", f"{UP}.weight.quant_map", lambda t: t * 2, "up_proj.*quant_map: expected the table of nf4"),
        ("nf4", f"{UP}.{layout.STATES['nf4']}", lambda t: t[:-4].clone(), "up_proj.*quant_state: expected JSON"),
        ("nf4", f"{UP}.{layout.STATES['nf4']}", lambda t: None, "up_proj.*quant_state.*: expected a tensor"),
        ("nf4 nested", f"{UP}.weight.nested_absmax", lambda t: t[:0].clone(), "up_proj.*nested_absmax: expected"),
    ],
)
def test_tensors_that_disagree(
    seed: int,
    tmp_path: Path,
    kind: str,
    name: str,
    made: Callable[[Tensor], Tensor | None],
    text: str,
) -> None:
    write(tmp_path / "model", MODELS["llama"](), KINDS[kind], shards=1)
    change(tmp_path / "model", name, made)
    with pytest.raises(FormatError, match=text):
        models.from_directory(tmp_path / "model")
    result = run("inspect", tmp_path / "model", "--check")
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"load_in_8bit": True}, "expected one of them to be true"),
        ({"load_in_4bit": False}, "expected one of them to be true"),
        ({"load_in_4bit": "yes"}, "load_in_4bit: expected True or False"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight: expected False"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules: expected a list of names"),
        ({"llm_int8_skip_modules": ["up_proj"]}, "up_proj.*: belongs to a quantised layer"),
        ({"rotation": "hadamard"}, "rotation: epiloq does not know"),
    ],
)
def test_configurations(seed: int, tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    write(tmp_path / "model", MODELS["llama"](), KINDS["nf4"], shards=1)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=text):
        models.from_directory(tmp_path / "model")


# Names in the middle of others have no effect, but are written to config.json.
IN_THE_MIDDLE = {"llm_int8_skip_modules": ["lm_head", "mlp", "layers.1"]}


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_8bit": True},
        {"load_in_8bit": True, **IN_THE_MIDDLE},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, **IN_THE_MIDDLE},
    ],
)
def test_files_of_transformers_and_bitsandbytes(seed: int, tmp_path: Path, options: dict[str, Any]) -> None:
    """Stock tools write the directory and say what its weights are."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    import bitsandbytes.functional as functional

    MODELS["llama"]().save_pretrained(tmp_path / "float")
    stated = transformers.BitsAndBytesConfig(**options, bnb_4bit_use_double_quant=True)
    classes: Any = transformers.AutoModelForCausalLM
    theirs = classes.from_pretrained(
        tmp_path / "float", quantization_config=stated, dtype=torch.float32, device_map="cpu"
    )
    theirs.save_pretrained(tmp_path / "quantised")
    ours = models.from_directory(tmp_path / "quantised")
    float_model = MODELS["llama"]()
    float_model.load_state_dict(classes.from_pretrained(tmp_path / "float").state_dict())
    for name, module in theirs.named_modules():
        found = ours.get_submodule(name)
        if type(module).__name__ == "Linear4bit":
            expected = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(found.dequantized_weight(), expected)
        elif type(module).__name__ == "Linear8bitLt":
            scale = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            expected = functional.int8_vectorwise_dequant(module.weight.data, scale)
            assert ((found.packed.dequantize() - expected).abs() <= 2.0**-22 * expected.abs()).all()
        else:
            continue
        float_model.get_submodule(name).weight.data = expected
    expected = logits(float_model)
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert (logits(ours) - logits(classes.from_pretrained(tmp_path / "float"))).norm() < 0.3 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_opens_by_epiloq(seed: int, tmp_path: Path, kind: str) -> None:
    """Though transformers keeps the method's name for the package, which need not be there."""
    from epiloq.integrations import transformers as integration

    write(tmp_path / "model", MODELS["llama"](), KINDS[kind], shards=1)
    classes: Any = transformers.AutoModelForCausalLM
    integration.register()
    try:
        ours = classes.from_pretrained(tmp_path / "model", dtype=torch.float32)
        expected = logits(models.from_directory(tmp_path / "model"))
        assert torch.equal(logits(ours), expected)
        assert ours.dtype == torch.float32 and ours.config.to_dict()["quantization_config"]["quant_method"] == METHOD
        with pytest.raises(FormatError, match=r"_proj: .*can only be read; epiloq convert writes"):
            ours.save_pretrained(tmp_path / "saved")
    finally:
        integration.unregister()


def test_models_quantised_by_bitsandbytes_are_not_converted(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    from epiloq.integrations import transformers as integration

    MODELS["llama"]().save_pretrained(tmp_path / "float")
    classes: Any = transformers.AutoModelForCausalLM
    integration.register()
    try:
        stated = transformers.BitsAndBytesConfig(load_in_4bit=True)
        theirs = classes.from_pretrained(tmp_path / "float", quantization_config=stated, device_map="cpu")
        theirs.save_pretrained(tmp_path / "theirs")
        again = classes.from_pretrained(tmp_path / "theirs", quantization_config=stated, device_map="cpu")
        ours = classes.from_pretrained(tmp_path / "theirs")
    finally:
        integration.unregister()
    kinds = [type(model.get_submodule(UP)).__name__ for model in (theirs, again, ours)]
    assert kinds == ["Linear4bit", "Linear4bit", "TableLinear"]
