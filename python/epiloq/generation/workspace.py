"""What is kept with a model from one call of ``generate`` to the next: a static cache and buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import StaticCache

from epiloq.generation.steps import FixedStep, Sequences
from epiloq.generation.support import is_fixed

_NAME = "_epiloq_decoding"
# Lengths of caches are multiples of this, so that calls of similar length share the memory and the graphs.
_LENGTH_STEP = 128


class Workspace:
    """The last cache that `decode` made for a model, with the buffers of its step. Copies of a model begin empty."""

    def __init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        """Release everything."""
        self.key: tuple[Any, ...] = ()
        self.length = 0
        self.cache: Any = None
        self.shapes: tuple[Any, ...] = ()
        self.step: FixedStep | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()


def workspace_of(model: Any) -> Workspace:
    """The model's workspace."""
    held: Workspace = vars(model).setdefault(_NAME, Workspace())
    return held


def static_cache(model: Any, batch: int, length: int, keep: bool) -> Any:
    """An empty static cache for `batch` sequences of at least `length` tokens; with `keep` in the model's workspace."""
    held, config = workspace_of(model), model.config.get_text_config(decoder=True)
    if not keep:
        return StaticCache(config=config, max_cache_len=length)
    key = (batch, model.dtype, model.device)
    if held.cache is None or held.key != key or held.length < length:
        held.empty()
        held.length = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        cache = StaticCache(config=config, max_cache_len=held.length)
        if not is_fixed(cache):
            return cache
        held.key, held.cache = key, cache
    for layer in held.cache.layers:
        if layer.is_initialized:
            # Empty for whoever asks, so that the prompt is attended to causally, without a mask.
            layer.is_initialized = False
            layer.lazy_initialization = partial(_begin_again, layer)
    return held.cache


def _begin_again(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """Initialise a layer that has its memory."""
    for tensor in (layer.keys, layer.values, layer.cumulative_length):
        tensor.zero_()
    layer.is_initialized = True


def fixed_step(
    model: Any,
    cache: Any,
    inputs: dict[str, Any],
    seen: int,
    prompt: Tensor,
    width: int,
    eos: Tensor | None,
    pad: Tensor | None,
) -> FixedStep:
    """A step that begins with `inputs` (see `steps.fixed_inputs`): in the memory of the last call, if it had the kept
    cache and inputs of the same shapes."""
    held = workspace_of(model)
    shapes = (width, None if eos is None else eos.shape, pad is None, _shapes(inputs))
    if cache is held.cache and held.step is not None and held.shapes == shapes:
        held.step.sequences.begin(prompt, eos, pad)
        held.step.begin(inputs, seen)
        return held.step
    step = FixedStep(model, cache, inputs, seen, Sequences(prompt, width, eos, pad))
    if cache is held.cache:
        held.step, held.shapes = step, shapes
    return step


def _shapes(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """What distinguishes inputs: shapes of tensors, and other values."""
    flat: list[Any] = []
    for name, value in sorted(inputs.items()):
        if isinstance(value, dict):
            flat.append((name, tuple((key, each.shape) for key, each in value.items())))
        elif isinstance(value, Tensor):
            flat.append((name, value.shape, value.dtype))
        elif isinstance(value, (bool, int, float, str, type(None))):
            flat.append((name, value))
    return tuple(flat)
