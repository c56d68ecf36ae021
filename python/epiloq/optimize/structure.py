"""Recognises modules that `epiloq.optimize` can replace, by the source of their ``forward``.

Class names are not sufficient (68 decoder layers in transformers are Llama's under another name), and versions may
change what a class computes. So the body of ``forward`` is compared with known forms, and anything else is left alone.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

from epiloq.optimize import forms


class _Plain(ast.NodeTransformer):
    """Calls without keywords of the form ``name=name``, ``**kwargs`` and ``sliding_window=``; a cache by one name."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # Before names are changed: a cache may be passed on by either name.
        node.keywords = [
            k
            for k in node.keywords
            if k.arg != "sliding_window" and (not isinstance(k.value, ast.Name) or k.arg not in (k.value.id, None))
        ]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("cache", node.ctx) if node.id == "past_key_values" else node


def _parsed(kind: Any) -> ast.FunctionDef | None:
    return _parsed_function(kind.forward)


@cache
def _parsed_function(called: Any) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(called)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):  # defined where there is no file, or in C
        return None
    return function if isinstance(function, ast.FunctionDef) else None


def body_of(kind: Any) -> str | None:
    """The statements of a class's ``forward`` without docstring, comments and keywords that pass an argument on."""
    return body_of_function(kind.forward)


@cache
def body_of_function(called: Any) -> str | None:
    """The same for any function."""
    function = _parsed_function(called)
    if function is None:
        return None
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return "\n".join(ast.unparse(_Plain().visit(ast.parse(ast.unparse(statement)))) for statement in statements)


def has_form(module: nn.Module, form: str) -> bool:
    """Whether `module` computes exactly `form`: by its class, without another ``forward`` on the instance."""
    return "forward" not in vars(module) and body_of(type(module)) == form


def rotary_form_of(kind: Any) -> forms.RotaryForm | None:
    """The form of a class whose ``forward`` is attention of Llama's or GPT-OSS's form, with that model's rotary
    embedding in its module."""
    form = forms.ROTARY_FORMS.get(body_of(kind) or "")
    if form is None:
        return None
    names = vars(sys.modules[kind.__module__])

    def body_of_name(name: str) -> str:
        return "" if (function := names.get(name)) is None else body_of_function(function) or ""

    rotary = body_of_name("apply_rotary_pos_emb")
    called, called_form = forms.ROTARIES.get(rotary, ("", ""))
    stands = called != "" and body_of_name(called) == called_form
    return form if stands and form.has_sinks == (rotary == forms.HALF_ANGLE_ROTARY) else None


def norms_in_float32(kind: Any) -> bool:
    """Whether the ``_norm`` of a class whose ``forward`` is `forms.OFFSET_RMS_NORM` is Gemma's."""
    return body_of_function(kind._norm) == forms.ROOT_MEAN_SQUARE


def norms_around(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The names in `forms.NORMS_AROUND` of a decoder layer of a known form."""
    return None if "forward" in vars(module) else forms.NORMS_AROUND.get(body_of(type(module)) or "")


def _calls(function: ast.FunctionDef, projections: tuple[str, ...]) -> list[tuple[str, ast.Name]]:
    """``self.projection(name)`` in a function: the projection, and the name that it is called with."""
    found = []
    for node in ast.walk(function):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=child), args=[ast.Name() as name], keywords=[]
            ) if child in projections:
                found.append((child, name))
    return found


def same_input(kind: Any, projections: tuple[str, ...]) -> bool:
    """Whether a class's ``forward`` calls each of these children once, all with one variable."""
    function = _parsed(kind)
    calls = [] if function is None else _calls(function, projections)
    return sorted(child for child, _ in calls) == sorted(projections) and len({name.id for _, name in calls}) == 1


def asks_for_sdpa(kinds: Iterable[Any]) -> str | None:
    """Return the name of a class that compares its attention's name with "sdpa" outside its constructor.

    As the sparse attention of DeepSeek-V3.2, which then puts into the mask what it hands on to other kernels.
    """
    for kind in kinds:
        for base in kind.__mro__:
            own = [function for function in vars(base).values() if inspect.isfunction(function)]
            if any(_compares_with_sdpa(function) for function in own if function.__name__ != "__init__"):
                return str(kind.__name__)
    return None


@cache
def _compares_with_sdpa(called: Any) -> bool:
    function = _parsed_function(called) if called.__module__.startswith("transformers.") else None
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Compare) and "_attn_implementation" in (text := ast.unparse(node)) and "'sdpa'" in text:
            return True
    return False


def attends_to_what_is_stored(kinds: Iterable[Any]) -> bool:
    """Whether every class that updates a cache (there is at least one) passes the result to attention only."""
    functions = [function for kind in kinds if (function := _parsed(kind)) is not None]
    found = [(function, update) for function in functions for update in _updates(function)]
    return bool(found) and all(_only_attends(function, update) for function, update in found)


def attends_with_sinks(kinds: Iterable[Any]) -> bool:
    """Whether every class that attends through transformers' interface (there is at least one) is GPT-OSS's attention.

    Others with sinks compute more: DeepSeek-V4 adds to its mask, HY-V4 chooses tokens.
    """
    attending = [kind for kind in kinds if "attention_interface(" in (body_of(kind) or "")]
    return bool(attending) and all(map(_attends_with_sinks, attending))


@cache
def _attends_with_sinks(kind: Any) -> bool:
    if body_of(kind) != forms.ATTENTION_WITH_SINKS:
        return False
    eager = vars(sys.modules[kind.__module__]).get("eager_attention_forward")
    return eager is not None and body_of_function(eager) == forms.SINK_ATTENTION


def _updates(function: ast.FunctionDef) -> list[ast.Assign]:
    """``keys, values = cache.update(…)``."""
    found = []
    for node in ast.walk(function):
        match node:
            case ast.Assign(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr="update"))):
                found.append(node)
    return found


def _only_attends(function: ast.FunctionDef, update: ast.Assign) -> bool:
    match update.targets:
        case [ast.Tuple(elts=[ast.Name(id=keys), ast.Name(id=values)])]:
            names = {keys, values}
        case _:
            return False
    allowed = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="attention_interface"), args=arguments):
                allowed |= {id(argument) for argument in arguments}
    later = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in names and n.lineno > update.lineno]
    last = update.end_lineno or update.lineno
    return all(isinstance(n.ctx, ast.Load) and id(n) in allowed for n in later if n.lineno > last)


def only_projects(kind: Any, argument: str, projections: tuple[str, ...]) -> bool:
    """Whether a class's ``forward`` uses `argument` only as the input of all of these children and for its shape, so
    that another tensor may be passed in its place."""
    function = _parsed(kind)
    if function is None:
        return False
    calls = [(child, name) for child, name in _calls(function, projections) if name.id == argument]
    allowed = {id(name) for _, name in calls}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr == "shape" and isinstance(node.value, ast.Name):
            allowed.add(id(node.value))
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == argument]
    read = all(isinstance(name.ctx, ast.Load) and id(name) in allowed for name in names)
    return read and {child for child, _ in calls} == set(projections)
