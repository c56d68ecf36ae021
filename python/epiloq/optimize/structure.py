"""Recognises modules that `epiloq.optimize` can replace, by the source of their ``forward``.

Class names are not sufficient (68 decoder layers in transformers are Llama's under another name), and versions may
change what a class computes. So the body of ``forward`` is compared with known forms, and anything else is left alone.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
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

# GPT-OSS's, whose MLP returns its router's scores, too.
SCORED_DECODER = PRE_NORM_DECODER.replace("hidden_states = self.mlp(", "hidden_states, _ = self.mlp(")

# Gemma 2's, with a norm after attention and MLP too.
SANDWICH_DECODER = """\
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn()
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.pre_feedforward_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = self.post_feedforward_layernorm(hidden_states)
hidden_states = residual + hidden_states
return hidden_states"""

# Phi-3's, with dropout before each addition.
DROPOUTS = ("resid_attn_dropout", "resid_mlp_dropout")
DROPOUT_DECODER = PRE_NORM_DECODER.replace("hidden_states, _ =", "hidden_states, self_attn_weights =")
for _name in DROPOUTS:
    DROPOUT_DECODER = DROPOUT_DECODER.replace("residual + hidden_states", f"residual + self.{_name}(hidden_states)", 1)

NORMS_AROUND: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    PRE_NORM_DECODER: (("input_layernorm",), ("post_attention_layernorm",)),
    DROPOUT_DECODER: (("input_layernorm",), ("post_attention_layernorm",)),
    SCORED_DECODER: (("input_layernorm",), ("post_attention_layernorm",)),
    SANDWICH_DECODER: (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}
"""By the form of a decoder layer: the norms before and, if any, after its attention, and its MLP."""

GATED_MLP = """\
down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
return down_proj"""

GATED_MLP_IN_ONE = """\
up_states = self.gate_up_proj(hidden_states)
gate, up_states = up_states.chunk(2, dim=-1)
up_states = up_states * self.activation_fn(gate)
return self.down_proj(up_states)"""

RMS_NORM = """\
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)"""

# Gemma's.
OFFSET_RMS_NORM = """\
output = self._norm(x.float())
output = output * (1.0 + self.weight.float())
return output.type_as(x)"""

# GPT-OSS's, which multiplies in float32.
FLOAT_RMS_NORM = "\n".join(
    (*RMS_NORM.splitlines()[:-1], "return (self.weight * hidden_states).to(input_dtype)"),
)

_ROOT_MEAN_SQUARE = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"

# `sliding_window` is left out: sdpa has no use for it, as the mask says what is in the window.
ROTARY_ATTENTION = """\
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
if cache is not None:
    key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
attention_interface: Callable = \
ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
attn_output, attn_weights = attention_interface(self, query_states, key_states, value_states, attention_mask, \
dropout=0.0 if not self.training else self.attention_dropout, scaling=self.scaling)
attn_output = attn_output.reshape(*input_shape, -1).contiguous()
attn_output = self.o_proj(attn_output)
return (attn_output, attn_weights)"""

_PROJECTED = "{0}_states = self.{1}_proj(hidden_states).view(hidden_shape).transpose(1, 2)"
_PROJECTED_IN_ONE = """\
qkv = self.qkv_proj(hidden_states)
query_pos = self.config.num_attention_heads * self.head_dim
query_states = qkv[..., :query_pos]
key_states = qkv[..., query_pos:query_pos + self.num_key_value_heads * self.head_dim]
value_states = qkv[..., query_pos + self.num_key_value_heads * self.head_dim:]
query_states = query_states.view(hidden_shape).transpose(1, 2)
key_states = key_states.view(hidden_shape).transpose(1, 2)
value_states = value_states.view(hidden_shape).transpose(1, 2)"""
_NORMED = (
    "{0}_states = self.{1}_norm(self.{1}_proj(hidden_states).view(hidden_shape)).transpose(1, 2)",
    "{0}_states = self.{1}_norm({0}_states)",
)


def _rotary_forms() -> Iterator[tuple[str, bool]]:
    """Forms of attention equal to Llama's in evaluation mode, and whether query and key heads are normed: at once as in
    Qwen3, or after all projections as in Gemma 3."""
    heads = (("query", "q"), ("key", "k"))
    at_once, later = ROTARY_ATTENTION, ROTARY_ATTENTION
    for names in heads:
        at_once = at_once.replace(_PROJECTED.format(*names), _NORMED[0].format(*names))
    value = _PROJECTED.format("value", "v")
    later = later.replace(value, "\n".join((value, *(_NORMED[1].format(*names) for names in heads))))
    separate = "\n".join(_PROJECTED.format(*names) for names in (*heads, ("value", "v")))
    in_one = ROTARY_ATTENTION.replace(separate, _PROJECTED_IN_ONE)
    dropout = "0.0 if not self.training else self.attention_dropout"
    for form, norms in ((ROTARY_ATTENTION, False), (in_one, False), (at_once, True), (later, True)):
        yield form, norms
        yield form.replace(dropout, "self.attention_dropout if self.training else 0.0"), norms


ROTARY_FORMS = dict(_rotary_forms())

# GPT-OSS's attention, which hands its mask on as it is, and its `eager` function.
ATTENTION_WITH_SINKS = ROTARY_ATTENTION.replace("scaling=self.scaling)", "scaling=self.scaling, s_aux=self.sinks)")
SINK_ATTENTION = """\
key_states = repeat_kv(key, module.num_key_value_groups)
value_states = repeat_kv(value, module.num_key_value_groups)
attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
if attention_mask is not None:
    attn_weights = attn_weights + attention_mask
