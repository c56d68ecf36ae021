"""Routing of tokens to experts: the choice and its weights, sorted rows and their weighted sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
from epiloq.ops.experts.few_rows import are_few
from epiloq.ops.experts.rows import combine_expert_rows, gather_expert_rows, sort_expert_rows
from epiloq.ops.experts.select_experts import select_experts

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Tokens, experts, experts per token, groups, kept groups, scores per group.
SIZES = [(1, 8, 2, 1, 1, 1), (5, 128, 8, 1, 1, 1), (3, 33, 32, 1, 1, 1), (17, 256, 8, 8, 4, 2), (2, 160, 6, 8, 3, 1)]
SIZES += [(4, 1, 1, 1, 1, 1), (0, 16, 4, 1, 1, 1), (9, 1024, 10, 32, 5, 2), (6, 500, 32, 4, 1, 2)]


def scores_of(logits: Tensor, score: str) -> Tensor:
    wide = logits.double()
    return wide.softmax(-1) if score == "softmax" else wide.sigmoid() if score == "sigmoid" else wide


def of_groups(values: Tensor, count: int) -> Tensor:
    """Values ``[T, groups]`` for each of `count` experts."""
    return values.repeat_interleave(count // values.shape[-1], -1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_choice(sizes: tuple[int, ...], score: str, dtype: torch.dtype, device: str, seed: int) -> None:
    """Each choice is at least as good as every expert left out, in float64 up to rounding, and so are the weights."""
    tokens, count, top_k, groups, top_groups, group_scores = sizes
    logits = (3 * torch.randn(tokens, count + 3, device=device)).to(dtype)[:, :count]  # with rows apart
    has_bias, normalize = torch.rand(2).gt(0.5).tolist()
    bias = torch.randn(count, device=device) if has_bias else None
    options = {"normalize": normalize, "epsilon": 1e-3, "factor": 2.5, "bias": bias, "score": score}
    options |= {"groups": groups, "top_groups": top_groups, "group_scores": group_scores}
    out = torch.float32 if torch.rand(()) < 0.5 else dtype
    weights, experts = select_experts(logits, top_k, **options, dtype=out)
    assert weights.dtype == out and weights.shape == experts.shape == (tokens, top_k)
    scores = scores_of(logits, score)
    choice = scores if bias is None else scores + bias.double()
    rounding = 1e-5 * (1 + choice.abs().amax(-1, keepdim=True) if tokens else 1)
    chosen = choice.gather(1, experts)
    assert (chosen.diff(dim=-1) <= rounding).all()  # in descending order
    mask = torch.zeros_like(choice, dtype=torch.bool).scatter_(1, experts, True)
    assert (mask.sum(-1) == top_k).all()
    group_size = count // groups
    group_choice = choice.unflatten(-1, (groups, group_size)).topk(group_scores, -1).values.sum(-1)
    last_kept = group_choice.topk(top_groups, -1).values[:, -1:]  # several groups may have this score
    used = mask.unflatten(-1, (groups, group_size)).any(-1)
    assert (used.sum(-1) <= top_groups).all()
    assert (group_choice + 2 * rounding >= last_kept)[used].all()
    kept = of_groups(used | (group_choice > last_kept + 2 * rounding), count)
    left = choice.masked_fill(mask | ~kept, -torch.inf)
    if tokens:
        assert (left.amax(-1) <= chosen[:, -1] + rounding[:, 0]).all()
    expected = scores.gather(1, experts)
    if score == "softmax_of_chosen":
        expected = expected.softmax(-1)
    if normalize:
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-3)
    torch.testing.assert_close(weights.double(), 2.5 * expected, rtol=max(1e-5, torch.finfo(out).eps), atol=1e-6)


def test_equal_scores_are_taken_in_order(device: str) -> None:
    logits = torch.zeros(2, 70, device=device)
    logits[1, 65] = 1
    _, experts = select_experts(logits, 4)
    assert experts.tolist() == [[0, 1, 2, 3], [65, 0, 1, 2]]


def test_equal_groups_are_taken_in_order(device: str) -> None:
    logits = torch.zeros(2, 64, device=device)
    logits[1, 50:52] = 1
    _, experts = select_experts(logits, 20, groups=4, top_groups=2, group_scores=2)
    assert experts[0].tolist() == list(range(20))
    assert experts[1].tolist() == [50, 51, *range(16), 48, 49]


def test_not_a_number_and_infinities(device: str) -> None:
    """Masked experts come last, and the others' weights are right; a row with NaN has NaN weights and valid numbers."""
    logits = torch.full((2, 40), -torch.inf, device=device)
    logits[0, 7], logits[0, 30] = 2.0, 1.0
    logits[1] = torch.nan
    weights, experts = select_experts(logits, 3)
    assert experts[0].tolist() == [7, 30, 0]
    torch.testing.assert_close(weights[0].cpu(), torch.tensor([2.0, 1.0, -torch.inf]).softmax(-1))
    assert weights[1].isnan().all() and len(set(experts[1].tolist())) == 3


@pytest.mark.parametrize(
    "tokens,top_k,count",
    [
        (1, 8, 128),
        (16, 8, 128),
        (64, 8, 256),
        (7, 1, 3),
        (0, 4, 8),
        (40, 3, 1024),
        (2048, 8, 128),
        (1023, 16, 1024),
        (4097, 3, 511),
        (500, 2, 1),
    ],
)
def test_sorted_rows(tokens: int, top_k: int, count: int, device: str, seed: int) -> None:
    experts = torch.randint(count, (tokens, top_k), device=device)
    if torch.rand(()) < 0.5:
        experts[torch.rand(tokens, top_k, device=device) < 0.3] = count  # of another process
    order, of_token, places, ends = sort_expert_rows(experts, count)
    flat = experts.flatten()
    expected = flat.argsort(stable=True)
    rows = torch.arange(tokens * top_k, device=device)
    assert torch.equal(order, expected)
    assert torch.equal(of_token, expected // top_k)
    assert torch.equal(places[order], rows)
    counts = torch.bincount(flat, minlength=count + 1)[:count]
    assert ends.dtype == torch.int32 and torch.equal(ends.long(), counts.cumsum(0))


MEASURES: list[dict[str, Any]] = [
    {},
    {"dtype": torch.int8, "pad_to": 16},
    {"dtype": torch.float8_e4m3fn, "pad_to": 16},
    {"dtype": torch.float8_e4m3fn, "granularity": "group", "scale_layout": "column", "pad_to": 16},
    {"dtype": torch.float8_e4m3fn, "granularity": "group", "group_size": 64, "pad_to": 32},
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("measure", MEASURES, ids=str)
@pytest.mark.parametrize(
    "tokens,top_k,count,width",
    [
        (1, 8, 128, 2048),
        (3, 2, 8, 40),
        (17, 4, 33, 2880),
        (128, 8, 256, 136),
        (341, 3, 5, 512),  # 1023 rows, the most but one that are counted
        (205, 5, 1024, 264),  # 1025
        (700, 8, 128, 1024),
        (2, 1, 1, 8192),
        (0, 4, 8, 64),
    ],
)
def test_gathered_rows(
    tokens: int,
    top_k: int,
    count: int,
    width: int,
    measure: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> None:
    """The same bits as quantising, sorting and gathering apart, of rows on 16 bytes or anywhere."""
    experts = torch.randint(count, (tokens, top_k), device=device)
    if torch.rand(()) < 0.5:
        experts[torch.rand(tokens, top_k, device=device) < 0.3] = -1 if torch.rand(()) < 0.5 else count
    shift, gap = (int(torch.randint(2, ())) * 8 + int(torch.randint(2, ())) for _ in range(2))
    x = torch.randn(tokens, width + shift + gap, device=device).to(dtype)[:, shift : shift + width]
    if tokens > 2:
        x[0, 1], x[1], x[2] = torch.nan, 0, x[2] * (1e-4 if dtype == torch.float16 else 1e-30)
    rows, scale, of_token, places, ends = gather_expert_rows(x, experts, count, **measure)
    _order, *expected = sort_expert_rows(experts, count)
    assert all(map(torch.equal, (of_token, places, ends), expected))
    valid = slice(0, int(ends[-1]))
    taken = x[of_token][valid]
    if not measure:
        assert rows.dtype == dtype and rows.shape == (tokens * top_k, width)
        assert torch.equal(rows[valid].view(torch.int16), taken.view(torch.int16))
        return
    options = {name: value for name, value in measure.items() if name != "dtype"}
    if measure["dtype"] == torch.int8:
        q, wanted, _ = epiloq.quantize_int8(taken, **options)
    else:
        q, wanted = epiloq.quantize_fp8(taken, **({"granularity": "token"} | options))
    assert rows.dtype == q.dtype and rows.shape == (tokens * top_k, q.shape[1])
    assert scale.shape == (tokens * top_k, wanted.shape[1])
    assert torch.equal(rows[valid].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(scale[valid].nan_to_num(7.0), wanted.nan_to_num(7.0))
    by_column = measure.get("scale_layout") == "column"
    assert tokens == 0 or scale.stride(0 if by_column else 1) == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "tokens,top_k,width", [(1, 8, 2048), (5, 3, 33), (16, 9, 264), (0, 2, 8), (3, 1, 1000), (2, 4, 0)]
)
def test_combined_rows(tokens: int, top_k: int, width: int, dtype: torch.dtype, device: str, seed: int) -> None:
    padding = int(torch.randint(2, ())) * 8
    rows = torch.randn(tokens * top_k, width + padding, device=device).to(dtype)[:, :width]
    places = torch.randperm(tokens * top_k, device=device)
    weights = torch.rand(tokens, top_k, device=device)
    weights = weights if torch.rand(()) < 0.5 else weights.to(dtype)
    wanted = rows.double()
    count = None
    if torch.rand(()) < 0.5:
        valid = tokens * top_k // 2
        count = torch.tensor([valid], dtype=torch.int32, device=device)
        rows[valid:] = torch.nan
        wanted = wanted.clone()
        wanted[valid:] = 0
    y = combine_expert_rows(rows, places, weights, count)
    expected = (wanted[places].view(tokens, top_k, width) * weights.double().unsqueeze(-1)).sum(1)
    magnitude = (wanted[places].view(tokens, top_k, width).abs() * weights.double().unsqueeze(-1)).sum(1)
    bound = torch.finfo(dtype).eps / 2 * expected.abs() + 2.0**-20 * magnitude + torch.finfo(dtype).tiny
    assert y.dtype == dtype and (y.double() - expected).abs().le(bound).all()


@pytest.mark.parametrize(
    "argument,changed",
    [
        ("logits", {"logits": torch.zeros(2, 8, 3)}),
        ("logits", {"logits": torch.zeros(2, 8, dtype=torch.int32)}),
        ("top_k", {"top_k": 9}),
        ("top_k", {"top_k": 0}),
        ("score", {"score": "max"}),
        ("bias", {"bias": torch.zeros(7)}),
        ("groups", {"groups": 3}),
        ("top_groups", {"groups": 4, "top_groups": 5}),
        ("top_groups", {"groups": 4, "top_groups": 1, "top_k": 3}),
        ("group_scores", {"groups": 4, "top_groups": 2, "group_scores": 3}),
        ("weights", {"dtype": torch.float16}),
    ],
)
def test_invalid_choices_are_refused(argument: str, changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {"logits": torch.zeros(2, 8), "top_k": 2} | changed
    with pytest.raises(ValueError, match=rf"epiloq\.select_experts: {argument}: expected"):
        select_experts(**given)


def test_invalid_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"epiloq\.sort_expert_rows: experts: expected at most 16384 rows"):
        sort_expert_rows(torch.zeros(16385, 1, dtype=torch.int64), 8)
    with pytest.raises(ValueError, match=r"epiloq\.sort_expert_rows: experts: expected int64"):
        sort_expert_rows(torch.zeros(2, 1, dtype=torch.int32), 8)
    x, experts = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int64)
    for argument, given, options in (
        ("x", (x.float(), experts), {}),
        ("x", (x[:, :12], experts), {}),
        ("x", (x.expand(2, 2, 16), experts), {}),
        ("x", (torch.zeros(2, 8200, dtype=torch.half), experts), {}),
        ("experts", (x[:1], experts), {}),
        ("experts", (x, experts.int()), {}),
        ("granularity", (x, experts), {"dtype": torch.int8, "granularity": "group"}),
        ("group_size", (x, experts), {"dtype": torch.float8_e4m3fn, "granularity": "group", "group_size": 16}),
        ("rows", (x[:, :8], experts), {"dtype": torch.int8}),
    ):
        with pytest.raises(ValueError, match=rf"epiloq\.gather_expert_rows: {argument}: expected"):
            gather_expert_rows(*given, 4, **options)
    rows, places, weights = torch.zeros(4, 8), torch.arange(4), torch.ones(2, 2)
    for argument, given in (
        ("rows", (rows[:3], places, weights)),
        ("places", (rows, places[:3], weights)),
        ("weights", (rows, places, weights.half())),
        ("count", (rows, places, weights, torch.zeros(2, dtype=torch.int32))),
    ):
        with pytest.raises(ValueError, match=rf"epiloq\.combine_expert_rows: {argument}: expected"):
            combine_expert_rows(*given)


def test_when_rows_are_few() -> None:
    """Up to 64 rows always, and more as long as an expert's product takes less than its launch."""
    assert are_few(64, 10**6, 10**6, 5e9) and are_few(5e9 / (2048 * 1536), 2048, 1536, 5e9)
    assert not are_few(64.5, 10**6, 10**6, 5e9) and not are_few(5.1e9 / (2048 * 1536), 2048, 1536, 5e9)
