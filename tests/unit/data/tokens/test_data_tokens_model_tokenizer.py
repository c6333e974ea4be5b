"""Tokenization with a model's own tokenizer: special tokens, truncation, very long texts, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_folders import model_folder, tokenizer
from plimsoll.data.tokens.model_tokenizer import ModelTokenizer, Tokens, load_model_tokenizer
from plimsoll.errors import DataError


def test_special_tokens_are_added_or_not() -> None:
    assert ModelTokenizer(tokenizer(), None).read(["w0 w1"]) == [Tokens([2, 4, 5, 3], False)]
    assert ModelTokenizer(tokenizer(), None, with_special=False).read(["w0 w1"]) == [Tokens([4, 5], False)]
    assert ModelTokenizer(tokenizer(), None).read([]) == []


def test_texts_are_truncated_as_the_tokenizer_does_it() -> None:
    names = ModelTokenizer(tokenizer(), 4)
    assert names.read(["w0 w1", "w0 w1 w2", "w0"]) == [
        Tokens([2, 4, 5, 3], False),
        Tokens([2, 4, 5, 3], True),
        Tokens([2, 4, 3], False),
    ]


@pytest.mark.parametrize(
    "text", ["w7 " * 5_000, " " * 5_000 + "w1 w2", "w7" + " " * 300 + "w3", "x" * 5_000 + " w1 w2 w3"]
)
def test_of_a_very_long_text_all_that_counts_is_seen(text: str) -> None:
    whole = tokenizer()(text, truncation=True, max_length=4)["input_ids"]
    (found,) = ModelTokenizer(tokenizer(), 4).read([text])
    assert found.ids == whole
    assert found.is_truncated == (len(tokenizer()(text)["input_ids"]) > 4)


@pytest.mark.parametrize(
    "text", ["w1 w2 w3 w4", "w7 " * 5_000, "w1 w2" + " " * 5_000, "w7" + " " * 300 + "w3", "w1 w2 w3 " + "x" * 5_000]
)
def test_of_a_prompt_the_end_is_kept(text: str) -> None:
    whole = tokenizer()(text)["input_ids"]
    (found,) = ModelTokenizer(tokenizer(), 4, keeps_end=True).read([text])
    assert found.ids == [2, *whole[1:-1][-2:], 3]
    assert found.is_truncated == (len(whole) > 4)


@pytest.mark.parametrize("text", ["w1 w2 w3 w4", "w7 " * 5_000 + "w1 w2"])
def test_a_tokenizer_that_keeps_the_end_of_a_text_does(text: str) -> None:
    own = tokenizer()
    own.truncation_side = "left"
    whole = own(text, truncation=True, max_length=4)["input_ids"]
    assert ModelTokenizer(own, 4).read([text])[0].ids == whole


def test_padding_is_the_tokenizers_or_its_end() -> None:
    assert ModelTokenizer(tokenizer(), 4).padding_id == 0
    without = tokenizer()
    without.pad_token = None
    assert ModelTokenizer(without, 4).padding_id is None
    without.eos_token = "[SEP]"
    assert ModelTokenizer(without, 4).padding_id == 3


def test_tokens_are_a_text_again() -> None:
    assert ModelTokenizer(tokenizer(), 4).text_of([2, 4, 5, 3]) == "w0 w1"


def test_a_folder_has_its_tokenizer_or_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert load_model_tokenizer(folder)("w0")["input_ids"] == [2, 4, 3]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="no tokenizer that transformers can load"):
        load_model_tokenizer(folder)
    (folder / "tokenizer.json").unlink()  # transformers would make a tokenizer without words from such a folder
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_model_tokenizer(folder)
