"""Speed of a language model: reading a prompt (prefill) and producing tokens one at a time (decode)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFILL_REPEATS = 5
DECODE_PROMPT = 64
DECODE_STEPS = 24
WARM_UPS = 2
BUDGET_S = 12.0


@dataclass(frozen=True)
class Speed:
    """Tokens per second for one sequence, from the median time."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def median_seconds(call: Callable[[], Any], repeats: int, wait: Callable[[], None]) -> float:
    """Median duration of a call in seconds, the device's work included, after warm-up calls.

    Fewer repeats, but at least one, once BUDGET_S is spent: bf16 is very slow on CPUs without instructions for it.
    """
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < WARM_UPS + repeats and (len(seconds) <= WARM_UPS or time.perf_counter() - begin < BUDGET_S):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UPS:])


def measure(model: nn.Module, prompt: Tensor) -> Speed:
    """Prefill of the whole int64 [1, n] prompt, and greedy decode with a key-value cache after its first tokens.

    As a server would, prefill computes logits for the last position only. Both are medians.
    """
    import torch

    device = next(model.parameters()).device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    prompt = prompt.to(device)
    with torch.inference_mode():

        def prefill() -> None:
            model(prompt, use_cache=True, logits_to_keep=1)

        prefill_seconds = median_seconds(prefill, PREFILL_REPEATS, wait)

        state = model(prompt[:, :DECODE_PROMPT], use_cache=True, logits_to_keep=1)

        def step() -> None:
            nonlocal state
            token = state.logits[:, -1:].argmax(-1)
            state = model(token, past_key_values=state.past_key_values, use_cache=True, logits_to_keep=1)

        step_seconds = median_seconds(step, DECODE_STEPS, wait)
    return Speed(prompt.numel() / prefill_seconds, 1 / step_seconds)
