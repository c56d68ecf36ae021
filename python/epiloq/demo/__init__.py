"""The demonstration: a real language model, quantised by each scheme, measured beside the original."""

from __future__ import annotations


class DemoError(RuntimeError):
    """The demonstration cannot go on, for a reason that its user can mend; the message says how."""
