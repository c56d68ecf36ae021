"""Calibration text: files, folders and lists, cut by the tokenizer, sampled with a fixed seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from epiloq.evaluation.text import Document, first_tokens, place, read_texts, repeated, sample, windows
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
    assert len(sample(found, 500)) == 63


def test_errors(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="found neither"):
        read_texts(tmp_path / "absent")
    with pytest.raises(ValueError, match="found none"):
        read_texts(tmp_path)
    with pytest.raises(ValueError, match="found none"):
        read_texts([""])
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"texts\.jsonl: expected plain text, got JSON lines"):
        read_texts(tmp_path / "texts.jsonl")
    (tmp_path / "texts.jsonl").unlink()
    (tmp_path / "model.bin").write_bytes(b"\x00\xff\xfe")
    with pytest.raises(ValueError, match=r"model\.bin.*UTF-8"):
        read_texts(tmp_path)
    with pytest.raises(ValueError, match="two tokens"):
        windows(tokenizer, ["a"])
    with pytest.raises(ValueError, match="fast"):
        windows(object(), ["a"])


def test_short_documents_fill_what_long_ones_leave(tokenizer: Any) -> None:
    found = windows(tokenizer, ["".join(chr(97 + i * j % 26) for i in range(20 + j)) for j in range(30)], 64)
    assert len(sample(found, 12)) == 12 and len(sample(found, 99)) == 30
    chosen = sample(found, 12, seed=3)
    assert max(w.shape[1] for w in found) in [w.shape[1] for w in chosen]
    assert all(torch.equal(a, b) for a, b in zip(chosen, sample(found, 12, seed=3), strict=True))


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 18, 40, 70, 500])
def test_first_tokens_has_the_requested_number(tokenizer: Any, tokens: int) -> None:
    found = windows(tokenizer, ["abcdefg" * 10, "xy", "abc"], 16)
    taken = first_tokens(found, tokens)
    joined, first = torch.cat(taken, 1), torch.cat(found, 1)
    assert torch.equal(joined, first[:, : joined.shape[1]])
    assert joined.shape[1] == min(tokens, first.shape[1]) - (tokens % 16 == 1)  # one token predicts nothing
    assert all(window.shape[1] > 1 for window in taken)


@pytest.mark.parametrize(("calibrated", "evaluated"), [(512, 512), (256, 512), (512, 256), (100, 512), (24, 100)])
def test_calibration_text_is_found_at_any_offset(tokenizer: Any, seed: int, calibrated: int, evaluated: int) -> None:
    def letters(count: int) -> str:
        return "".join(chr(97 + int(i)) for i in torch.randint(26, (count,)))

    text, other, licence = letters(5000), letters(5000), letters(200)
    some = sample(windows(tokenizer, [text], calibrated), 3)
    later = "preface\n" + text
    found = repeated(windows(tokenizer, [later], evaluated), some)
    assert found is not None
    number, token = found.calibration
    run = "".join(tokenizer.convert_ids_to_tokens(some[number][0, token : token + 16].tolist()))
    documents = [Document("a", "x"), Document("b", "xy"), Document("c", later)]
    where = place(tokenizer, documents, evaluated, 1 + found.evaluation[0], found.evaluation[1])
    assert where == f"c, line 2, column {text.index(run) + 1}"
    assert repeated(windows(tokenizer, [other], evaluated), some) is None
    if calibrated > 500:  # A part that documents have in common is no reason.
        some = windows(tokenizer, [licence + text[:calibrated]], calibrated)[:1]
        assert repeated(windows(tokenizer, [licence + other], evaluated), some) is None
