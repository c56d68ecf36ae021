"""Plans and results of benchmarks of whole models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

from epiloq.bench.models.shares import Share

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_hidden_layers": 24,
        "vocab_size": 201088,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    },
}
"""Configurations in transformers' words, by the name of `--model`."""
MODES = ("eager", "graph", "compile")
FORMS = {"plain": False, "optimised": True}
"""Forms of a quantised model, and whether `optimize_` follows `quantize_`."""


@dataclass(frozen=True)
class Measured:
    """Figures of one contender. Times are medians; `us_a_layer` excludes embedding, last norm and head, and, unless
    the model is compiled, everything else around the layers. It is NaN for "generate" and "own loop",
    whose time includes the prompt and the choice of each token."""

    scheme: str  # or the name of a peer
    optimized: bool
    mode: str
    phase: str  # "prefill", "decode", "generate", or "own loop" (generate with `epiloq.decode`)
    batch: int
    tokens: int
    """Of the prompt, in the cache before the step, or new ones."""
    milliseconds: float
    tokens_per_second: float
    us_a_layer: float
    weight_megabytes: float
    peak_megabytes: float
    layers: int
    layer_megabytes: float
    """Weights of one decoder layer."""
    head: str | None = None
    cache: str | None = None
    ignore: tuple[str, ...] = ()

    def of_layers(self, layers: int) -> Measured:
        """Extrapolate to this number of layers from the time and size of one; the peak memory becomes NaN."""
        more = layers - self.layers
        milliseconds = self.milliseconds + more * self.us_a_layer / 1e3
        return replace(
            self,
            layers=layers,
            milliseconds=milliseconds,
            tokens_per_second=self.tokens_per_second * self.milliseconds / milliseconds,
            weight_megabytes=self.weight_megabytes + more * self.layer_megabytes,
            peak_megabytes=self.peak_megabytes if more == 0 else nan,
        )


@dataclass(frozen=True)
class Plan:
    """Benchmark of a model in each scheme, form and mode: prefill of `prompt` tokens, and decode after `context`."""

    model: str
    schemes: Sequence[str]
    modes: Sequence[str]
    batches: Sequence[int]
    context: int
    layers: int | None = None
    prompt: int | None = None
    """`context` if None."""
    generate: int | None = None
    """New tokens of a call of ``model.generate`` after a prompt of `context` tokens; None: not measured."""
    forms: Sequence[str] = tuple(FORMS)
    head: str | None = None
    """A scheme for the output head of every quantised model (and the embedding that it is tied to)."""
    cache: str | None = None
    """The type of a quantised key-value cache, "int8" or "fp8", of every quantised model."""
    ignore: Sequence[str] = ()
    """Layers that every quantised model leaves in floating point, as for `epiloq.quantize_`."""
    peers: Sequence[str] = ()
    """Other packages' models, keys of `whole_models.PEERS`."""
    shares: bool = False
    """Whether to profile a decode step."""


@dataclass
class Extras:
    """Further results of a run: why peers were left out, and kernels by their share of a decode step."""

    left_out: dict[str, str] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
