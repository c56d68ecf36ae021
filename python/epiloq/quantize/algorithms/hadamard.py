"""Orthogonal matrices that spread each channel over all: Hadamard if one is known, otherwise random."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor | None:
    """A matrix of 1 and -1 with orthogonal rows, float64 ``[size, size]``; None if no construction here has one.

    Paley's first and second construction for primes, doubled as often as needed (Sylvester): all powers of two times
    1, 12, 20, 28, 36, 44, 60, …, which covers nearly all hidden sizes of models.
    """
    if size < 1:
        raise ValueError(f"hadamard: size: expected at least 1, got {size}")
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if size == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    if size % 4:
        return None
    if (size - 1) % 4 == 3 and _is_prime(size - 1):
        return _paley_first(size - 1)
    if (size // 2 - 1) % 4 == 1 and _is_prime(size // 2 - 1):
        return _paley_second(size // 2 - 1)
    half = hadamard(size // 2)
    return None if half is None else torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), half)


def rotation(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix, float64 ``[size, size]``: Hadamard with random signs, or uniformly distributed."""
    known = hadamard(size)
    if known is None:
        q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
        found: Tensor = q * r.diagonal().sign()
        return found
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    return signs * known / math.sqrt(size)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def _residues(prime: int) -> Tensor:
    """Jacobsthal's matrix: at i, j whether i - j is a square modulo the prime, 1 or -1; 0 on the diagonal."""
    character = -torch.ones(prime, dtype=torch.float64)
    character[torch.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    numbers = torch.arange(prime)
    return character[(numbers[:, None] - numbers) % prime]


def _paley_first(prime: int) -> Tensor:
    found = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    found[0, 1:], found[1:, 0], found[1:, 1:] = 1, -1, _residues(prime)
    return found + torch.eye(prime + 1, dtype=torch.float64)


def _paley_second(prime: int) -> Tensor:
    conference = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    conference[0, 0], conference[1:, 1:] = 0, _residues(prime)
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(conference, plus) + torch.kron(torch.eye(prime + 1, dtype=torch.float64), minus)
