"""Weights of other engines' layouts in float64, read off each format's definition one element at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Even columns of eight first: nibble i of a word holds column EVEN_FIRST[i].
EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]


def stream(words: Tensor, bits: int) -> list[int]:
    """The fields of consecutive words, read as one number of which the first field is least significant."""
    number = int.from_bytes(words.contiguous().view(torch.uint8).numpy().tobytes(), "little")
    count = words.nbytes * 8 // bits
    return [number >> i * bits & (1 << bits) - 1 for i in range(count)]


def affine(q: Sequence[Sequence[int]], zero: Tensor, scale: Tensor, group: Sequence[int]) -> Tensor:
    """``(q - zero) * scale`` in float64: q [N][K], zero and scale [N, G], the group of each column."""
    index = torch.tensor(list(group))
    return (torch.tensor(q).double() - zero.double()[:, index]) * scale.double()[:, index]


def groups(k: int, group_size: int) -> list[int]:
    return [0 if group_size == -1 else column // group_size for column in range(k)]


def gptq(t: dict[str, Tensor], bits: int, version: str) -> Tensor:
    n = t["scales"].shape[1]
    q = [stream(t["qweight"][:, row], bits) for row in range(n)]
    zero = torch.tensor([stream(words, bits)[:n] for words in t["qzeros"]]).t() + (version == "gptq")
    return affine(q, zero, t["scales"].t(), t["g_idx"].tolist())


def awq_gemm(t: dict[str, Tensor], group_size: int) -> Tensor:
    def columns(words: Tensor) -> Tensor:
        fields = [stream(row, 4) for row in words]
        n = len(fields[0])
        return torch.tensor([[row[8 * (c // 8) + EVEN_FIRST.index(c % 8)] for c in range(n)] for row in fields]).t()

    q = columns(t["qweight"])
    return affine(q.tolist(), columns(t["qzeros"]), t["scales"].t(), groups(q.shape[1], group_size))


def awq_gemv(t: dict[str, Tensor], group_size: int) -> Tensor:
    q = [stream(row, 4) for row in t["qweight"]]
    zero = torch.tensor([stream(row, 4) for row in t["qzeros"]])
    return affine(q, zero, t["scales"], groups(len(q[0]), group_size))


def awq_gemv_fast(t: dict[str, Tensor], group_size: int) -> Tensor:
    """``q s + o``: rows by fours, columns by 64; in 32 columns pairs of every eighth, then evens before odds in 8."""
    words = t["qweight"]
    n, k = 4 * words.shape[0], words.shape[1]
    pairs = [8 * eighth + 2 * pair + e for pair in range(4) for eighth in range(4) for e in range(2)]
    assert pairs[:10] == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    order = [pairs[8 * (i // 8) + EVEN_FIRST[i % 8]] for i in range(32)]
    q = [[-1] * k for _ in range(n)]
    for four, row in enumerate(words):
        fields = stream(row, 4)
        for place, value in enumerate(fields):
            tile, inside = divmod(place, 4 * 64)
            r, column = divmod(inside, 64)
            q[4 * four + r][64 * tile + 32 * (column // 32) + order[column % 32]] = value
    index = torch.tensor(groups(k, group_size))
    scale, offset = t["scales"].t().double()[:, index], t["qzeros"].t().double()[:, index]
    return torch.tensor(q).double() * scale + offset


def marlin(t: dict[str, Tensor], bits: int, group_size: int) -> Tensor:
    """By the tables of indices that Marlin's packers apply: to tiles of 16 x 64, to scales, to zero points."""
    tiles, (groups_here, n) = t["B"].shape[0], t["s"].shape
    k, interleave = 16 * tiles, EVEN_FIRST if bits == 4 else [0, 2, 1, 3]
    table = []
    for lane in range(32):
        rows = [2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4) + 8, 2 * (lane % 4) + 9]
        fragment = [16 * row + lane // 4 + 8 * half for half in range(2) for row in rows]
        table += [256 * tile + place for tile in range(4) for place in fragment]
    size = len(interleave)
    table = [table[size * (i // size) + interleave[i % size]] for i in range(1024)]
    w = torch.full((k, n), -1)
    for tile in range(tiles):
        for place, value in enumerate(stream(t["B"][tile], bits)):
            chunk, inside = divmod(place, 1024)
            sixteen, spot = divmod(table[inside], 256)
            w[16 * tile + spot // 16, 64 * chunk + 16 * sixteen + spot % 16] = value
    many = [i + 8 * j for i in range(8) for j in range(8)]
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = many if group_size != -1 and group_size < k else single
    scale = _gathered(t["s"], order)
    zero = torch.full((groups_here, n), 1 << (bits - 1))
    if "qzeros" in t:
        fields = torch.tensor([stream(row, bits) for row in t["qzeros"]])
        zero = _gathered(_gathered(fields, interleave), many)
    columns = t["g_idx_sort_indices"].long() if "g_idx_sort_indices" in t else torch.arange(k)
    dense = torch.empty(n, k, dtype=torch.float64)
    dense[:, columns] = affine(w.t().tolist(), zero.t(), scale.t(), groups(k, group_size))
    return dense


def _gathered(stored: Tensor, order: list[int]) -> Tensor:
    """What was stored as ``stored[…, i] = value[…, order[i]]``, chunk by chunk."""
    chunks = stored.reshape(stored.shape[0], -1, len(order))
    values = torch.empty_like(chunks)
    values[..., order] = chunks
    return values.reshape(stored.shape)


def compressed(t: dict[str, Tensor], bits: int, group_size: int) -> Tensor:
    """Packed along K; zero points along N."""
    n, k = t["weight_shape"].tolist()
    q = [stream(row, bits)[:k] for row in t["weight_packed"]]
    zero = torch.full(t["weight_scale"].shape, 1 << (bits - 1))
    if "weight_zero_point" in t:
        zero = torch.tensor([stream(column, bits)[:n] for column in t["weight_zero_point"].t()]).t()
    group = t["weight_g_idx"].tolist() if "weight_g_idx" in t else groups(k, group_size)
    return affine(q, zero, t["weight_scale"], group)
