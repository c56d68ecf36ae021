"""The configurations of bitsandbytes: LLM.int8, and the 4-bit types NF4 and FP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epiloq.formats.configs.keys import all_but, check_keys, names, one_of, skips
from epiloq.formats.description import INT8_OF_BITSANDBYTES, TABLE_OF_BITSANDBYTES, Description, Rules
from epiloq.formats.layouts.base import FormatError

METHOD = "bitsandbytes"
_WHERE = "quantization_config"
# How bitsandbytes computes, or facts that the tensors contain themselves: irrelevant to the meaning of weights.
_NOTES = {
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_threshold",
}
_KNOWN = {"quant_method", "load_in_4bit", "load_in_8bit", "llm_int8_has_fp16_weight", "llm_int8_skip_modules"}


def parse(found: Mapping[str, Any]) -> Rules:
    """The rules of a ``quantization_config``. Raises FormatError, naming key and value, for unsupported entries."""
    if found.get("quant_method") != METHOD:
        raise FormatError(f"{_WHERE}: quant_method: expected {METHOD}, got {found.get('quant_method')!r}")
    check_keys(found, _KNOWN, _WHERE, _NOTES)
    one_of(found, "llm_int8_has_fp16_weight", False, (False,), _WHERE)
    four, eight = (one_of(found, f"load_in_{bits}bit", False, (True, False), _WHERE) for bits in (4, 8))
    if four == eight:
        raise FormatError(f"{_WHERE}: load_in_4bit, load_in_8bit: expected one of them to be true, got {four}, {eight}")
    left = names(found, "llm_int8_skip_modules", _WHERE)
    described = Description(INT8_OF_BITSANDBYTES)
    if four:
        described = Description(TABLE_OF_BITSANDBYTES, "table", bits=4, strategy="group", group_size=64)
    return all_but(left, described, skips)
