"""Speed of a language model in prefill and decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFILL_REPEATS = 5
DECODE_PROMPT = 64
DECODE_STEPS = 24
WARM_UPS = 2
BUDGET_S = 6.0


@dataclass(frozen=True)
class Speed:
    """Tokens per second for one sequence, and their ratios to a baseline timed alternately with the model.

    Even on a busy machine the ratios are meaningful, unlike those of figures measured minutes apart.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_speedup: float
    decode_speedup: float


def median_seconds(calls: Sequence[Callable[[], Any]], repeats: int, wait: Callable[[], None]) -> list[float]:
    """Median duration of each call in seconds including the device's work; calls alternate, after a warm-up.

    Stops after at least one repeat once BUDGET_S is spent, as bf16 is very slow on CPUs without instructions for it.
    """
    rounds: list[list[float]] = []
    begin = time.perf_counter()
    while len(rounds) < WARM_UPS + repeats and (len(rounds) <= WARM_UPS or time.perf_counter() - begin < BUDGET_S):
        rounds.append([seconds(call, wait) for call in calls])
    return [statistics.median(column) for column in zip(*rounds[WARM_UPS:], strict=True)]


def seconds(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Duration of one call in seconds, with the device idle before and after."""
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def prefill(model: nn.Module, prompt: Tensor) -> Callable[[], None]:
    """Return a call that processes the whole prompt; as in a server, only the last position's logits are computed."""
    return lambda: model(prompt, use_cache=True, logits_to_keep=1)


def decode(model: nn.Module, prompt: Tensor) -> Callable[[], None]:
    """Return a call that generates one token greedily with a key-value cache, after the prompt's first tokens."""
    from epiloq.models.cache_argument import cache_argument

    state, name = model(prompt[:, :DECODE_PROMPT], use_cache=True, logits_to_keep=1), cache_argument(model)

    def step() -> None:
        nonlocal state
        token = state.logits[:, -1:].argmax(-1)
        state = model(token, use_cache=True, logits_to_keep=1, **{name: state[name]})

    return step


def measure(model: nn.Module, baseline: nn.Module, prompt: Tensor) -> Speed:
    """Measure a model's speed for an int64 [1, n] prompt, alternately with a baseline on the same device."""
    import torch

    device = next(model.parameters()).device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    prompt = prompt.to(device)
    models = [model] if baseline is model else [model, baseline]
    with torch.inference_mode():
        prefills = median_seconds([prefill(each, prompt) for each in models], PREFILL_REPEATS, wait)
        decodes = median_seconds([decode(each, prompt) for each in models], DECODE_STEPS, wait)
    return Speed(
        prefill_tokens_per_s=prompt.numel() / prefills[0],
        decode_tokens_per_s=1 / decodes[0],
        prefill_speedup=prefills[-1] / prefills[0],
        decode_speedup=decodes[-1] / decodes[0],
    )
