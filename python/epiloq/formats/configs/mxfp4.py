"""Configurations of GPT-OSS's own checkpoints, ``quant_method`` "mxfp4": experts in MXFP4, others unquantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epiloq.formats.configs.keys import all_but, check_keys, excludes, names
from epiloq.formats.description import Description, Rules

METHOD, LAYOUT = "mxfp4", "gpt-oss mxfp4"
KNOWN = {"quant_method", "modules_to_not_convert"}


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    check_keys(found, KNOWN, METHOD)
    left = names(found, "modules_to_not_convert", METHOD)
    return all_but(left, Description(LAYOUT, "fp4", 4, "group", 32), excludes)
