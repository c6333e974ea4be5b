"""Byte-level BPE trained on counted words: equal to the library's to the byte, unless there are too many words."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from plimsoll.data.tokens import byte_pairs
from plimsoll.data.tokens.byte_pairs import count_words, train
from plimsoll.device.process import private_bytes
from plimsoll.errors import BudgetError

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SIGNS = st.text(
    st.sampled_from(list(" \n\t\r\x0b\x1c\x1f\x85\xa0\u180e\u200b\u2009\u3000\ufeffa'sZ9\u00e9\u4e2d.-\x00"))
)


def backend() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = BYTE_LEVEL
    return made


def trainer(vocab_size: int) -> trainers.BpeTrainer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )


def numbered(num_lines: int) -> list[str]:
    draw = random.Random(0)
    return [f"{number:09d} user {draw.getrandbits(64):016x} opened page {number % 97}" for number in range(num_lines)]


@settings(max_examples=300, deadline=None)
@given(st.lists(SIGNS, max_size=4))
def test_words_are_those_of_the_library(texts: list[str]):
    expected = Counter(word for text in texts for word, _ in BYTE_LEVEL.pre_tokenize_str(text))
    assert count_words(texts, BYTE_LEVEL, 1 << 20) == (expected, 0)


@pytest.mark.parametrize("texts", [numbered(2000), ["don't  stop\n\n\u4e2d\u6587 caf\u00e9\t" * 50] * 3])
def test_the_tokenizer_is_that_of_the_library_where_nothing_is_left_out(texts: list[str]):
    own, of_library = backend(), backend()
    assert train(own, texts, trainer(600), 600).num_left_out == 0
    of_library.train_from_iterator(texts, trainer(600))
    assert own.to_str() == of_library.to_str()


@pytest.mark.parametrize("end", ["", "\u00e9"], ids=["ascii", "chunks"])
def test_the_rarest_words_are_left_out_and_the_same_ones_each_time(monkeypatch: pytest.MonkeyPatch, end: str):
    monkeypatch.setattr(byte_pairs, "_LEAST_DISTINCT_BYTES", 4 << 10)
    monkeypatch.setattr(byte_pairs, "_DISTINCT_BYTES_PER_TOKEN", 1)
    monkeypatch.setattr(byte_pairs, "_WORDS_PER_CHECK", 100)
    monkeypatch.setattr(byte_pairs, "_MOST_CHUNKS", 100)
    texts = [text + end for text in numbered(3000)]
    first, second = backend(), backend()
    trained_on = train(first, texts, trainer(400), 400)
    assert trained_on.num_bytes <= 4 << 10
    assert trained_on.num_left_out > 2000
    assert train(second, texts, trainer(400), 400) == trained_on
    assert first.to_str() == second.to_str()
    kept, _ = count_words(texts, BYTE_LEVEL, 4 << 10)
    assert {"\u0120user", "\u0120opened", "\u0120page"} <= set(kept)  # each occurs 3,000 times


def test_a_limit_without_room_is_said_before_the_library_aborts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(byte_pairs.resource, "getrlimit", lambda _: (64 << 20, 64 << 20))
    with pytest.raises(
        BudgetError, match=r"training the tokenizer takes about .* RLIMIT_DATA of 64\.0 MiB has .* left: raise"
    ):
        train(backend(), numbered(30_000), trainer(300), 300)


def test_what_exceeds_the_budget_is_refused_and_what_does_not_stays_under_it():
    budget_bytes = private_bytes() + (32 << 20)
    with pytest.raises(BudgetError, match=r"takes about .* and the budget of .* has .* MiB left: raise it"):
        train(backend(), numbered(30_000), trainer(300), 300, budget_bytes)
    budget_bytes = private_bytes() + (32 << 20)
    assert train(backend(), numbered(1000), trainer(300), 300, budget_bytes).num_left_out == 0
    assert private_bytes() <= budget_bytes
