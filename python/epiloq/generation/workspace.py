"""What is kept with a model from one call of ``generate`` to the next: a static cache, buffers, and compiled code."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from epiloq.generation.steps import FixedInputs, FixedStep, Sequences, ends_in
from epiloq.generation.support import is_fixed

_NAME = "_epiloq_decoding"
# Lengths of caches are multiples of this, and of an eighth of the power of two below them, so that calls of similar
# length share the memory and the graphs, and growing calls need a new one only now and then.
_LENGTH_STEP = 128
_numbers = itertools.count()


def rounded(length: int) -> int:
    """Length of a buffer for at least so many tokens."""
    step = max(_LENGTH_STEP, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


class Workspace:
    """The last cache that `decode` made for a model, with the buffers of its step. Copies of a model begin empty."""

    def __init__(self) -> None:
        self.lengths: dict[tuple[Any, ...], int] = {}
        """Of the caches so far, so that a batch size that comes back finds its graphs."""
        self.lock = threading.Lock()
        """Held by the call that uses the cache."""
        self._codes: dict[Callable[..., Any], Any] = {}
        self.empty()

    def empty(self) -> None:
        """Release the memory."""
        self.key: tuple[Any, ...] = ()
        self.length = 0
        self.cache: Any = None
        self.shapes: tuple[Any, ...] = ()
        self.step: FixedStep | None = None

    def own(self, method: Any) -> Any:
        """`method` of a step with code of its own: `torch.compile` limits the graphs of a function's code, which steps
        of other models would use up."""
        function = method.__func__
        if function not in self._codes:
            # Also by another name, by which torch remembers which sizes vary.
            name = f"{function.__name__}_{next(_numbers)}"
            self._codes[function] = FunctionType(
                function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__
            )
        return self._codes[function].__get__(method.__self__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()


def workspace_of(model: Any) -> Workspace:
    """The model's workspace."""
    held: Workspace = vars(model).setdefault(_NAME, Workspace())
    return held


def static_cache(model: Any, batch: int, length: int) -> Any:
    """The model's static cache, empty, for `batch` sequences of at least `length` tokens."""
    held, config = workspace_of(model), model.config.get_text_config(decoder=True)
    # Tensors of inference mode cannot be written outside it.
    key = (batch, model.dtype, model.device, torch.is_inference_mode_enabled())
    if held.cache is None or held.key != key or held.length < length:
        held.empty()
        held.length = held.lengths[key] = max(rounded(length), held.lengths.get(key, 0))
        cache = StaticCache(config=config, max_cache_len=held.length)
        if not is_fixed(cache):
            return cache
        held.key, held.cache = key, cache
    for layer in held.cache.layers:
        if layer.is_initialized:
            # Empty for whoever asks, so that the prompt is attended to causally, without a mask.
            layer.is_initialized = False
            layer.lazy_initialization = partial(_begin_again, layer)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = 0
    return held.cache


def _begin_again(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """Initialise a layer that has its memory."""
    for tensor in (layer.keys, layer.values, layer.cumulative_length):
        tensor.zero_()
    layer.is_initialized = True


def fixed_step(
    model: Any, cache: Any, found: FixedInputs, prompt: Tensor, limit: int, eos: Tensor | None, pad: Tensor | None
) -> FixedStep:
    """A step that begins with what `steps.fixed_inputs` found: in the memory of the last call, if it had the kept
    cache and inputs of the same shapes."""
    held = workspace_of(model)
    # Of the cache's length, so that calls with the same cache have the same shapes.
    longest = max(layer.max_cache_len for layer in cache.layers)
    width = rounded(max(limit, prompt.shape[1] - found.seen + longest + 1))
    if cache is held.cache:
        width = rounded(held.length + 1)
    shapes = (width, ends_in(eos), found.windowed, _shapes(found.inputs))
    if cache is held.cache and held.step is not None and held.shapes == shapes:
        held.step.sequences.begin(prompt, eos, pad)
        held.step.begin(found)
        return held.step
    step = FixedStep(model, cache, found, Sequences(prompt, width, eos, pad))
    if cache is held.cache:
        held.step, held.shapes = step, shapes
    return step


def _shapes(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """What distinguishes inputs: shapes of tensors, and other values."""
    flat: list[Any] = []
    for name, value in sorted(inputs.items()):
        if isinstance(value, dict):
            flat.append((name, tuple(sorted((key, each.shape, str(each.dtype)) for key, each in value.items()))))
        elif isinstance(value, Tensor):
            flat.append((name, value.shape, value.dtype))
        elif isinstance(value, (bool, int, float, str, type(None))):
            flat.append((name, value))
    return tuple(flat)
