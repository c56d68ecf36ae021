"""Quantised directories whose config.json, or a tensor beside the weights, is of the wrong type: a sentence each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import epiloq
from command_line import ROUND, run
from epiloq.formats.io import model as models
from epiloq.formats.layouts.base import FormatError
from rounded_models import INT4, unchanged, written
from tiny_teacher import save, tiny_model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of gptq's and one of compressed-tensors'."""
    folder = tmp_path_factory.mktemp("directories")
    teacher = save(folder / "teacher", tiny_model(**ROUND))
    for layout in ("gptq", "compressed-tensors"):
        written(teacher, folder / layout, layout, INT4, unchanged)
    return folder


def group(found: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = found["config_groups"]["group_0"]
    return first


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("gptq", lambda found: found.update(bits=4.9), "bits: expected 2 to 8, got 4.9"),
        ("gptq", lambda found: found.update(bits=float("inf")), "bits: expected 2 to 8, got inf"),
        (
            "gptq",
            lambda found: found.update(group_size=32.7),
            "group_size: expected -1 or at least 1, got 32.7",
        ),
        ("compressed-tensors", lambda found: found.update(config_groups=["x"]), "config_groups: expected one"),
        ("compressed-tensors", lambda found: group(found).update(weights=["x"]), "weights: expected an object"),
        ("compressed-tensors", lambda found: group(found).update(input_activations=3), "input_activations: expected"),
        ("compressed-tensors", lambda found: group(found)["weights"].update(num_bits="4"), "bits: expected 2 to 8"),
        ("compressed-tensors", lambda found: group(found)["weights"].update(group_size=None), "group_size: expected"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_descriptions(
    directories: Path, tmp_path: Path, command: str, layout: str, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (directories / layout).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    result = run(command, folder, *((tmp_path / "out", "--format", "epiloq") if command == "convert" else ()))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split()) and "config.json" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize(
    ("name", "hint"), [("quantisation_config", r" \(quantisation_config: expected quantization_config\)"), (None, "")]
)
def test_quantised_layers_without_a_description(
    directories: Path, tmp_path: Path, layout: str, name: str | None, hint: str
) -> None:
    shutil.copytree(directories / layout, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    found = config.pop("quantization_config")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | ({} if name is None else {name: found})))
    message = rf"model\.layers\.0\..*but config\.json does not say how layers are quantised{hint}$"
    with pytest.raises(FormatError, match=message):
        models.from_directory(tmp_path / "model")


@pytest.mark.parametrize("change", [lambda index: index[0], lambda index: torch.cat([index, index])])
def test_groups_of_columns(directories: Path, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    folder, name = tmp_path / "model", "model.layers.0.self_attn.k_proj.g_idx"
    folder.mkdir()
    for file in (directories / "gptq").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: change(tensors[name]).clone()}, folder / "model.safetensors")
    for command in (("inspect", folder), ("convert", folder, tmp_path / "out", "--format", "compressed-tensors")):
        result = run(*command)
        message = " ".join(result.output.split())
        assert result.exit_code == 2 and f"{name}: expected the group of each of 64 columns" in message, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_formats_are_imported_on_demand() -> None:
    assert callable(epiloq.formats.awq.to_packed) and callable(epiloq.formats.gguf_model.load)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        epiloq.formats.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ("OnlineQuantLinear", {"group_size": [32]}, r"OnlineQuantLinear: group_size: expected int, got \[32\]"),
        ("OnlineQuantLinear", {"symmetric": []}, r"symmetric: expected bool, got \[\]"),
        ("OnlineQuantLinear", {"bits": True}, "bits: expected int, got True"),
        ("OnlineQuantLinear", {"bits": 5}, "bits: expected 4 or 8, got 5"),
        ("WeightOnlyLinear", {"zeros": 1}, "zeros: expected str, got 1"),
        ("WeightOnlyLinear", {"group_size": 1 << 40}, "group_size: expected less than 2"),
        ("Int8Linear", {"activation": "tensor"}, "activation: expected one of"),
        ("Fp8Linear", {"limit": "x"}, "limit: expected int or float or NoneType, got 'x'"),
        ("TableLinear", {"block_size": 0}, "block_size: expected at least 1, got 0"),
    ],
)
def test_options_of_modules(module: str, changes: dict[str, Any], message: str) -> None:
    from epiloq.formats import epiloq_modules

    usual: dict[str, dict[str, Any]] = {
        "OnlineQuantLinear": {"bits": 8, "group_size": 32, "symmetric": True},
        "WeightOnlyLinear": {"bits": 4, "group_size": 32, "zeros": "none"},
        "Int8Linear": {"activation": "dynamic", "symmetric": True},
        "Fp8Linear": {"activation": "token", "weight": "channel"},
        "TableLinear": {"block_size": 64},
    }

    def described(options: dict[str, Any]) -> dict[str, Any]:
        return epiloq_modules.config([epiloq_modules.Group(module, options, ["a"])])

    assert epiloq_modules.parse(described(usual[module]))[0].options == usual[module]
    with pytest.raises(ValueError, match=message):
        epiloq_modules.parse(described(usual[module] | changes))
