"""Whether torch records a program."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

_tracing_state = torch._C._get_tracing_state


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` records a program."""
    return _tracing_state() is not None


def is_exporting() -> bool:
    """Whether `torch.export` or `torch.jit.trace` records a program, which is to hold for other inputs as well.

    Before torch 2.13, `torch.compiler.is_exporting` is true in every graph that `torch.compile` makes.
    """
    return _tracing_state() is not None or (is_compiling() and _exports())


def _exports() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Without Dynamo (strict=False), or with it.
    return torch.compiler._is_exporting_flag or bool(InstructionTranslator.current_tx().output.export)


# Evaluated while tracing, as `is_batch_invariant`.
_exports._dynamo_marked_constant = True  # type: ignore[attr-defined]
