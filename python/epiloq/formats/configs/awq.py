"""The configurations of AutoAWQ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import TUNING, check_integers_alone, check_keys, excludes, mapping, names, pattern
from epiloq.formats.description import Description, Rules
from epiloq.formats.layouts.awq import BITS, VERSIONS
from epiloq.formats.layouts.base import FormatError, flag

METHOD = "awq"
_KNOWN = {"quant_method", "bits", "w_bit", "group_size", "q_group_size", "version", "zero_point", "sym"}
_KNOWN |= {"modules_to_not_convert", "data_type", "act_bits", "format", "checkpoint_format"}
# GPTQModel writes these too.
_KNOWN |= {"method", "pack_dtype", "dynamic"}


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    check_keys(found, _KNOWN, METHOD, TUNING)
    check_integers_alone(found, METHOD)
    base = described(found)
    left = names(found, "modules_to_not_convert", METHOD)
    skipped = [_skipped(text) for text in mapping(found, "dynamic", METHOD)]

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        if any(excludes(left, name) or any(each.match(name) for each in skipped) for name in layer):
            return None
        return base

    return rules


def _skipped(text: str) -> re.Pattern[str]:
    """The layers that an entry of ``dynamic`` leaves in floating point. Raises FormatError for other entries."""
    if not text.startswith("-:"):
        raise FormatError(
            f'{METHOD}: dynamic: {text}: expected "-:" (left in floating point); all other layers share one setting'
        )
    return pattern(text.removeprefix("-:"), f"{METHOD}: dynamic")


def described(found: Mapping[str, Any], version: str = "gemm") -> Description:
    """The description given by bits, group size and version. The files always contain zero points, so they are used
    even if the configuration says symmetric."""
    size = found.get("group_size", found.get("q_group_size"))
    if found.get("bits", found.get("w_bit")) != BITS or not isinstance(size, int):
        raise FormatError(f"{METHOD}: quantization_config: expected 4 bits and a group_size")
    flag(found, "zero_point", METHOD)  # the files contain zero points in either case
    named = found.get("version") or found.get("checkpoint_format") or found.get("format") or version
    version = named.lower() if isinstance(named, str) else ""
    if version not in VERSIONS:
        raise FormatError(f"{METHOD}: version: expected one of {', '.join(VERSIONS)}, got {named!r}")
    made = Description(version, "int", BITS, "channel" if size == -1 else "group", size, symmetric=False)
    _ = made.grid  # raises FormatError for a size that no grid has
    return made


def config(layers: Mapping[str, Description], ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config``. Raises FormatError for layers that differ."""
    sizes = {described.group_size for described in layers.values()}
    if len(sizes) > 1:
        raise FormatError(f"awq: cannot represent layers that differ: groups of {sorted(sizes)}")
    return {
        "quant_method": METHOD,
        "bits": BITS,
        "group_size": sizes.pop(),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(ignore),
    }
