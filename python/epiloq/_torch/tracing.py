"""Whether torch traces a program."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling


def is_exporting() -> bool:
    """Whether `torch.export` traces. Before torch 2.13, `torch.compiler.is_exporting` is true in every graph that
    `torch.compile` makes."""
    return is_compiling() and _exports()


def _exports() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Without Dynamo (strict=False), or with it.
    return torch.compiler._is_exporting_flag or bool(InstructionTranslator.current_tx().output.export)


# Evaluated while tracing, as `is_batch_invariant`.
_exports._dynamo_marked_constant = True  # type: ignore[attr-defined]
