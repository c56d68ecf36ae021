"""Triton kernels that read memory once and store nothing. Imported only for a CUDA device."""

# Triton is absent where mypy runs, untyped elsewhere, and refuses annotations that are not its own.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

# Words per block, warps, resident programs per SM (0: one program per block).
VARIANTS = (
    (1024, 4, 0),
    (2048, 4, 0),
    (4096, 4, 0),
    (4096, 8, 0),
    (8192, 8, 0),
    (2048, 4, 8),
    (4096, 4, 4),
    (8192, 8, 2),
)


@triton.jit
def _read(x, out, blocks, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        words = tl.load(x + block * BLOCK + lanes)
        # The mask is never true, but the compiler cannot know: nothing is stored, and no load is eliminated.
        tl.store(out + lanes, words, mask=words == -1)


def readers(device: torch.device) -> dict[str, Any]:
    """Name -> (tensor -> call). Tensors hold whole blocks of non-negative fp32 numbers, whose bits are never -1."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(max(block for block, _, _ in VARIANTS), dtype=torch.int32, device=device)

    def bind(block: int, warps: int, resident: int, x: torch.Tensor) -> partial[Any]:
        blocks = x.nbytes // (4 * block)
        programs = min(blocks, processors * resident) if resident else blocks
        return partial(_read[(programs,)], x.view(torch.int32), out, blocks, block, num_warps=warps)

    return {
        f"triton {block}x{warps}x{resident}": partial(bind, block, warps, resident)
        for block, warps, resident in VARIANTS
    }
