"""Layers that engines multiply as one, whatever wrote their weights: told by names, for no input was seen."""

from __future__ import annotations

from collections.abc import Iterable

# As vLLM and SGLang stack them in the models that have such names.
_SETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_OF = {name: index for index, names in enumerate(_SETS) for name in names}


def together(names: Iterable[str]) -> list[list[str]]:
    """Names of layers, those that are multiplied as one in one list, in the order of the first of each."""
    found: dict[tuple[str, int | str], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        found.setdefault((parent, _OF.get(leaf, leaf)), []).append(name)
    return list(found.values())
