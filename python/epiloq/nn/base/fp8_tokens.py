"""FP8 activations of layers."""

from __future__ import annotations

from torch import Tensor

import epiloq
from epiloq.nn.base.prepared_linear import K_MULTIPLE


def fp8_tokens(
    x: Tensor, granularity: str, *, scale: Tensor | None = None, scale_layout: str = "row"
) -> tuple[Tensor, Tensor]:
    """Rows ``[…, M, K]`` quantised by `epiloq.quantize_fp8`, padded along K for the kernels.

    `eps` is passed although it is the default: ``torch.compile(dynamic=True)`` makes a symbol of a default, and fails
    where two functions with gradients, such as two layers, use it.
    """
    return epiloq.quantize_fp8(
        x, granularity=granularity, scale=scale, scale_layout=scale_layout, eps=0.0, pad_to=K_MULTIPLE
    )
