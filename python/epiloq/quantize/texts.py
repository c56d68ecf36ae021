"""Calibration and evaluation text of ``epiloq quantize``: read, divided into windows, refused if too short."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from epiloq.evaluation.text import first_tokens, load_tokenizer, place, read_documents, repeated, sample, windows
from epiloq.formats.io.architecture import positions, vocabulary
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.settings import Settings
from epiloq.quantize.targets import TARGETS

# The defaults of `epiloq eval`, so that both print the same figure.
EVALUATED_TOKENS, EVALUATED_LENGTH = 16384, 512
FEWEST, FEW = 256, 2048
"""Fewer tokens than this are refused, or cause a warning."""


@dataclass(frozen=True)
class Texts:
    """Windows of tokens for calibration and evaluation, and warnings about them, one sentence each."""

    calibration: list[Tensor]
    evaluation: list[Tensor]
    warnings: list[str]


def needs_text(settings: Settings) -> bool:
    """Whether a run needs text."""
    looks = settings.budget is not None or settings.tune > 0 or TARGETS[settings.scheme].static
    return looks or ALGORITHMS[settings.algorithm].needs_inputs


def read_windows(settings: Settings, source: Checkpoint) -> Texts:
    """Windows for calibration and evaluation, if requested.

    Raises ValueError: no text, no tokenizer, windows longer than the model has positions; unless the settings force
    it, too little text, or text for both.
    """
    texts = Texts([], [], [])
    calibration = settings.calibration if needs_text(settings) else None
    if calibration is not None:
        documents, tokenizer = read_documents(calibration), load_tokenizer(settings.model)
        cut = windows(tokenizer, [document.text for document in documents], settings.length)
        texts.calibration.extend(sample(cut, settings.count, settings.seed))
        check_positions(source, texts.calibration)
        texts.warnings.extend(too_little_to_calibrate(settings, texts.calibration))
    if settings.evaluation is not None:
        others, tokenizer = read_documents(settings.evaluation), load_tokenizer(settings.model)
        length = evaluated_length(source)
        found = windows(tokenizer, [document.text for document in others], length)
        texts.evaluation.extend(first_tokens(found, EVALUATED_TOKENS))
        texts.warnings.extend(too_little_to_evaluate(texts.evaluation, settings.force))
        repeat = repeated(texts.evaluation, texts.calibration)
        if repeat is not None:
            number = next(i for i, window in enumerate(cut) if window is texts.calibration[repeat.calibration[0]])
            here = place(tokenizer, others, length, *repeat.evaluation)
            there = place(tokenizer, documents, settings.length, number, repeat.calibration[1])
            message = f"evaluation text that calibration sees: {here}, is in {there}"
            if not settings.force:
                raise ValueError(f"{message}: give other text, or --force to use it anyway")
            texts.warnings.append(f"{message}; the perplexity will be too good")
    return texts


def too_little_to_calibrate(settings: Settings, found: Sequence[Tensor]) -> list[str]:
    """A warning, if any. Raises ValueError for fewer than `FEWEST` tokens, unless the settings force it."""
    tokens = tokens_in(found)
    message = f"only {tokens} calibration tokens ({len(found)} of {settings.count} windows)"
    if tokens < FEWEST and not settings.force:
        raise ValueError(f"{message}: expected at least {FEWEST}; give more text (--calibration), or --force")
    if tokens < FEW:
        return [f"{message}; results will be poor"]
    return [f"{message}; results may be poor"] if tokens < settings.count * settings.length / 2 else []


def too_little_to_evaluate(found: Sequence[Tensor], force: bool) -> list[str]:
    """A warning, if any. Raises ValueError for fewer than `FEWEST` tokens, unless forced."""
    tokens = tokens_in(found)
    if tokens < FEWEST and not force:
        raise ValueError(
            f"only {tokens} tokens to evaluate on: expected at least {FEWEST}, because a perplexity over fewer is "
            "unreliable; give more text, or --force"
        )
    return [f"perplexity over only {tokens} tokens; it will be inaccurate"] if tokens < FEW else []


def tokens_in(found: Sequence[Tensor]) -> int:
    """Total number of tokens of some windows."""
    return sum(window.numel() for window in found)


def evaluated_length(source: Checkpoint) -> int:
    """Number of tokens per evaluation window, limited by the model's number of positions."""
    return min(EVALUATED_LENGTH, positions(source) or EVALUATED_LENGTH)


def check_positions(source: Checkpoint, texts: Collection[Tensor]) -> None:
    """Raise ValueError for windows longer than the model's number of positions, or unknown tokens."""
    most, longest = positions(source), max(text.shape[1] for text in texts)
    if most is not None and longest > most:
        raise ValueError(
            f"{source.folder}: expected windows of at most {most} tokens, for which the model has positions, "
            f"got {longest} (--length)"
        )
    known, largest = vocabulary(source), max(int(text.max()) for text in texts)
    if known is not None and largest >= known:
        raise ValueError(
            f"{source.folder}: expected a tokenizer with ids below {known}, the model's vocab_size, got {largest}"
        )
