"""A transformers configuration from a GGUF file's values. Each is applied, known to have no effect, or refused by name.

The keys are llama.cpp's (``llama-arch.cpp``, ``llama-model.cpp``); their meaning for positions is defined by its
``ggml_rope_ext``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

from epiloq.formats.io.gguf_file import Array, GgufFile
from epiloq.formats.layouts.base import FormatError

# Keys without effect on the computation, for every architecture.
_IGNORED = {"rope.scaling.finetuned", "tensor_data_layout", "use_parallel_residual"}
# Keys that must have these values if present.
_FIXED: Mapping[str, Any] = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "pooling_type": 0}
EMBEDDING, _OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Factors of frequencies for contexts up to the original length, and for longer ones."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp and its counterpart in transformers.

    config
        Name of its configuration in transformers.
    rotated
        Layers in which llama.cpp stores the two rows that rotate together next to each other, each mapped to the
        configuration's entry for its number of heads.
    norm_offset
        Added to the weights of norms by llama.cpp, because Gemma's norms multiply by one plus the weight.
    rope_factors
        Whether llama.cpp reads "rope_freqs.weight".
    partial
        Whether a part of a head may be rotated, with factors for short and long contexts (`LONG_FACTORS`).
    finish
        Applies the architecture's remaining values to the configuration.
    """

    config: str
    rotated: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    rope_factors: bool = False
    partial: bool = False
    finish: Callable[[_Values, Config], None] = lambda values, config: None


