"""What `epiloq convert` cannot represent in another format, and why; and that nothing is left of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import epiloq
from command_line import ROUND, run
from epiloq.formats import convert, epiloq_modules
from epiloq.formats.description import of_grid
from epiloq.formats.io.checkpoint import Checkpoint, Writer
from epiloq.formats.layouts.base import FormatError
from epiloq.quantize import QuantizedWeight
from rounded_models import INT4, SAYABLE, ordered, same, unchanged, weights, written
from tiny_teacher import save, tiny_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("teacher") / "model", tiny_model(**ROUND))


def test_activation_order(seed: int, teacher: Path, tmp_path: Path) -> None:
    written(teacher, tmp_path / "in", "gptq", INT4, ordered)
    assert json.loads((tmp_path / "in" / "config.json").read_text())["quantization_config"]["desc_act"] is True
    report = convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert report["act_order"] is True
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    convert.perform(convert.prepare(tmp_path / "out", tmp_path / "back", "gptq"))
    assert same(dict(Checkpoint(tmp_path / "back").tensors()), dict(Checkpoint(tmp_path / "in").tensors()))
    for target in ("awq", "compressed-tensors"):
        result = run("convert", tmp_path / "in", tmp_path / "no", "--format", target)
        assert result.exit_code == 2 and "activation order" in result.output and "proj" in result.output
        assert not (tmp_path / "no").exists()


def sixteen(weight: QuantizedWeight) -> QuantizedWeight:
    assert weight.zero is not None
    return replace(weight, zero=torch.full_like(weight.zero, 16))


def test_zero_points_of_the_first_gptq(teacher: Path, tmp_path: Path) -> None:
    """Its 15 stands for 16, which epiloq's format says too, and the others have no field for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epiloq.formats.table._describe_gptq", lambda weight, quantization: of_grid(quantization, "gptq"))
        patch.setattr("epiloq.formats.table.on_grid", lambda weight, name: weight)
        written(teacher, tmp_path / "in", "gptq", INT4, sixteen)
    config = (tmp_path / "in" / "config.json").read_text()
    (tmp_path / "in" / "config.json").write_text(config.replace('"gptq_v2"', '"gptq"'))
    for target in ("awq", "compressed-tensors"):
        result = run("convert", tmp_path / "in", tmp_path / "no", "--format", target)
        assert result.exit_code == 2 and "zero point of 16" in result.output
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    result = run("convert", tmp_path / "out", tmp_path / "no", "--format", "gptq")
    assert result.exit_code == 2 and "zero point of 16" in result.output
    assert not (tmp_path / "no").exists()


def wide(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, scale=weight.scale * (1 + 2**-20))


def test_scales_that_would_be_rounded(teacher: Path, tmp_path: Path) -> None:
    written(teacher, tmp_path / "in", "compressed-tensors", INT4, wide)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    for target in ("gptq", "awq"):
        result = run("convert", tmp_path / "in", tmp_path / "no", "--format", target)
        assert result.exit_code == 2 and "float16" in result.output and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        ("int8 channel", "awq", "cannot represent 8 bits"),
        ("w8a8", "gptq", "cannot represent quantised activations"),
        ("w8a8", "awq", "cannot represent quantised activations"),
        ("int4 asymmetric", "deepseek-fp8", "cannot represent integers of 4 bits, only FP8 in blocks of 128 x 128"),
        ("int4 asymmetric", "compressed-tensors", "is in the format compressed-tensors already"),
        ("int4 asymmetric", "gguf", "there are deepseek-fp8, compressed-tensors, gptq, awq, modelopt, epiloq"),
    ],
)
def test_reasons(teacher: Path, tmp_path: Path, kind: str, target: str, message: str) -> None:
    written(teacher, tmp_path / "in", "compressed-tensors", SAYABLE[kind][0], unchanged)
    result = run("convert", tmp_path / "in", tmp_path / "out", "--format", target)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("scheme", ["w8a8-block", "w4a8-block"])
def test_schemes_that_only_the_epiloq_format_supports(tmp_path: Path, scheme: str) -> None:
    epiloq_modules.save(epiloq.quantize_(tiny_model(**ROUND), scheme), tmp_path / "in")
    for target in ("compressed-tensors", "gptq", "awq", "deepseek-fp8", "modelopt"):
        with pytest.raises(FormatError, match=rf": {target}: cannot represent OnlineQuantLinear\("):
            convert.prepare(tmp_path / "in", tmp_path / "out", target)


def test_layers_that_differ(tmp_path: Path) -> None:
    model = epiloq.quantize_(tiny_model(**ROUND), "w8a16", lambda module, name: name.endswith("q_proj"))
    epiloq_modules.save(epiloq.quantize_(model, "w4a16-g32"), tmp_path / "in")
    assert len(json.loads((tmp_path / "in" / "config.json").read_text())["quantization_config"]["modules"]) == 2
    with pytest.raises(FormatError, match="symmetric and others are not"):
        convert.prepare(tmp_path / "in", tmp_path / "out", "gptq")
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "compressed-tensors"))
    assert same(weights(tmp_path / "in"), weights(tmp_path / "out"))
    assert len(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]) == 2


def test_existing_output_and_failures(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(teacher, tmp_path / "in", "awq", INT4, unchanged)
    (tmp_path / "out").mkdir()
    result = run("convert", tmp_path / "in", tmp_path / "out", "--format", "gptq")
    assert result.exit_code == 2 and "exists already" in result.output and list((tmp_path / "out").iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert run("convert", tmp_path / "in", tmp_path / "link", "--format", "gptq").exit_code == 2
    before = sorted(tmp_path.iterdir())
    for error, code in ((OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)):

        def fails(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "close", fails)
            result = run("convert", tmp_path / "in", tmp_path / "new", "--format", "gptq")
        assert result.exit_code == code, result.output
        assert sorted(tmp_path.iterdir()) == before
    assert run("convert", teacher, tmp_path / "new", "--format", "gptq").exit_code == 2
    assert run("convert", tmp_path / "absent", tmp_path / "new", "--format", "gptq").exit_code == 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("place", ["inside", "a/b", "../in/inside", "link/inside"])
def test_an_output_inside_of_the_source(teacher: Path, tmp_path: Path, place: str) -> None:
    """Whose other files would be copied into it, and which would be one of them the next time."""
    source = tmp_path / "in"
    shutil.copytree(teacher, source)
    (tmp_path / "link").symlink_to(source)
    output = tmp_path / place if place.startswith("link") else source / place
    before = sorted(path.name for path in source.rglob("*"))
    for command in (("quantize", source, "--scheme", "w8a16", "--output", output), ("convert", source, output)):
        result = run(*command, *(("--format", "gptq") if command[0] == "convert" else ("--algorithm", "rtn")))
        text = " ".join(result.output.split())
        assert result.exit_code == 2 and "lies inside" in text and "choose an output outside" in text, text
        assert sorted(path.name for path in source.rglob("*")) == before
    beside = tmp_path / "in-2"  # a name that begins alike
    result = run("quantize", source, "--scheme", "w8a16", "--output", beside, "--algorithm", "rtn")
    assert result.exit_code == 0, result.output
