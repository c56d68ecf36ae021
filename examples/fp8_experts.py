"""A mixture of experts in FP8, as DeepSeek-V3 has it: one grouped product for all experts, tokens sorted by expert.

    python examples/fp8_experts.py

`Experts` is a float layer as one might write it, a loop over experts. `Fp8Experts` computes the same in FP8: weights
with a scale per 128 x 128, activations with a scale per 128 of a token, and two launches whatever the number of
experts. A model of transformers needs none of this: `epiloq.quantize_(model, "fp8-block")` does it (docs/guide/moe.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import epiloq


class Experts(nn.Module):
    """``sum over the k best experts e of p_e * down_e(silu(gate_e(x)) * up_e(x))``."""

    def __init__(self, experts: int, hidden: int, intermediate: int, k: int) -> None:
        super().__init__()
        self.experts, self.k = experts, k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, intermediate) / intermediate**0.5)

    def forward(self, x: Tensor) -> Tensor:
        chance, chosen = self.router(x).softmax(-1).topk(self.k)
        out = torch.zeros_like(x)
        for expert in range(self.experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ self.gate_up[expert].T).chunk(2, -1)
            out[token] += chance[token, place, None] * ((functional.silu(gate) * up) @ self.down[expert].T)
        return out


class Fp8Experts(nn.Module):
    """The same in FP8. The router stays in floating point."""

    def __init__(self, source: Experts) -> None:
        super().__init__()
        self.experts, self.k, self.router = source.experts, source.k, source.router
        self.gate_up = epiloq.nn.Fp8BlockExperts.from_weight(source.gate_up.detach())
        self.down = epiloq.nn.Fp8BlockExperts.from_weight(source.down.detach())

    def forward(self, x: Tensor) -> Tensor:
        chance, chosen = self.router(x).softmax(-1).topk(self.k)
        # One row per token and chosen expert, sorted by expert; `ends` says where each expert's rows end.
        expert_of_row = chosen.flatten()
        order = expert_of_row.argsort(stable=True)
        ends = torch.bincount(expert_of_row, minlength=self.experts).cumsum(0).to(torch.int32)
        rows = x[order // self.k]
        gate, up = self.gate_up(rows, offs=ends).chunk(2, -1)
        result = self.down(functional.silu(gate) * up, offs=ends)
        out = torch.zeros_like(x)
        return out.index_add_(0, order // self.k, chance.flatten()[order, None].to(x.dtype) * result)


@torch.no_grad()
def main() -> float:
    """The FP8 layer's relative error, printed."""
    torch.manual_seed(0)
    layer = Experts(experts=8, hidden=256, intermediate=384, k=2)
    quantized = Fp8Experts(layer)
    x = torch.randn(50, 256)
    expected, found = layer(x), quantized(x)
    error = ((found - expected).norm() / expected.norm()).item()
    print(f"relative error {error:.3f}")

    # The product underneath, with the tensors in hand: scales as `quantize_fp8` gives them, transposed as weights are.
    weight = quantized.gate_up.weight_q.view(torch.float8_e4m3fn)  # float8 [E, N, K]
    scale = quantized.gate_up.weight_scale_inv  # float32 [E, N / 128, K / 128]
    a, scale_a = epiloq.quantize_fp8(x, granularity="group")  # [M, K], [M, K / 128]
    ends = torch.tensor([7, 7, 20, 20, 31, 40, 49, 50], dtype=torch.int32)  # experts 1 and 3 have no rows
    y = epiloq.grouped_mm(a, weight.mT, scale_a, scale.mT, offs=ends)
    kernel = epiloq.explain("grouped_mm", a, weight.mT, scale_a, scale.mT, offs=ends)
    print(f"{tuple(y.shape)} {y.dtype} by: {kernel}")
    return error


if __name__ == "__main__":
    main()
