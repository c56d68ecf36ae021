"""Calibration text: files, folders and lists, cut by the tokenizer, sampled with a fixed seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from epiloq.quantize.text import read_texts, sample, windows
from tiny_teacher import save


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return transformers.AutoTokenizer.from_pretrained(save(tmp_path_factory.mktemp("teacher") / "tiny"))


def test_a_file_a_folder_and_a_list_are_alike(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.md").write_text("first é", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c").write_text("third")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert read_texts(tmp_path) == ["first é", "second", "third"]
    assert read_texts(str(tmp_path / "b.txt")) == ["second"]
    assert read_texts(["first é", "", "second", "third"]) == read_texts(tmp_path)


def test_windows_are_the_text_in_order(tokenizer: Any) -> None:
    texts = ["abcdefg" * 10, "xy", "z"]
    found = windows(tokenizer, texts, 16)
    assert [window.shape for window in found] == [(1, 16)] * 4 + [(1, 6), (1, 2)]
    assert all(window.dtype == torch.int64 for window in found)
    tokens = [token for window in found[:5] for token in window[0].tolist()]
    assert tokens == tokenizer(texts[0])["input_ids"]


def test_the_tokenizer_frames_each_window(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "[UNK]": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    framing = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    found = windows(framing, ["a " * 10], 6)
    assert [window.tolist()[0] for window in found] == [[0, 2, 2, 2, 2, 1]] * 2 + [[0, 2, 2, 1]]


def test_samples_are_full_windows_in_order_and_the_same_each_time(tokenizer: Any) -> None:
    found = windows(tokenizer, ["".join(chr(97 + i % 26) for i in range(1000))], 16)
    chosen = sample(found, 10)
    assert len(chosen) == 10 and all(window.shape == (1, 16) for window in chosen)
    positions = [next(i for i, window in enumerate(found) if window is one) for one in chosen]
    assert positions == sorted(positions)
    assert all(torch.equal(a, b) for a, b in zip(chosen, sample(found, 10), strict=True))
    assert [w.tolist() for w in sample(found, 10, seed=1)] != [w.tolist() for w in chosen]
    assert len(sample(found, 500)) == 62


def test_errors(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="nothing there"):
        read_texts(tmp_path / "absent")
    with pytest.raises(ValueError, match="found none"):
        read_texts(tmp_path)
    with pytest.raises(ValueError, match="found none"):
        read_texts([""])
    (tmp_path / "model.bin").write_bytes(b"\x00\xff\xfe")
    with pytest.raises(ValueError, match=r"model\.bin.*UTF-8"):
        read_texts(tmp_path)
    with pytest.raises(ValueError, match="two tokens"):
        windows(tokenizer, ["a"])
    with pytest.raises(ValueError, match="fast"):
        windows(object(), ["a"])
