"""QuantizedCache: an 8-bit key-value cache for transformers' ``generate``."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from epiloq.ops.attention.cached_heads import KINDS, dequantize_heads, quantize_heads
from epiloq.optimize import attention, sinks

READERS = (attention.READS_STORED, sinks.READS_STORED)
"""Names of attention that takes `Stored`."""


class Stored(NamedTuple):
    """Keys or values as stored in a cache."""

    q: Tensor
    scale: Tensor
    kind: str

    def __getattr__(self, name: str) -> Any:
        """Called if attention that does not support `Stored` uses it as a tensor, in a model with none of `READERS`."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise ValueError(
            "epiloq.QuantizedCache: config: expected that of the model that uses the cache, got one whose attention "
            f"reads quantised values ({' or '.join(READERS)}, set by epiloq.optimize_): create it with this model's "
            "own config"
        )

    def dequantize(self) -> Tensor:
        """``[B, H, T, D]`` in the scale's dtype."""
        return dequantize_heads(self.q, self.scale, self.kind)


class _Scaled:
    """Base of both kinds of layers: ``keys`` and ``values`` are bytes, with separate scales."""

    kind: str
    keys: Any  # Tensors; None before the first token.
    values: Any
    key_scale: Any = None
    value_scale: Any = None
    config: Any = None
    """The model's configuration, which names its current attention implementation."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Scaled:
        """Copy for the same model; the configuration is shared, unless it is being copied too."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            shared = name == "config"
            setattr(copied, name, memo.get(id(value), value) if shared else copy.deepcopy(value, memo))
        return copied

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's tensors."""
        held = (self.keys, self.values, self.key_scale, self.value_scale)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def handed(self) -> tuple[Any, Any]:
        """All keys and values for attention: dequantised, unless attention reads the stored form."""
        keys, values = (
            Stored(self.keys, self.key_scale, self.kind),
            Stored(self.values, self.value_scale, self.kind),
        )
        if getattr(self.config, "_attn_implementation", None) in READERS:
            return keys, values
        return keys.dequantize(), values.dequantize()

    def offload(self) -> None:
        super().offload()  # type: ignore[misc]
        self._move("cpu")

    def prefetch(self) -> None:
        super().prefetch()  # type: ignore[misc]
        self._move(self.device)  # type: ignore[attr-defined]

    def _move(self, device: Any) -> None:
        if self.key_scale is not None and self.value_scale is not None:
            self.key_scale = self.key_scale.to(device, non_blocking=True)
            self.value_scale = self.value_scale.to(device, non_blocking=True)


