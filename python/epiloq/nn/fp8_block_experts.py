"""Fp8BlockExperts: the linear layers of a mixture of experts, FP8 weights in blocks and activations in groups."""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.nn.prepared_linear import FLOAT_DTYPES, FP8_BLOCK, K_MULTIPLE, N_MULTIPLE, PreparedLinear


class Fp8BlockExperts(PreparedLinear):
    """``y[i] = x[i] W[e]^T`` for the expert e of each row i: `Fp8BlockLinear` with a weight for each expert, no bias.

    For inference. The experts' rows come in one of two forms, as of ``epiloq.grouped_mm``: `x` ``[M, in_features]``
    sorted by expert with `offs`, int32 ``[E]``, the ends of the experts' rows; or `x` ``[E, M, in_features]`` with
    `masked_m`, int32 ``[E]``, how many of each expert's rows count. On a GPU neither is read back. `y` is contiguous,
    in the dtype of `x` (float32, float16 or bfloat16), and holds anything in rows that belong to no expert.

    Buffers, as the state dict holds them (E = experts, N = out_features, K = in_features):
        weight            float8_e4m3fn [E, N, K], W / scale rounded to nearest, ties to even
        weight_scale_inv  float32 [E, ceil(N / 128), ceil(K / 128)], max|W| / 448 of the block, at least 2^-126
    In memory N is rounded up to 8 and K to 16, with zeros.
    """

    WEIGHT_DTYPE = torch.float8_e4m3fn

    weight_scale_inv: Tensor

    def __init__(
        self, experts: int, in_features: int, out_features: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__(in_features, out_features)
        if experts < 1:
            raise ValueError(f"Fp8BlockExperts: experts: expected at least 1, got {experts}")
        self.experts = experts
        shape, blocks = (
            (experts, out_features, in_features),
            (-(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK)),
        )
        self._hold("weight", shape, (1, N_MULTIPLE, K_MULTIPLE), self.WEIGHT_DTYPE, device)
        self._hold("weight_scale_inv", (experts, *blocks), (1, 1, 1), torch.float32, device)

    @classmethod
    @torch.no_grad()
    def from_weight(cls, weight: Tensor) -> Fp8BlockExperts:
        """Quantise float weights ``[E, N, K]`` (left as they are) to the nearest FP8 ones, on their device.

        Raises ValueError for what is not float32, float16 or bfloat16 of three dimensions.
        """
        if weight.dim() != 3 or weight.dtype not in FLOAT_DTYPES:
            expected = ", ".join(map(str, FLOAT_DTYPES))
            raise ValueError(
                f"Fp8BlockExperts: weight: expected [E, N, K] of {expected}, got {list(weight.shape)} of {weight.dtype}"
            )
        experts, n, k = weight.shape
        layer = cls(experts, k, n, device=weight.device)
        if not weight.is_meta:
            for expert, values in enumerate(weight):
                q, scale = epiloq.quantize_fp8(values.contiguous(), granularity="block", pad_to=K_MULTIPLE)
                layer.weight[expert, :n] = q
                layer.weight_scale_inv[expert] = scale
        return layer

    def forward(self, x: Tensor, *, offs: Tensor | None = None, masked_m: Tensor | None = None) -> Tensor:
        self._check_width(x)
        x = x if x.stride(-1) == 1 else x.contiguous()
        q, scale = epiloq.quantize_fp8(x, granularity="group", scale_layout="column", pad_to=K_MULTIPLE)
        y = epiloq.grouped_mm(
            q, self.weight.mT, scale, self.weight_scale_inv.mT, offs=offs, masked_m=masked_m, out_dtype=x.dtype
        )
        return y[..., : self.out_features].contiguous()

    def extra_repr(self) -> str:
        return f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
