"""Layers that engines multiply as one matrix, recognised by name, because no inputs are available."""

from __future__ import annotations

from collections.abc import Iterable

# as stacked by vLLM and SGLang in models with these names
_SETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_OF = {name: index for index, names in enumerate(_SETS) for name in names}


def together(names: Iterable[str]) -> list[list[str]]:
    """Group names of layers that are multiplied as one matrix, in order of each group's first layer."""
    found: dict[tuple[str, int | str], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        found.setdefault((parent, _OF.get(leaf, leaf)), []).append(name)
    return list(found.values())
