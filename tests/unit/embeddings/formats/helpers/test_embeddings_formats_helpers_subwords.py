"""Character n-grams, compared with a copy of fastText's loop and with published numbers."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.embeddings.formats.helpers import subwords
from plimsoll.embeddings.formats.helpers.subwords import Ngrams, buckets_of, sums


def fnv(raw: bytes) -> int:
    """Return the hash of `dictionary.cc`, computed byte by byte."""
    number = 2166136261
    for byte in raw:
        signed = struct.unpack("b", bytes([byte]))[0]
        number = ((number ^ (signed & 0xFFFFFFFF)) * 16777619) & 0xFFFFFFFF
    return number


def one_by_one(word: bytes, ngrams: Ngrams) -> list[int]:
    """Return the result of `computeSubwords` in `dictionary.cc`, with the same loops."""
    word, found = b"<" + word + b">", []
    for begin in range(len(word)):
        if (word[begin] & 0xC0) == 0x80:
            continue
        end, length = begin, 1
        while end < len(word) and length <= ngrams.max_letters:
            end += 1
            while end < len(word) and (word[end] & 0xC0) == 0x80:
                end += 1
            if length >= ngrams.min_letters and not (length == 1 and (begin == 0 or end == len(word))):
                found.append(fnv(word[begin:end]) % ngrams.num_buckets)
            length += 1
    return found


WORD = st.lists(
    st.sampled_from([b"a", b"b", "é".encode(), "猫".encode(), "😀".encode(), b"\xff", b"\x80", b"<"]), max_size=9
)


@given(st.lists(WORD.map(b"".join), max_size=6), st.integers(0, 4), st.integers(0, 5), st.integers(1, 1 << 31))
def test_ngrams_are_those_of_the_loop(words: list[bytes], min_letters: int, max_letters: int, num_buckets: int):
    ngrams = Ngrams(min_letters, max_letters, num_buckets)
    buckets, counts = buckets_of(words, ngrams)
    alone = [one_by_one(word, ngrams) for word in words]
    assert buckets.tolist() == [bucket for one in alone for bucket in one]
    assert counts.tolist() == [len(one) for one in alone]


def test_fnv_of_known_texts():
    # Published values for 32-bit FNV-1a of "", "a" and "foobar": http://www.isthe.com/chongo/src/fnv/test_fnv.c
    assert [fnv(raw) for raw in (b"", b"a", b"foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]


def test_where_there_are_none():
    for ngrams in (Ngrams(3, 0, 9), Ngrams(3, 2, 9), Ngrams(1, 3, 0), Ngrams(-1, -1, -1), Ngrams(0, 0, 9)):
        assert ngrams.are_none
        assert buckets_of([b"word"], ngrams)[1].tolist() == [0]
    _, counts = buckets_of([b"</s>", b"</s", b"a"], Ngrams(3, 3, 9, without=b"</s>"))
    assert counts.tolist() == [0, 3, 1]


@pytest.mark.parametrize("rows_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("words_at_once", [1, 3, 1024])
def test_sums_are_those_of_one_addition_after_the_other(
    monkeypatch: pytest.MonkeyPatch, words_at_once: int, rows_bytes: int
):
    monkeypatch.setattr(subwords, "_WORDS_AT_ONCE", words_at_once)
    monkeypatch.setattr(subwords, "_ROWS_AT_ONCE_BYTES", rows_bytes)
    generator = np.random.default_rng(3)
    own, matrix = generator.normal(size=(9, 5)).astype("f4"), generator.normal(size=(40, 5)).astype("f4")
    words, ngrams = [b"one", b"", "größeres".encode(), b"a-very-long-word-of-many-letters", b"x"], Ngrams(1, 5, 37)
    rows = np.array([8, 0, 3, 3, 5])
    for own_rows in (rows, None):
        total, counts = sums(words, own_rows, 2, ngrams, (own, matrix))
        for place, word in enumerate(words):
            expected = np.zeros(5, np.float32)
            added = [own[rows[place]]] if own_rows is not None else []
            added += [matrix[2 + bucket] for bucket in one_by_one(word, ngrams)]
            for row in added:
                expected += row
            assert total[place].tobytes() == expected.tobytes()
            assert counts[place] == len(added)
