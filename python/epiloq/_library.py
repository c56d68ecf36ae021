"""How operations reach torch: one library, and a way around its dispatcher where nothing needs it."""

from __future__ import annotations

import torch
from torch import Tensor

# define/impl rather than custom_op, which costs 10 us a call.
LIBRARY = torch.library.Library("epiloq", "DEF")

_PLAIN = (Tensor, torch.nn.Parameter)


def direct(*tensors: Tensor | None) -> bool:
    """True where a call may skip the dispatcher: plain tensors, and no compiler, mode, transform or gradient at work."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.requires_grad):
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )
