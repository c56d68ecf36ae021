"""Models of many structures over two processes, by transformers' plans: what one process computes and saves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import safetensors.torch

import biased_mixtures
import epiloq
import epiloq.integrations.transformers as integration
import other_mixtures
import tiny_mixtures
from gloo_ranks import Ranks

integration.unregister()
pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.usefixtures("epiloq_in_transformers"),
]


def tied() -> Any:
    """A head in floating point that is the embedding, both of which transformers shards."""
    return other_mixtures.made("Llama", tie_word_embeddings=True)


FAMILIES = {
    **other_mixtures.FAMILIES,
    **biased_mixtures.FAMILIES,
    "deepseek": tiny_mixtures.deepseek,
    "tied": tied,
}
NOT_ON_RANKS = ("muse_spark",)
"""Families whose embedding fails on several ranks in transformers 5.24, in floating point too."""
SUMS = {"layers.*.feed_forward": "all_reduce"}


@torch.no_grad()
def answer(model: Any) -> Tensor:
    return model(tiny_mixtures.TOKENS, use_cache=False)[0]  # type: ignore[no-any-return]


def saved(model: Any, folder: Path, **options: Any) -> type[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epiloq.quantize_(model, "w8a16", **options).save_pretrained(folder)
    return type(model)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}


def test_ranks_compute_and_save_what_one_process_does(seed: int, tmp_path: Path) -> None:
    kinds, expected = dict[str, type[Any]](), dict[str, Tensor]()
    for family in FAMILIES.keys() - NOT_ON_RANKS:
        try:
            made = FAMILIES[family]()
        except pytest.skip.Exception:
            continue
        if not made.tp_plan:  # which transformers refuses
            continue
        kinds[family] = saved(made, tmp_path / family)
        model = kinds[family].from_pretrained(tmp_path / family)
        expected[family] = answer(model)
        model.save_pretrained(tmp_path / f"{family}-one")

    def run(rank: int) -> None:
        for family, kind in kinds.items():
            model = kind.from_pretrained(tmp_path / family, tp_plan="auto")
            assert tiny_mixtures.error(answer(model), expected[family]) < 1e-4, family
            model.save_pretrained(tmp_path / f"{family}-two")

    Ranks(tmp_path, 2, run).check()
    for family in kinds:
        one, two = (tensors(tmp_path / f"{family}-{which}") for which in ("one", "two"))
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one), family


def test_experts_in_a_list_are_divided(seed: int, tmp_path: Path) -> None:
    """Also those of which a layer, or one layer's experts, stay in floating point."""
    left = {"some": ["*.1.feed_forward.experts.2.*"], "layer": ["*.1.feed_forward.experts.*"]}
    kind: Any = None
    for name, ignored in left.items():
        kind = saved(biased_mixtures.llama4(), tmp_path / name, ignore=ignored)
    expected = {name: answer(kind.from_pretrained(tmp_path / name)) for name in left}

    def run(rank: int) -> None:
        for name in left:
            model = kind.from_pretrained(tmp_path / name, tp_plan="auto")
            assert tiny_mixtures.error(answer(model), expected[name]) < 1e-4, name
            layer = model.get_submodule("model.layers.0.feed_forward.experts.3.down_proj")
            assert len(layer.shard.columns) == 48
            found = type(model.model.layers[1].feed_forward.experts) is type(model.model.layers[0].feed_forward.experts)
            assert found == (name == "some")

    Ranks(tmp_path, 2, run).check()


def test_what_is_quantised_in_part_is_refused(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over ranks of stacks that transformers shards, and of a quantised layer, which each rank has whole."""
    kind = saved(biased_mixtures.llama4(), tmp_path / "model", ignore=["*experts*"])
    config = transformers.Llama4TextConfig
    monkeypatch.setattr(config, "base_model_tp_plan", config.base_model_tp_plan | SUMS)

    def run(rank: int) -> None:
        expected = r"layers\.0\.feed_forward: expected all of its matrices quantised or none, .*experts\.down_proj"
        with pytest.raises(ValueError, match=expected):
            kind.from_pretrained(tmp_path / "model", tp_plan="auto")

    Ranks(tmp_path, 2, run).check()
