"""The configurations of AutoGPTQ and GPTQModel, with exceptions by regular expression (``dynamic``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import (
    TUNING,
    check_integers_alone,
    check_keys,
    entries,
    excludes,
    mapping,
    names,
    pattern,
)
from epiloq.formats.description import Description, Rules
from epiloq.formats.layouts.base import FormatError, flag
from epiloq.formats.layouts.gptq import VERSIONS

METHOD = "gptq"
# Entries that exceptions in `dynamic` may change, and the fields of `Description` that they set.
_NUMBERS = {"bits": "bits", "group_size": "group_size", "sym": "symmetric", "desc_act": "ordered"}
_KNOWN = {"quant_method", "checkpoint_format", "format", "dynamic", "modules_to_not_convert", *_NUMBERS}
_KNOWN |= {"pack_dtype", "data_type", "act_bits", "method"}


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    check_keys(found, _KNOWN, METHOD, TUNING)
    check_integers_alone(found, METHOD)
    if found.get("bits") is None or found.get("group_size") is None:
        raise FormatError(f"{METHOD}: quantization_config: expected bits and group_size")
    named = {key: found[key] for key in ("checkpoint_format", "format") if found.get(key)}
    if len(set(map(str, named.values()))) > 1:
        both = " and ".join(map(repr, named.values()))
        raise FormatError(f"{METHOD}: {', '.join(named)}: expected one version of the zero points, got {both}")
    version = next(iter(named.values()), "gptq")
    if version not in VERSIONS:
        raise FormatError(f"{METHOD}: checkpoint_format: expected one of {', '.join(VERSIONS)}, got {version!r}")
    base = changed(Description(version), found, METHOD)
    exceptions = [
        (pattern(text[2:] if text[:2] in ("+:", "-:") else text, f"{METHOD}: dynamic"), _exception(base, text, entry))
        for text, entry in mapping(found, "dynamic", METHOD).items()
    ]
    left = names(found, "modules_to_not_convert", METHOD)

    def rules(layer: Sequence[str], kind: type[nn.Module]) -> Description | None:
        for expression, described in exceptions:
            if any(expression.match(name) for name in layer):
                return described
        return None if any(excludes(left, name) for name in layer) else base

    return rules


def changed(base: Description, entry: Mapping[str, Any], where: str) -> Description:
    """A description changed by an entry. Raises FormatError for unsupported values."""
    found = {field: entry[key] for key, field in _NUMBERS.items() if entry.get(key) is not None}
    for key in ("sym", "desc_act"):
        flag(entry, key, where)
    size = found.get("group_size", base.group_size)
    described = replace(base, **found, strategy="channel" if size == -1 else "group")
    _ = described.grid  # raises FormatError for numbers that no grid has
    return described


def _exception(base: Description, text: str, entry: Any) -> Description | None:
    """The description of layers that a ``dynamic`` entry matches; None for "-:", which keeps them in floating point."""
    where = f"{METHOD}: dynamic: {text}"
    if text.startswith("-:"):
        return None
    return changed(base, entries(entry, _NUMBERS, where, TUNING), where)


def config(layers: Mapping[str, Description], ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of layers by name; layers that differ from the majority, and those in `ignore`, are
    listed in ``dynamic``.

    Raises FormatError for zero points stored in two ways.
    """
    ordered = any(described.ordered for described in layers.values())
    alike = Counter(replace(described, ordered=ordered) for described in layers.values())
    base = alike.most_common(1)[0][0]
    if len({described.layout for described in alike}) > 1:
        raise FormatError("gptq: cannot represent layers of which some are symmetric and others are not")
    found = {
        "quant_method": METHOD,
        "bits": base.bits,
        "group_size": base.group_size,
        "sym": base.symmetric,
        "desc_act": ordered,
        "checkpoint_format": base.layout,
    }
    others = {name: one for name, one in layers.items() if replace(one, ordered=ordered) != base}
    # Readers assume that every linear layer of the blocks is quantised unless named here.
    blocks = tuple({f"{name.split('.0.')[0]}." for name in layers if ".0." in name})
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in ignore if blocks and name.startswith(blocks)}
    dynamic |= {
        f"+:^{re.escape(name)}$": {"bits": one.bits, "group_size": one.group_size, "sym": one.symmetric}
        for name, one in sorted(others.items())
    }
    return found | ({"dynamic": dynamic} if dynamic else {})
