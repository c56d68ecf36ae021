"""The forms of ``forward`` that `epiloq.optimize` can replace, as `structure.body_of` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Keywords that hand an argument on under its own name are left out, for they differ between versions of transformers
# (`past_key_values`, `cache`) and mean nothing here.
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

ROOT_MEAN_SQUARE = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"

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


class RotaryForm(NamedTuple):
    """A form of attention."""

    norms_heads: bool
    """Query and key heads are normed."""
    has_sinks: bool = False
    """As in GPT-OSS, whose angles are those of half a head."""


def _rotary_forms() -> Iterator[tuple[str, RotaryForm]]:
    """Forms of attention equal to Llama's in evaluation mode, with query and key heads normed at once as in Qwen3, or
    after all projections as in Gemma 3."""
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
        yield form, RotaryForm(norms)
        yield form.replace(dropout, "self.attention_dropout if self.training else 0.0"), RotaryForm(norms)


# GPT-OSS's attention, which hands its mask on as it is, and its `eager` function.
ATTENTION_WITH_SINKS = ROTARY_ATTENTION.replace("scaling=self.scaling)", "scaling=self.scaling, s_aux=self.sinks)")
ROTARY_FORMS = {**dict(_rotary_forms()), ATTENTION_WITH_SINKS: RotaryForm(False, has_sinks=True)}
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

# GPT-OSS's, by angles of half a head.
HALF_ANGLE_ROTARY = """\
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
q_embed = _apply_rotary_emb(q, cos, sin)
k_embed = _apply_rotary_emb(k, cos, sin)
return (q_embed, k_embed)"""

ROTATED_BY_HALF_ANGLES = """\
first_half, second_half = torch.chunk(x, 2, dim=-1)
first_ = first_half * cos - second_half * sin
second_ = second_half * cos + first_half * sin
return torch.cat((first_, second_), dim=-1)"""

ROTARIES = {
    ROTARY: ("rotate_half", ROTATED_HALF),
    PARTIAL_ROTARY: ("rotate_half", ROTATED_HALF),
    HALF_ANGLE_ROTARY: ("_apply_rotary_emb", ROTATED_BY_HALF_ANGLES),
}
"""By the form of ``apply_rotary_pos_emb``: the function that it calls, and that one's form."""
