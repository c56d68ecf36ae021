"""Forms of ``forward`` are told apart by their source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama as llama

from epiloq.optimize import forms, structure
from epiloq.optimize.attention import grouped_sdpa
from epiloq.optimize.forms import RotaryForm


class Renamed(nn.Module):
    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        """Documented."""
        down_proj = self.down_proj(  # a comment
            self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        )
        return down_proj


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + x


class Different(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.q(x) + self.k(y)


def test_forms() -> None:
    assert structure.body_of(Renamed) == structure.body_of(llama.LlamaMLP) == forms.GATED_MLP
    assert structure.body_of(llama.LlamaDecoderLayer) == forms.PRE_NORM_DECODER
    assert structure.body_of(llama.LlamaRMSNorm) == forms.RMS_NORM
    assert structure.body_of(nn.Identity) not in (forms.GATED_MLP, None)
    module = Renamed()
    assert structure.has_form(module, forms.GATED_MLP)
    module.forward = lambda x: x
    assert not structure.has_form(module, forms.GATED_MLP)


class PassesOn(nn.Module):
    def forward(self, hidden_states: Tensor, past_key_values: object = None, **kwargs: object) -> Tensor:
        return self.attention(hidden_states, past_key_values=past_key_values, mask=None, **kwargs)


def test_a_cache_is_passed_on_by_either_name() -> None:
    """Versions of transformers call it ``cache`` or ``past_key_values``."""
    assert structure.body_of(PassesOn) == "return self.attention(hidden_states, mask=None)"


def test_inputs() -> None:
    names = ("q_proj", "k_proj", "v_proj")
    assert structure.same_input(llama.LlamaAttention, names)
    assert structure.only_projects(llama.LlamaAttention, "hidden_states", names)
    assert structure.same_input(Twice, ("q", "k")) and not structure.only_projects(Twice, "x", ("q", "k"))
    assert not structure.same_input(Different, ("q", "k"))
    assert not structure.same_input(Twice, ("q", "v"))


@pytest.mark.parametrize("many_sequences", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "shared"), [(1, 8, 2), (1, 4, 4), (5, 8, 2), (1, 6, 1)])
def test_grouped_attention(
    seed: int,
    masked: bool,
    tokens: int,
    heads: int,
    shared: int,
    many_sequences: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a GPU the kernel is used for few, with batch invariance for any number and on a CPU, too.
    monkeypatch.setattr("epiloq.optimize.attention.is_batch_invariant", lambda: not many_sequences)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = heads // shared, False
    query = torch.randn(3, tokens, heads, 16).transpose(1, 2)
    key, value = torch.randn(2, 3, shared, 37, 16).double().unbind()
    mask = torch.rand(3, 1, tokens, 37) < 0.7 if masked else None
    if mask is not None:
        mask[..., 0] = True
    result, _ = grouped_sdpa(module, query, key.float(), value.float(), mask, scaling=0.3, is_causal=False)
    scores = 0.3 * query.double() @ key.repeat_interleave(heads // shared, 1).transpose(2, 3)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ value.repeat_interleave(heads // shared, 1)).transpose(1, 2)
    assert result.shape == (3, tokens, heads, 16)
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", [{"softcap": 30.0}, {"position_bias": torch.zeros(1, 4, 1, 9)}])
def test_changed_scores_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    """Which adds a bias, and refuses to cap scores; a decode step would do neither."""
    from transformers.integrations import sdpa_attention

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", lambda *_, **options: seen.append(options))
    query, key, value = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    grouped_sdpa(nn.Module(), query, key, value, None, scaling=0.3)
    assert not seen
    grouped_sdpa(nn.Module(), query, key, value, None, scaling=0.3, **changed)
    assert len(seen) == 1 and changed.items() <= seen[0].items()


class Attends(nn.Module):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        keys, values = self.k(x), self.v(x)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer)
        return attention_interface(self, x, keys, values)  # noqa: F821


class Repeats(nn.Module):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        keys, values = cache.update(x, x, self.layer)
        values = repeat_kv(values)  # noqa: F821
        return attention_interface(self, x, keys, values)  # noqa: F821


class Measures(nn.Module):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        keys, values = cache.update(x, x, self.layer)
        return attention_interface(self, x, keys, values, keys.shape[-2])  # noqa: F821


class Keeps(nn.Module):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        held = cache.update(x, x, self.layer)
        return attention_interface(self, x, *held)  # noqa: F821


def test_attention_to_cached_tokens() -> None:
    assert structure.attends_to_what_is_stored([Attends, Twice])
    assert structure.attends_to_what_is_stored([llama.LlamaAttention, llama.LlamaMLP])
    for other in (Repeats, Measures, Keeps):
        assert not structure.attends_to_what_is_stored([Attends, other]), other
    assert not structure.attends_to_what_is_stored([Twice])


def test_rotary_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral.modeling_mistral import MistralAttention
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    plain = (llama.LlamaAttention, MistralAttention, Qwen2Attention)
    assert all(structure.rotary_form_of(kind) == RotaryForm(False) for kind in plain)
    assert structure.rotary_form_of(Qwen3Attention) == RotaryForm(True)
    assert structure.rotary_form_of(Attends) is None

    def rotate_half(x: Tensor) -> Tensor:  # of neighbours, as in other families
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    monkeypatch.setattr(llama, "rotate_half", rotate_half)
    assert structure.rotary_form_of(llama.LlamaAttention) is None
