"""Statistics of a layer's inputs, accumulated batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq.weights.rounding import check_finite

# For a mixture of random experts that see 2, 16 and 64 tokens, values from 4 to 64 helped equally; with thousands of
# tokens the prior has no effect.
PRIOR_TOKENS = 16


class InputStatistics:
    """Streaming statistics over tokens of ``[…, K]`` inputs; products are summed in `dtype`, float32 or float64.

    Reading a statistic raises ValueError if an input was NaN or infinite.

    weightings
        Number of additional weights of each token (see `guide.token_weights`); each yields its own Hessian.
    """

    def __init__(
        self,
        channels: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        weightings: int = 0,
    ) -> None:
        self.tokens = 0
        self._weighted = torch.zeros(weightings, channels, channels, dtype=dtype, device=device)
        self._products = torch.zeros(channels, channels, dtype=dtype, device=device)
        self._magnitudes = torch.zeros(channels, dtype=torch.float64, device=device)
        self._amax = torch.zeros(channels, device=device)

    @torch.no_grad()
    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; `weights` is ``[tokens, weightings]``, if there are any.

        Raises ValueError if their number of tokens differs.
        """
        x = x.reshape(-1, x.shape[-1])
        if not x.numel():
            return
        wide = x.to(self._products.dtype)
        self._products.addmm_(wide.t(), wide)
        if len(self._weighted):
            expected = [x.shape[0], len(self._weighted)]
            if weights is None or list(weights.shape) != expected:
                got = None if weights is None else list(weights.shape)
                raise ValueError(f"InputStatistics: weights: expected {expected}, a row for each token, got {got}")
            for products, weight in zip(self._weighted, weights.to(wide).unbind(1), strict=True):
                products.addmm_((wide * weight[:, None]).t(), wide)
        magnitudes = x.float().abs()
        self._magnitudes += magnitudes.sum(0)  # in float32 within a batch, since float64 would take nine times as long
        self._amax = torch.maximum(self._amax, magnitudes.amax(0))
        self.tokens += x.shape[0]

    @torch.no_grad()
    def merge(self, other: InputStatistics) -> None:
        """Add statistics of other batches, if any."""
        if other.tokens:
            self._products += other._products
            self._weighted += other._weighted
            self._magnitudes += other._magnitudes
            self._amax = torch.maximum(self._amax, other._amax)
            self.tokens += other.tokens

    @torch.no_grad()
    def divide(self, scale: Tensor) -> None:
        """Account for a division of the inputs' channels by ``scale`` [K]."""
        self._products /= torch.outer(scale, scale)
        self._weighted /= torch.outer(scale, scale)
        self._magnitudes /= scale
        self._amax /= scale

    def check_finite(self) -> None:
        """Raise ValueError if any input or weight was NaN or infinite, or so large that a sum of squares overflows.

        Only diagonals are read: no other sum of products can be larger than both of its channels' sums of squares.
        """
        check_finite("inputs", self._products.diagonal())
        check_finite("weighted inputs", self._weighted.diagonal(dim1=1, dim2=2))

    @property
    def hessian(self) -> Tensor:
        """``2/n sum x x^T`` ``[K, K]`` over n tokens: the second derivative of a row's squared output error."""
        check_finite("inputs", self._products)
        return self._products * (2 / max(self.tokens, 1))

    @property
    def mean_abs(self) -> Tensor:
        """The mean magnitude of each channel, float32 ``[K]``."""
        check_finite("inputs", self._magnitudes)
        return (self._magnitudes / max(self.tokens, 1)).float()

    @property
    def shrunk(self) -> tuple[Tensor, Tensor]:
        """`hessian` and `mean_abs`, shrunk towards a prior of `PRIOR_TOKENS` tokens with independent channels of
        average magnitude.

        Without it, the weight of an expert that few tokens reached would fit these tokens and be worse for all others.
        """
        hessian, mean_abs = self.hessian, self.mean_abs
        share = PRIOR_TOKENS / (self.tokens + PRIOR_TOKENS)
        square, size = (hessian.diagonal().mean(), mean_abs.mean()) if self.tokens else (2.0, 1.0)
        hessian.mul_(1 - share).diagonal().add_(share * square)  # `hessian` is a copy
        return hessian, mean_abs * (1 - share) + share * size

    @property
    def weighted(self) -> Tensor:
        """`hessian` for each weighting, ``[weightings, K, K]``, in any scale, shrunk as `shrunk` is.

        A weighting in which all tokens have weight 0 yields the Hessian of `shrunk`.
        """
        check_finite("weighted inputs", self._weighted)
        plain, _ = self.shrunk
        share = PRIOR_TOKENS / (self.tokens + PRIOR_TOKENS)
        found = []
        for products in self._weighted:
            size = products.diagonal().mean()
            if not size > 0:
                found.append(plain)
                continue
            hessian = products * ((1 - share) / size)
            hessian.diagonal().add_(share)
            found.append(hessian)
        return torch.stack(found)

    @property
    def amax(self) -> Tensor:
        """The largest magnitude in each channel, float32 ``[K]``."""
        check_finite("inputs", self._amax)
        return self._amax
