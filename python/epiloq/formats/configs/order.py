"""Configurations of which the first matching rule applies, for writers that sort entries: transformers sorts those of
config.json when it saves a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import translate
from typing import Any

from epiloq.formats.configs import auto_round, awq, gptq, quark
from epiloq.formats.layouts.base import FormatError

Keys = tuple[str, ...]


def _of_gptq(text: str, before: Keys) -> str:
    sign, expression = _signed(text)
    return f"{sign}(?!{'|'.join(_group(_signed(other)[1]) for other in before)}){_group(expression)}"


def _of_auto_round(text: str, before: Keys) -> str:
    """Expressions are found anywhere in a name; names precede all of them."""
    earlier = [other for other in before if set(other) & auto_round.SPECIAL]
    if not earlier or not set(text) & auto_round.SPECIAL:
        return text
    return f"^(?!.*(?:{'|'.join(map(_group, earlier))}))(?=.*{_group(text)})"


def _of_quark(text: str, before: Keys) -> str:
    return f"re:(?!{'|'.join(_group(_expression(other)) for other in before)}){_group(_expression(text))}"


def _signed(text: str) -> tuple[str, str]:
    return (text[:2], text[2:]) if text[:2] in ("+:", "-:") else ("", text)


def _expression(text: str) -> str:
    return text[3:] if text.startswith("re:") else translate(text)


def _group(expression: str) -> str:
    return f"(?:{expression})"


_RULES: Mapping[str, tuple[tuple[str, ...], Callable[[str, Keys], str]]] = {
    gptq.METHOD: (("dynamic",), _of_gptq),
    awq.METHOD: (("dynamic",), _of_gptq),
    quark.METHOD: (("layer_quant_config",), _of_quark),
    **dict.fromkeys(auto_round.METHODS, (("layer_config", "extra_config"), _of_auto_round)),
}


def in_any_order(found: Mapping[str, Any], meaning: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """A ``quantization_config`` that has the same `meaning` after its entries are sorted.

    If `found` has not, each of its rules excludes in the result what earlier ones match. Raises FormatError if the
    rules are regular expressions that cannot be combined, such as those with global flags.
    """
    method = str(found.get("quant_method"))
    keys, excluding = _RULES.get(method, ((), _of_gptq))
    changed, meant = dict(found), meaning(found) if keys else None
    if not keys or meaning(_sorted(found, keys)) == meant:
        return changed
    for key in keys:
        rules = list((found.get(key) or {}).items())
        names = tuple(name for name, _ in rules)
        changed[key] = {excluding(name, names[:i]) if i else name: entry for i, (name, entry) in enumerate(rules)}
    if meaning(_sorted(changed, keys)) != meant:
        raise FormatError(f"{method}: {', '.join(keys)}: expected rules whose order does not matter, got {found!r}")
    return changed


def _sorted(found: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    return {**found, **{key: dict(sorted(found[key].items())) for key in keys if found.get(key)}}
