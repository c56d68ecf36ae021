"""epiloq's own format: transformers without epiloq refuses it, rather than fill a model with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="models of transformers need the extra hf")

import transformers
from safetensors.torch import save_file

import epiloq
import epiloq.integrations.transformers as integration
from command_line import ROUND, logits, quantize, run, teacher_and_text
from epiloq.formats import epiloq_modules
from epiloq.formats.configs import others
from epiloq.formats.io import model as models
from tiny_teacher import tiny_model

integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")


@pytest.mark.parametrize("scheme", ["w8a8-int8", "fp8-token", "fp8-block", "w4a8-block", "w4a16-g32"])
def test_transformers_alone_gives_no_random_model(tmp_path: Path, scheme: str) -> None:
    """Of a directory in epiloq's own format it raises an error, by whatever class; with the import it opens it."""
    model = epiloq.quantize_(tiny_model(), scheme)
    epiloq_modules.save(model, tmp_path / "model")
    expected = logits(model)
    integration.unregister()
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        with pytest.raises(ValueError, match="quant_method"):
            kind.from_pretrained(tmp_path / "model")
    integration.register()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(found), expected)
    found.save_pretrained(tmp_path / "again")
    message = [
        json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in ("model", "again")
    ]
    assert message[0] == message[1] and "quant_method" not in message[0]
    assert torch.equal(logits(models.from_directory(tmp_path / "again")), expected)


@pytest.mark.parametrize("method", ["exl2", "qqq"])
def test_unknown_methods_give_no_random_model(tmp_path: Path, method: str) -> None:
    """transformers warns, and then fills whatever layers have other tensors at random."""
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(
        ValueError, match=rf"quant_method: neither epiloq nor transformers opens '{method}'.*unregister"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    integration.unregister()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def methods_of_transformers() -> list[str]:
    config = pytest.importorskip("transformers.utils.quantization_config")
    auto = pytest.importorskip("transformers.quantizers.auto")
    return sorted({one.value for one in config.QuantizationMethod} | set(auto.AUTO_QUANTIZATION_CONFIG_MAPPING))


@pytest.mark.parametrize("method", methods_of_transformers())
def test_every_method_of_transformers_has_an_answer(tmp_path: Path, method: str) -> None:
    """epiloq reads it, or says what it is and what to do; nothing is written."""
    tiny_model().save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    known = method in integration.METHODS or method == "gguf"
    assert known != (method in others.METHODS)
    round_to_nearest = ("--output", tmp_path / "out", "--scheme", "w8a16", "--algorithm", "rtn")
    for arguments in (
        ("inspect", tmp_path / "in"),
        ("convert", tmp_path / "in", tmp_path / "out", "--format", "epiloq"),
        ("quantize", tmp_path / "in", *round_to_nearest),
    ):
        result = run(*arguments)
        text = " ".join(result.output.split())
        if not known:
            assert result.exit_code == 2 and text.count(": quant_method: ") == 1, text
            assert others.METHODS[method] in text
        assert "Traceback" not in text and not (tmp_path / "out").exists()
    if not known:
        with pytest.raises(ValueError, match=rf"quant_method: .*{method}"):
            models.from_directory(tmp_path / "in")


def test_float_weights_that_another_method_rounds_are_not_quantised(tmp_path: Path) -> None:
    """BitNet's and FP-Quant's master weights, which their layers round in each call: no advice to remove the
    description."""
    tiny_model().save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    method = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": method}))
    with pytest.raises(ValueError, match=r"config\.json: quantization_config: quant_method: .*ternary"):
        models.load_float(models.Checkpoint(tmp_path / "in"))


def test_quantos_own_directories(tmp_path: Path, epiloq_in_transformers: None) -> None:
    """A file beside config.json says which layers are quantised; transformers would fill them at random."""
    model = tiny_model()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith("_proj.weight"):
            tensors |= {f"{name}._data": value.to(torch.int8), f"{name}._scale": torch.ones(len(value), 1)}
            tensors |= {name.replace("weight", f"{end}_scale"): torch.ones(1) for end in ("input", "output")}
        elif name != "lm_head.weight":
            tensors[name] = value
    model.save_pretrained(tmp_path / "in")
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    layers = {name.removesuffix(".weight._data") for name in tensors if name.endswith("._data")}
    found = json.dumps({name: {"weights": "qint8", "activations": "none"} for name in layers})
    (tmp_path / "in" / "quanto_qmap.json").write_text(found)
    says = r"quant_method: .*'optimum-quanto'.*QuantizedModelForCausalLM"
    for read in (transformers.AutoModelForCausalLM.from_pretrained, models.from_directory):
        with pytest.raises(ValueError, match=says):
            read(tmp_path / "in")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "in").model_type == "llama"  # which quanto itself reads
    for arguments in (("inspect", tmp_path / "in"), ("compare", tmp_path / "in", tmp_path / "in")):
        result = run(*arguments)
        assert result.exit_code == 2 and "quanto_qmap.json: " in result.output, result.output


def test_hqqs_own_directories(tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    (tmp_path / "qmodel.pt").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"weights of hqq in another form: qmodel\.pt: .*quantise the float model"):
        models.from_directory(tmp_path)


def test_a_directory_is_no_gguf_file(tmp_path: Path) -> None:
    """transformers would load what floating-point tensors there are, and leave the others as they are initialised."""
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gguf"}}))
    for read in (transformers.AutoModelForCausalLM.from_pretrained, models.from_directory):
        with pytest.raises(ValueError, match=r"quant_method: .*got 'gguf'; open the \.gguf file itself"):
            read(tmp_path)


@pytest.mark.parametrize("place", ["quantization_config", "text_config.quantization_config"])
@pytest.mark.parametrize("value", [[{"quant_method": "gptq"}], "gptq", 4])
def test_a_description_is_an_object(tmp_path: Path, place: str, value: object) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer, _, inner = place.partition(".")
    (tmp_path / "config.json").write_text(json.dumps(config | {outer: {inner: value} if inner else value}))
    for read in (transformers.AutoModelForCausalLM.from_pretrained, models.from_directory):
        with pytest.raises(ValueError, match=rf"config\.json: {place}: expected an object, got {type(value).__name__}"):
            read(tmp_path)


def test_a_description_that_is_null(tmp_path: Path) -> None:
    """Is none; and no other spelling of one."""
    model = epiloq.quantize_(tiny_model(), "w8a8-int8")
    epiloq_modules.save(model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None}))
    with pytest.raises(ValueError, match=r"config.json does not say how layers are quantised$"):
        models.from_directory(tmp_path / "model")


def test_files_of_the_version_before_are_opened(tmp_path: Path) -> None:
    model = epiloq.quantize_(tiny_model(), "w8a8-int8")
    epiloq_modules.save(model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    message = config["quantization_config"]
    del message["format"], message["opened_by"]
    message |= {"quant_method": "epiloq", "format_version": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(models.from_directory(tmp_path / "model")), logits(model))
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(model))


def test_commands_say_how_to_open_what_they_wrote(tmp_path: Path) -> None:
    teacher = teacher_and_text(tmp_path, ROUND)
    result = quantize(teacher, tmp_path / "out", "--scheme", "w8a16", "--algorithm", "rtn")
    how = "To open it: import epiloq.integrations.transformers, then transformers.LlamaForCausalLM.from_pretrained("
    assert f"{how}'{tmp_path / 'out'}')\n" in result.output
    result = run("convert", tmp_path / "out", tmp_path / "own", "--format", "epiloq")
    assert f"{how}'{tmp_path / 'own'}') (transformers alone refuses this format)" in result.output
