"""Finds the description of a directory's quantised layers: at one of several places in config.json, or next to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epiloq.formats.io.safe_files import read_json, status
from epiloq.formats.layouts.base import FormatError

KEY = "quantization_config"
_OF_MODELOPT = "hf_quant_config.json"
SEPARATE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    _OF_MODELOPT: "modelopt",
    "quanto_qmap.json": "optimum-quanto",
}
"""Separate files that older AutoGPTQ, AutoAWQ, ModelOpt and optimum-quanto itself wrote, and their methods."""
_OF_LAYERS = (".qweight", ".weight_scale", ".weight._scale")
"""Ends of names of their tensors."""
_OF_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
_FORMER, _FORMER_METHOD = "compression_config", "compressed-tensors"


def described_beside(folder: Path) -> bool:
    """Whether there is a separate quantisation configuration next to config.json."""
    return any(status(folder / file) is not None for file in SEPARATE_FILES)


def lacks_layers(found: Any) -> bool:
    """Whether a description of ModelOpt leaves what each layer is quantised to in the separate file."""
    mixed = isinstance(found, dict) and found.get("quant_method") == "modelopt" and "quantization" not in found
    return mixed and found.get("quant_algo") == "MIXED_PRECISION" and not found.get("quantized_layers")


def hoisted(config: dict[str, Any], where: object) -> dict[str, Any]:
    """A config.json with its ``quantization_config``, if any, at the top level and nowhere else.

    It may also be in the configuration of a part of the model, such as "text_config", or under the name that
    compressed-tensors used first. As in transformers, one at the top level precedes. One of compressed-tensors that
    only says that weights are sparse, but stored as dense ones, is removed. Raises FormatError if parts differ, or if
    it is no object.
    """
    found = list(_places(config, ""))
    if not found:
        return config
    place, first = found[0]
    if not isinstance(first, dict):
        raise FormatError(f"{where}: {place}: expected an object, got {type(first).__name__}")
    if first.get("quant_method") == "gguf":
        raise FormatError(
            f"{where}: {place}: quant_method: expected one of a directory, got 'gguf'; open the .gguf file itself, or "
            "convert it by epiloq convert FILE.gguf DIR"
        )
    at_top = place == KEY
    for other, value in [] if at_top else found[1:]:
        if value != first:
            raise FormatError(f"{where}: {place}, {other}: expected one description of quantised layers, got two")
    config = _without(config)
    return config if _is_dense(first) else {**config, KEY: _with_method(first)}


def _with_method(found: dict[str, Any]) -> dict[str, Any]:
    """A description with the method that ModelOpt's earlier versions left out."""
    if found.get("quant_method") is not None:
        return found
    producer = found.get("producer")
    names = found.get("quant_library"), producer.get("name") if isinstance(producer, dict) else None
    return {"quant_method": "modelopt", **found} if "modelopt" in names else found


def _places(config: dict[str, Any], parent: str) -> Iterator[tuple[str, Any]]:
    """Every description in a configuration and where it is, the one that precedes first."""
    if config.get(KEY) is not None:
        yield f"{parent}{KEY}", config[KEY]
    former = config.get(_FORMER)
    if isinstance(former, dict):
        yield f"{parent}{_FORMER}", {"quant_method": _FORMER_METHOD} | former
    for key, part in config.items():
        if isinstance(part, dict) and key.endswith("_config") and key not in (KEY, _FORMER):
            yield from _places(part, f"{parent}{key}.")


def _without(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a configuration without any description."""
    kept = {key: value for key, value in config.items() if key not in (KEY, _FORMER)}
    parts = {key: value for key, value in kept.items() if isinstance(value, dict) and key.endswith("_config")}
    return kept | {key: _without(part) for key, part in parts.items()}


def _is_dense(found: dict[str, Any]) -> bool:
    if found.get("quant_method") != _FORMER_METHOD:
        return False
    sparsity = found.get("sparsity_config")
    others = ("config_groups", "kv_cache_scheme", "transform_config")
    return isinstance(sparsity, dict) and sparsity.get("format") == "dense" and not any(map(found.get, others))


def description(folder: Path, config: dict[str, Any], names: Any) -> tuple[str, dict[str, Any] | None]:
    """Return the name of the file that describes how a directory's layers are quantised, and the description or None.

    `config` is a config.json as returned by `hoisted`, `names` are those of the tensors.
    """
    found = config.get(KEY)
    if found is not None and found.get("quant_method") == "fp8" and "expert_dtype" in config:
        # DeepSeek-V4 has it at the top level, V4.1 in the quantization_config.
        found = {"expert_dtype": config["expert_dtype"]} | found
    # epiloq's own format has no `quant_method`, except in older files.
    if found is not None and "quant_method" not in found and found.get("format") == "epiloq":
        return "config.json", {**found, "quant_method": "epiloq"}
    # transformers wrote none for bitsandbytes in its first versions, and still reads such files.
    if found is not None and "quant_method" not in found and any(found.get(key) is True for key in _OF_BITSANDBYTES):
        return "config.json", {**found, "quant_method": "bitsandbytes"}
    if lacks_layers(found) and status(folder / _OF_MODELOPT) is not None:
        return _OF_MODELOPT, {"quant_method": "modelopt"} | read_json(folder / _OF_MODELOPT)
    if found is None and any(name.endswith(_OF_LAYERS) for name in names):
        for file, method in SEPARATE_FILES.items():
            if status(folder / file) is not None:
                found = read_json(folder / file)
                return file, {"quant_method": "awq" if "w_bit" in found else method} | found
    return "config.json", found
