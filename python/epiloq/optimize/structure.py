"""What a module's ``forward`` computes, by its source: the forms that `epiloq.optimize` knows how to replace.

Class names say little (68 decoder layers of transformers are Llama's under another name) and a version may change what
one computes. So the body of ``forward`` itself is compared with a known form, and anything else is left alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

# Bodies as `body_of` prints them. Keywords that hand an argument on under its own name are left out, for they differ
# between versions of transformers (`past_key_values`, `cache`) and mean nothing here.
PRE_NORM_DECODER = """\
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn()
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states"""

GATED_MLP = """\
down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
return down_proj"""

RMS_NORM = """\
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)"""


class _Plain(ast.NodeTransformer):
    """Calls without keywords of the form ``name=name`` and ``**kwargs``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [
            k for k in node.keywords if not isinstance(k.value, ast.Name) or k.arg not in (k.value.id, None)
        ]
        return node


@cache
def _parsed(kind: Any) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):  # defined where there is no file, or in C
        return None
    return function if isinstance(function, ast.FunctionDef) else None


def body_of(kind: Any) -> str | None:
    """The statements of a class's ``forward`` without docstring, comments and keywords that hand an argument on."""
    return _printed(kind)


@cache
def _printed(kind: Any) -> str | None:
    function = _parsed(kind)
    if function is None:
        return None
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return "\n".join(ast.unparse(_Plain().visit(ast.parse(ast.unparse(statement)))) for statement in statements)


def has_form(module: nn.Module, form: str) -> bool:
    """Whether `module` computes exactly `form`: its class says so, and nobody replaced the instance's ``forward``."""
    return "forward" not in vars(module) and body_of(type(module)) == form


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


def attends_to_what_is_stored(kinds: Iterable[Any]) -> bool:
    """Whether each class that updates a cache, of which there is one, hands what comes of it to attention alone."""
    functions = [function for kind in kinds if (function := _parsed(kind)) is not None]
    found = [(function, update) for function in functions for update in _updates(function)]
    return bool(found) and all(_only_attends(function, update) for function, update in found)


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
    """Whether a class's ``forward`` uses `argument` as the input of all of these children, for its shape, and for
    nothing else, so that the children may be handed something else in its place."""
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
