"""The tokens that a tokenizer needs to produce the tokens that occur."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models

from plimsoll.compression.token_needs import _check_numbers, tokens_needed, with_only
from plimsoll.errors import WeightsError
from shrink_models import tokenizer


def described(backend: Tokenizer) -> dict:
    return json.loads(backend.to_str())


def test_the_steps_of_merges_are_kept_by_hand():
    words = {word: number for number, word in enumerate(["a", "b", "c", "d", "ab", "cd", "abcd", "bc", "abc"])}
    merges = [("a", "b"), ("c", "d"), ("b", "c"), ("ab", "cd"), ("ab", "c")]
    backend = Tokenizer(models.BPE(words, merges))
    assert backend.encode("abcd").tokens == ["abcd"]
    kept = tokens_needed(described(backend), {words["abcd"]})
    assert kept == {words[word] for word in ("a", "b", "c", "d", "ab", "cd", "abcd")}
    small = Tokenizer.from_str(with_only(described(backend), sorted(kept)))
    assert small.encode("abcd").tokens == ["abcd"]
    assert small.encode("abc").tokens == ["ab", "c"]
    assert small.get_vocab_size() == 7


def test_affixes_of_words_and_of_their_ends_are_steps_too():
    words = ["l", "o", "w</w>", "lo", "low</w>", "w"]
    backend = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [("l", "o"), ("lo", "w</w>")],
            end_of_word_suffix="</w>",
        )
    )
    assert tokens_needed(described(backend), {4}) == {0, 1, 2, 3, 4}
    inner = ["l", "##o", "lo", "##w", "low"]
    numbers = {word: number for number, word in enumerate(inner)}
    backend = Tokenizer(models.BPE(numbers, [("l", "##o"), ("lo", "##w")], continuing_subword_prefix="##"))
    assert tokens_needed(described(backend), {numbers["low"]}) == {0, 1, 2, 3, 4}
    small = Tokenizer.from_str(with_only(described(backend), [0, 1, 2, 3, 4]))
    assert small.encode("low").tokens == ["low"]


def test_bytes_stay_where_the_tokenizer_is_of_bytes():
    bpe = described(tokenizer("BPE").backend_tokenizer)
    assert len(tokens_needed(bpe, set())) >= 256
    fallback = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    backend = Tokenizer(models.BPE(fallback, [], unk_token="<unk>", byte_fallback=True))
    assert len(tokens_needed(described(backend), {1})) == 258


def test_templates_padding_and_the_unknown_piece_follow():
    backend = tokenizer("Unigram").backend_tokenizer
    backend.enable_padding(pad_id=0, pad_token="<end>")
    before = described(backend)
    worst = min(range(len(before["model"]["vocab"])), key=lambda number: before["model"]["vocab"][number][1])
    kept = tokens_needed(before, {20})
    assert {0, 1, 2, 3, 20, worst} <= kept
    after = json.loads(with_only(before, sorted(kept)))
    assert after["model"]["unk_id"] == 1
    assert after["post_processor"]["special_tokens"]["[SEP]"]["ids"] == [3]


@pytest.mark.parametrize("kind", ["BertProcessing", "RobertaProcessing"])
def test_processors_with_pairs_are_renumbered(kind):
    from tokenizers import processors

    backend = tokenizer("WordPiece").backend_tokenizer
    backend.post_processor = getattr(processors, kind)(("[SEP]", 3), ("[CLS]", 2))
    after = json.loads(with_only(described(backend), [0, 1, 2, 3, 9, 10]))
    assert (after["post_processor"]["sep"], after["post_processor"]["cls"]) == (["[SEP]", 3], ["[CLS]", 2])
    assert tokens_needed(described(backend), set()) >= {2, 3}


def test_a_tokenizer_with_other_numbers_than_the_rows_is_refused():
    before = described(Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")))
    with pytest.raises(WeightsError, match="`b` another id than 0, .*: leave `vocabulary` out"):
        _check_numbers(json.dumps(before), before, [1, 2])
