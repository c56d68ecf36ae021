"""Quantised models in transformers, with epiloq's layers.

After ``import epiloq.integrations.transformers``, ``from_pretrained`` opens directories of every method in `METHODS`
with epiloq's modules, on CPUs and GPUs, without the packages that wrote them.

This replaces transformers' own quantizers for these methods in the current process; `unregister` restores them, and
`register` replaces them again. ``from_pretrained(FLOAT_DIRECTORY, quantization_config=EpiloqConfig("w8a8-int8"))``
quantises a floating-point model after loading it, and ``BitsAndBytesConfig`` still means bitsandbytes.
``save_pretrained`` writes the format in which a directory was opened, and epiloq's own for a model that was quantised
after loading.

Raises ValueError, before any model is returned, if a directory does not match its configuration: the message names
the file and the tensor.
"""

from __future__ import annotations

from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
)

from epiloq.formats.configs import bitsandbytes, others, torchao
from epiloq.formats.epiloq_modules import METHOD
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.described import KEY, described_beside, hoisted, lacks_layers
from epiloq.formats.readers import CONFIGS
from epiloq.integrations.hf_quantizer.config import HELD_AS, EpiloqConfig
from epiloq.integrations.hf_quantizer.quantizer import EpiloqQuantizer

METHODS = (METHOD, *CONFIGS)

__all__ = ["METHODS", "EpiloqConfig", "EpiloqQuantizer", "register", "unregister"]

_REGISTRATIONS: tuple[tuple[dict[str, Any], type], ...] = (
    (AUTO_QUANTIZATION_CONFIG_MAPPING, EpiloqConfig),
    (AUTO_QUANTIZER_MAPPING, EpiloqQuantizer),
)
# transformers finds what the caller of ``from_pretrained`` gives by its method: torchao's stays torchao's.
_KEYS = (*(method for method in METHODS if method not in HELD_AS or method == bitsandbytes.METHOD), *HELD_AS.values())
_REPLACED = [{method: table[method] for method in _KEYS if method in table} for table, _ in _REGISTRATIONS]


def _is_epiloq(config: Any) -> bool:
    return isinstance(config, dict) and "quant_method" not in config and config.get("format") == METHOD


def _supports(config: Any) -> Any:
    """Whether some quantizer opens a configuration. Raises ValueError for an unknown method, whose layers transformers
    would fill with random values after a warning."""
    if _is_epiloq(config):
        return True
    method = config.get("quant_method")
    if isinstance(method, str) and not _ORIGINAL_METHODS[0].__func__(config):
        if method in others.METHODS:
            raise ValueError(f"{__name__}: quantization_config: quant_method: {others.METHODS[method]}")
        raise ValueError(
            f"{__name__}: quantization_config: quant_method: neither epiloq nor transformers opens {method!r}; "
            f"quantise the float model instead, or call {__name__}.unregister() if the model's own code reads it"
        )
    return _ORIGINAL_METHODS[0].__func__(config)


def _from_dict(config: Any) -> Any:
    if _is_epiloq(config):
        return EpiloqConfig.from_dict(config)
    return _ORIGINAL_METHODS[1].__func__(AutoQuantizationConfig, config)


def _merge_quantization_configs(cls: Any, config: Any, given: Any, *more: Any, **options: Any) -> Any:
    """The configuration of a directory; bitsandbytes' or torchao's own class is used only if `given` is one."""
    is_held = isinstance(config, dict) and config.get("quant_method") in HELD_AS
    if is_held and given is None and not _is_torchaos(config):
        return EpiloqConfig.from_dict(config)
    return _ORIGINAL_METHODS[2].__func__(cls, config, given, *more, **options)


def _is_torchaos(config: dict[str, Any]) -> bool:
    """Whether a directory is left to torchao, which is installed, because epiloq does not read its tensors."""
    installed = config.get("quant_method") == torchao.METHOD and find_spec(torchao.METHOD) is not None
    return installed and not torchao.is_read(config)


def _get_config_dict(cls: Any, *given: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of config.json, a ``quantization_config`` at its top level; for local directories also the separate file
    that older AutoGPTQ and AutoAWQ wrote."""
    config, rest = _ORIGINAL_METHODS[3].__func__(cls, *given, **options)
    found: tuple[dict[str, Any], dict[str, Any]] = hoisted(config, "config.json"), rest
    source = given[0] if given else options.get("pretrained_model_name_or_path")
    folder = Path(source) if isinstance(source, (str, PathLike)) else None
    incomplete = KEY not in found[0] or lacks_layers(found[0][KEY])
    if folder is not None and incomplete and described_beside(folder):
        config = Checkpoint(folder).quantization
        if config is not None:
            found[0][KEY] = config
    return found


# transformers' readers of a ``quantization_config``; they refuse epiloq's own format, which has no ``quant_method``.
_READERS: tuple[tuple[type, str, Any], ...] = (
    (AutoHfQuantizer, "supports_quant_method", staticmethod(_supports)),
    (AutoQuantizationConfig, "from_dict", staticmethod(_from_dict)),
    (AutoHfQuantizer, "merge_quantization_configs", classmethod(_merge_quantization_configs)),
    (PreTrainedConfig, "get_config_dict", classmethod(_get_config_dict)),
)
_ORIGINAL_METHODS = [vars(owner)[name] for owner, name, _ in _READERS]


def register() -> None:
    """Open directories of every method in `METHODS` with epiloq. Called when this module is imported."""
    for table, ours in _REGISTRATIONS:
        table.update(dict.fromkeys(_KEYS, ours))
    for owner, name, reader in _READERS:
        setattr(owner, name, reader)


def unregister() -> None:
    """Restore transformers' own quantizers; models that are already open are not affected."""
    for (table, _), theirs in zip(_REGISTRATIONS, _REPLACED, strict=True):
        for method in _KEYS:
            table.pop(method, None)
        table.update(theirs)
    for (owner, name, _), reader in zip(_READERS, _ORIGINAL_METHODS, strict=True):
        setattr(owner, name, reader)


register()
