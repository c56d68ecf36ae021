"""Demonstration: a real language model, quantised by each scheme and compared with the original."""

from __future__ import annotations


class DemoError(RuntimeError):
    """The demonstration cannot continue; the message says what the user can do about it."""