sinks = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
combined_logits = torch.cat([attn_weights, sinks], dim=-1)
combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
probs = F.softmax(combined_logits, dim=-1, dtype=combined_logits.dtype)
scores = probs[..., :-1]
attn_weights = nn.functional.dropout(scores, p=dropout, training=module.training).to(value_states.dtype)
attn_output = torch.matmul(attn_weights, value_states)
attn_output = attn_output.transpose(1, 2).contiguous()
return (attn_output, attn_weights)"""

ROTARY = """\
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
q_embed = q * cos + rotate_half(q) * sin
k_embed = k * cos + rotate_half(k) * sin
return (q_embed, k_embed)"""

# Phi-3's, equal to Llama's if the angles are as wide as a head.
PARTIAL_ROTARY = """\
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
rotary_dim = cos.shape[-1]
q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])
k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])
q_embed = torch.cat([q_rot * cos + rotate_half(q_rot) * sin, q_pass], dim=-1)
k_embed = torch.cat([k_rot * cos + rotate_half(k_rot) * sin, k_pass], dim=-1)
return (q_embed, k_embed)"""

ROTATED_HALF = """\
x1 = x[..., :x.shape[-1] // 2]
x2 = x[..., x.shape[-1] // 2:]
return torch.cat((-x2, x1), dim=-1)"""


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


def attends_by_rotary(kind: Any) -> bool:
    """Whether a class's ``forward`` is attention of Llama's form, with Llama's rotary embedding in its module."""
    if body_of(kind) not in ROTARY_FORMS:
        return False
    names = vars(sys.modules[kind.__module__])
    rotary, half = (
        None if (function := names.get(name)) is None else body_of_function(function)
        for name in ("apply_rotary_pos_emb", "rotate_half")
    )
    return rotary in (ROTARY, PARTIAL_ROTARY) and half == ROTATED_HALF


def norms_heads(kind: Any) -> bool:
    """Whether an attention that `attends_by_rotary` norms query and key heads."""
    return ROTARY_FORMS.get(body_of(kind) or "", False)


def norms_in_float32(kind: Any) -> bool:
    """Whether the ``_norm`` of a class whose ``forward`` is `OFFSET_RMS_NORM` is Gemma's."""
    return body_of_function(kind._norm) == _ROOT_MEAN_SQUARE


def norms_around(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The names in `NORMS_AROUND` of a decoder layer of a known form."""
    return None if "forward" in vars(module) else NORMS_AROUND.get(body_of(type(module)) or "")


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
    if body_of(kind) != ATTENTION_WITH_SINKS:
        return False
    eager = vars(sys.modules[kind.__module__]).get("eager_attention_forward")
    return eager is not None and body_of_function(eager) == SINK_ATTENTION


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