class QuantizedDynamicLayer(_Scaled, DynamicLayer):  # type: ignore[no-untyped-call]
    """A growing layer: keys and values ``[B, H, T, D]`` as bytes, with a scale per token and head."""

    def __init__(self, kind: str, config: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self.config = kind, config

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Initialise without tokens; type, device and heads are those of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.key_scale = quantize_heads(key_states[:, :, :0], self.kind)
        self.values, self.value_scale = quantize_heads(value_states[:, :, :0], self.kind)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append tokens; returns all keys and values in stored form."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = (self.keys, self.key_scale, self.values, self.value_scale)
        new = (*quantize_heads(key_states, self.kind), *quantize_heads(value_states, self.kind))
        joined = [torch.cat((old, tensor), -2) for old, tensor in zip(held, new, strict=True) if old is not None]
        self.keys, self.key_scale, self.values, self.value_scale = joined
        return self.handed()

    def reset(self) -> None:
        """Remove all tokens."""
        self.keys = self.values = self.key_scale = self.value_scale = None
        self.is_initialized = False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove the last tokens; the meaning of the argument depends on the version of transformers."""
        super().crop(*args, **kwargs)
        if self.keys is not None and self.key_scale is not None and self.value_scale is not None:
            length = self.keys.shape[-2]
            self.key_scale, self.value_scale = self.key_scale[..., :length, :], self.value_scale[..., :length, :]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the sequences with these indices, for beam search."""
        self._select(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences with these indices."""
        self._select(lambda tensor: tensor[indices, ...])

    def _select(self, change: Any) -> None:
        for name in ("keys", "values", "key_scale", "value_scale"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))


class QuantizedStaticLayer(_Scaled, StaticLayer):  # type: ignore[no-untyped-call]
    """A fixed-size layer for compiled code: bytes ``[B, H, max_cache_len, D]``, with a scale per token and head."""

    def __init__(self, max_cache_len: int, kind: str, config: Any = None) -> None:
        super().__init__(max_cache_len)
        self.kind, self.config = kind, config

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed tensors; type, device and heads are those of the first states."""
        super().lazy_initialization(key_states[:, :, :0], value_states[:, :, :0])
        dtype = torch.int8 if self.kind == "int8" else torch.uint8
        self.keys, self.values = (torch.zeros_like(held, dtype=dtype) for held in (self.keys, self.values))
        shape = (*self.keys.shape[:3], 1)
        self.key_scale, self.value_scale = key_states.new_zeros(shape), value_states.new_zeros(shape)
        if not is_compiling():
            for tensor in (self.keys, self.values, self.key_scale, self.value_scale):
                torch._dynamo.mark_static_address(tensor)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append tokens; return the keys and values of all positions, as stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        self.check_room(count)
        places = torch.arange(count, device=key_states.device) + self.cumulative_length
        self.cumulative_length.add_(count)
        held = (self.keys, self.key_scale, self.values, self.value_scale)
        new = (*quantize_heads(key_states, self.kind), *quantize_heads(value_states, self.kind))
        for tensor, states in zip(held, new, strict=True):
            tensor.index_copy_(2, places, states)
        return self.handed()

    def check_room(self, count: int) -> None:
        """Raise ValueError for too many tokens, as far as that is known without waiting for the GPU; otherwise torch's
        assertion on the device fails."""
        if is_compiling():
            return
        known = int(self.cumulative_length) if self.cumulative_length.device.type == "cpu" else 0
        if known + count > self.max_cache_len:
            raise ValueError(
                f"epiloq.QuantizedCache: max_cache_len: expected room for {known + count} tokens, got "
                f"{self.max_cache_len}: create it with a larger max_cache_len"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; the tensors stay where they are."""
        if tokens_to_remove > 0:
            raise ValueError(
                "epiloq.QuantizedCache: tokens_to_remove: expected the negative number of tokens to remove, as a cache "
                f"of fixed size does not know its length without waiting for the GPU, got {tokens_to_remove}"
            )
        self.cumulative_length.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the sequences with these indices, for beam search, in the same memory."""
        for tensor in (self.keys, self.values, self.key_scale, self.value_scale):
            if tensor is not None:
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


class QuantizedCache(Cache):
    """Key-value cache in 8 bits, with a scale per token and head: D + 2 bytes per head instead of 2 D in 16 bits.

    Use ``model.generate(..., cache=epiloq.QuantizedCache(model.config))`` (``past_key_values=`` before transformers
    5.24). The cache grows, or has a fixed size for ``torch.compile`` and CUDA graphs if `max_cache_len` is given.
    Attention always reads the quantised values, also for new tokens, so results do not depend on how a prompt is
    divided into calls. Layers with a sliding window keep the model's type, because they store only the window.

    After ``epiloq.optimize_(model)`` a decode step reads the stored cache directly. Otherwise, and for several new
    tokens at a time, the keys and values of a layer are dequantised as a whole before attention reads them, which
    needs a temporary of the layer's size in the model's type and another pass over it.

    Args:
        config: configuration of the model.
        dtype: "int8" or "fp8" (float8_e4m3fn).
        max_cache_len: number of tokens of a fixed-size cache; None for a growing one. Further tokens are refused by a
            ValueError; on a GPU by torch's assertion, unless one call alone has too many.

    Raises:
        ValueError: another `dtype`, not a configuration, fewer than 1 token, or a model with layers other than full
            attention and sliding windows (linear attention, indexed attention), which the message names.
    """

    def __init__(self, config: Any, dtype: str = "int8", max_cache_len: int | None = None) -> None:
        if dtype not in KINDS:
            raise ValueError(f"epiloq.QuantizedCache: dtype: expected {' or '.join(KINDS)}, got {dtype!r}")
        if not hasattr(config, "get_text_config"):
            raise ValueError(
                f"epiloq.QuantizedCache: config: expected the model's configuration, model.config, got "
                f"{type(config).__name__}"
            )
        if max_cache_len is not None and (not isinstance(max_cache_len, int) or max_cache_len < 1):
            raise ValueError(f"epiloq.QuantizedCache: max_cache_len: expected at least 1 token, got {max_cache_len!r}")
        if max_cache_len is None:
            layers = DynamicCache(config=config).layers
        else:
            layers = StaticCache(config=config, max_cache_len=max_cache_len).layers

        text_config = config.get_text_config(decoder=True)

        def quantised(layer: Any) -> Any:
            if type(layer) is DynamicLayer:
                return QuantizedDynamicLayer(dtype, text_config)
            if type(layer) is StaticLayer:
                return QuantizedStaticLayer(layer.max_cache_len, dtype, text_config)
            if type(layer) in (DynamicSlidingWindowLayer, StaticSlidingWindowLayer):
                return layer
            raise ValueError(
                f"epiloq.QuantizedCache: config: expected layers of full attention or sliding windows, got "
                f"{type(layer).__name__}; use transformers' own cache for this model"
            )

        super().__init__(layers=[quantised(layer) for layer in layers])
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """Size of all stored keys, values and scales in bytes."""
        total = 0
        layers: list[Any] = self.layers
        for layer in layers:
            held = [t for t in (layer.keys, layer.values) if isinstance(t, Tensor)]
            total += layer.nbytes if isinstance(layer, _Scaled) else sum(t.nbytes for t in held)
        return total