class _Values:
    """A file's architecture values; those that are never used are refused at the end."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.prefix = file, f"{file.architecture}."
        self.left = {k.removeprefix(self.prefix): v for k, v in file.values.items() if k.startswith(self.prefix)}

    def where(self, key: str) -> str:
        return f"{self.file.path}: {self.prefix}{key}"

    def take(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """A value of one of some types. Raises FormatError for other types, or if it is missing without a default."""
        value = self.left.pop(key, default)
        if value is None or isinstance(value, bool) != (bool in kinds) or not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise FormatError(f"{self.where(key)}: expected {wanted}, got {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; for an array, the common value of its entries."""
        value = self.left.get(key)
        if isinstance(value, Array) and len(set(value.values)) == 1:
            self.left[key] = value.values[0]
        found: int = self.take(key, (int,), default)
        if not 1 <= found < 1 << 31:
            raise FormatError(f"{self.where(key)}: expected 1 to 2^31 - 1, got {found}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        found = float(self.take(key, (int, float), default))
        if not 0 < found < float("inf"):
            raise FormatError(f"{self.where(key)}: expected a number above 0, got {found}")
        return found

    def refuse_others(self) -> None:
        """Raise FormatError for unused values, which may change the computation."""
        for key, value in sorted(self.left.items()):
            if key not in _IGNORED and (key not in _FIXED or _FIXED[key] != value):
                raise FormatError(f"{self.where(key)}: not understood; it may change what the model computes")


def _rope(values: _Values, context: int, head: int) -> Config:
    """The rotary position settings. Frequency factors are expressed as transformers' "longrope" with the same list for
    short and long contexts."""
    known: Config = {"rope_type": "default", "rope_theta": values.number("rope.freq_base", 10000.0)}
    partial = ARCHITECTURES[values.file.architecture].partial
    rotated = values.size("rope.dimension_count", head)
    if (rotated != head and not partial) or rotated > head or rotated % 2:
        raise FormatError(f"{values.where('rope.dimension_count')}: expected {head}, a whole head, got {rotated}")
    if partial:
        known["partial_rotary_factor"] = rotated / head
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    kind = values.take("rope.scaling.type", (str,), "linear" if factor != 1 else "none")
    original = values.size("rope.scaling.original_context_length", context)
    attention = values.number("rope.scaling.attn_factor", values.number("rope.scaling.yarn_attn_factor", 1.0))
    fast, slow = values.number("rope.scaling.yarn_beta_fast", 32.0), values.number("rope.scaling.yarn_beta_slow", 1.0)
    mixed = values.number("rope.scaling.yarn_ext_factor", 1.0)
    longer = _long_factors(values, rotated)
    if longer is not None:
        if kind not in ("none", "longrope") or mixed != 1:
            raise FormatError(
                f"{values.where('rope.scaling.type')}: expected longrope with {LONG_FACTORS[1]}, got {kind}"
            )
        entries = {**longer, "original_max_position_embeddings": original, "factor": context / original}
        return known | entries | {"rope_type": "longrope", "attention_factor": attention}
    if (attention != 1 and kind != "yarn") or mixed != 1:
        raise FormatError(f"{values.where('rope.scaling')}: attention or mixing factors are not supported")
    if kind not in (("none",) if partial else ("none", "linear", "yarn")):
        raise FormatError(f"{values.where('rope.scaling.type')}: expected none, linear or yarn, got {kind}")
    divided = _rope_factors(values, head)
    if divided is not None:
        if kind == "yarn":
            raise FormatError(f"{values.file.path}: {ROPE_FACTORS}: not understood with rope.scaling.type yarn")
        factors = [each * (factor if kind == "linear" else 1) for each in divided]
        both = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return known | both | {"rope_type": "longrope", "original_max_position_embeddings": context}
    if kind == "linear" and factor != 1:
        return known | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor != 1:
        entries = {"factor": factor, "original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
        return known | entries | {"rope_type": "yarn", "attention_factor": attention * (1 + 0.1 * log(factor))}
    return known


def _rope_factors(values: _Values, head: int) -> list[float] | None:
    """The factors by which frequencies are divided; None if there are none or all are 1."""
    if ROPE_FACTORS in values.file.tensors and not ARCHITECTURES[values.file.architecture].rope_factors:
        where = f"{values.file.path}: {ROPE_FACTORS}"
        raise FormatError(f"{where}: not understood in the architecture {values.file.architecture}")
    factors = _factors(values, ROPE_FACTORS, head)
    return None if factors is None or set(factors) == {1.0} else factors


def _long_factors(values: _Values, rotated: int) -> Config | None:
    """The factors for short and for long contexts, under transformers' names; None if there are none."""
    found = {
        name: _factors(values, stored, rotated)
        for name, stored in zip(("short_factor", "long_factor"), LONG_FACTORS, strict=True)
    }
    if all(factors is None for factors in found.values()):
        return None
    missing = [stored for stored, factors in zip(LONG_FACTORS, found.values(), strict=True) if factors is None]
    if missing or not ARCHITECTURES[values.file.architecture].partial:
        what = f"{missing[0]}: expected a tensor, found none" if missing else f"{LONG_FACTORS[1]}: not understood"
        raise FormatError(f"{values.file.path}: {what} (architecture {values.file.architecture})")
    return found


def _factors(values: _Values, name: str, rotated: int) -> list[float] | None:
    """A tensor's factors of the frequencies of so many features; None without the tensor."""
    stored = values.file.tensors.get(name)
    if stored is None:
        return None
    where = f"{values.file.path}: {name}"
    if stored.shape != (rotated // 2,):
        raise FormatError(f"{where}: expected [{rotated // 2}], got {list(stored.shape)}")
    factors: list[float] = stored.dequantize().tolist()
    if min(factors) <= 0:
        raise FormatError(f"{where}: expected numbers above 0, got {min(factors)}")
    return factors


def _biases(values: _Values, config: Config) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in values.file.tensors


def _soft_caps(values: _Values, config: Config) -> None:
    """Like llama.cpp, recognise Gemma 2 27B, whose queries are scaled differently, by its number of layers."""
    config["attn_logit_softcapping"] = values.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 30.0)
    config["sliding_window"] = values.size("attention.sliding_window", 4096)
    config["query_pre_attn_scalar"] = _query_scale(config, layers_of_27b=46)


def _gemma3(values: _Values, config: Config) -> None:
    pattern = values.size("attention.sliding_window_pattern", 6)
    config["sliding_window"] = values.size("attention.sliding_window")
    config["layer_types"] = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    config["query_pre_attn_scalar"] = _query_scale(config, layers_of_27b=62)
    if "final_logit_softcapping" in values.left:
        config["final_logit_softcapping"] = values.number("final_logit_softcapping")


def _phi3(values: _Values, config: Config) -> None:
    """A window of 0, or of no less than the context, is none; llama.cpp itself leaves it out, with a warning."""
    config["pad_token_id"] = None  # its default is of the original vocabulary
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    window = values.take("attention.sliding_window", (int,), 0)
    config["sliding_window"] = window if 0 < window < config["max_position_embeddings"] else None


def _qwen3_mixture(values: _Values, config: Config) -> None:
    """llama.cpp divides the weights of the chosen experts by their sum, and has experts in every layer."""
    _biases(values, config)
    config["num_experts"], config["num_experts_per_tok"] = values.size("expert_count"), values.size("expert_used_count")
    config["moe_intermediate_size"] = values.size("expert_feed_forward_length")
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _granite(values: _Values, config: Config) -> None:
    """Without a factor, llama.cpp multiplies by none, and divides attention's scores by the root of a head's size."""
    _biases(values, config)
    config["logits_scaling"] = values.number("logit_scale")
    config["embedding_multiplier"] = values.number("embedding_scale", 1.0)
    config["residual_multiplier"] = values.number("residual_scale", 1.0)
    config["attention_multiplier"] = values.number("attention.scale", config["head_dim"] ** -0.5)


def _query_scale(config: Config, layers_of_27b: int) -> int:
    large = config["num_hidden_layers"] == layers_of_27b
    return int(config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"])


_PAIRS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
ARCHITECTURES = {
    "llama": Architecture("llama", _PAIRS, rope_factors=True, finish=_biases),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", finish=_biases),
    "qwen3moe": Architecture("qwen3_moe", finish=_qwen3_mixture),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", norm_offset=1.0, finish=_soft_caps),
    "phi3": Architecture("phi3", partial=True, finish=_phi3),
    "granite": Architecture("granite", _PAIRS, finish=_granite),
    "gemma3": Architecture("gemma3_text", norm_offset=1.0, finish=_gemma3),
}


def config_of(file: GgufFile) -> Any:
    """The transformers configuration for a file of one of `ARCHITECTURES`.

    Raises FormatError, naming the value or the tensor, for other architectures and for values that are missing, of a
    wrong type, inconsistent with the tensors, or unknown.
    """
    from transformers import AutoConfig

    known = ARCHITECTURES.get(file.architecture)
    if known is None:
        expected = ", ".join(ARCHITECTURES)
        raise FormatError(f"{file.path}: general.architecture: expected one of {expected}, got {file.architecture}")
    values = _Values(file)
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(f"{file.path}: {EMBEDDING}: expected a matrix, found none")
    hidden, heads = values.size("embedding_length"), values.size("attention.head_count")
    layers, context = values.size("block_count"), values.size("context_length")
    vocabulary = values.size("vocab_size", embedding.shape[0])
    if (vocabulary, hidden) != embedding.shape:
        raise FormatError(f"{file.path}: {EMBEDDING}: expected {[vocabulary, hidden]}, got {list(embedding.shape)}")
    if layers > (most := len(file.tensors)):
        where = values.where("block_count")
        raise FormatError(f"{where}: expected at most {most}, as the file has {most} tensors, got {layers:,}")
    head = values.size("attention.key_length", hidden // heads)
    if (value_length := values.size("attention.value_length", head)) != head:
        raise FormatError(f"{values.where('attention.value_length')}: expected {head}, got {value_length}")
    config: Config = {
        "hidden_size": hidden,
        "intermediate_size": values.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.size("attention.head_count_kv", heads),
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": _OUTPUT not in file.tensors,
        "rope_parameters": _rope(values, context, head),
    }
    for name in ("bos", "eos"):
        token = file.values.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token_id"] = token if type(token) is int and token < vocabulary else None
    known.finish(values, config)
    window = values.left.get("attention.sliding_window", 0)
    if window == 0 or (type(window) is int and window >= context):
        values.left.pop("attention.sliding_window", None)
    values.refuse_others()
    return AutoConfig.for_model(known.config, **config)
