"""Splitting into words, equal in Python and in ``tokenizers``; word counts are exact or state their largest error."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers

from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens import words
from plimsoll.data.tokens.words import WordCounts, count_texts, count_words, lowered, word_pattern, words_of

SPLIT = pre_tokenizers.Split(Regex(word_pattern()), behavior="removed", invert=True)
CHARACTERS = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]  # all but surrogates
TRICKY = "nN'\u2019tTsSdDmMrReEvVlL.,-019aZ`\u200c\u200d\ufe0f\u0301\u0085\u001c\u2028\u00a0\ufeff \n\u0130\u03a3\u4e2d"
TEXTS = st.text(st.sampled_from(TRICKY) | st.characters(exclude_categories=["Cs"]))


def by_tokenizers(text: str) -> list[str]:
    return [word for word, _ in SPLIT.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat, sat.", "The cat , sat ."),
        ("Don't! it's he'll WE'RE DON'T I\u2019m can't", "Do n't ! it 's he 'll WE 'RE DO N'T I \u2019m ca n't"),
        ("3.14 1,000.5, 5. a,b 10:30 -5 mp3 $5", "3.14 1,000.5 , 5 . a , b 10 : 30 - 5 mp3 $ 5"),
        ("state-of-the-art -x- 1990-91", "state-of-the-art - x - 1990-91"),
        ("the U.S. at 5 p.m. U.S.Army J. X", "the U.S. at 5 p.m. U.S. Army J . X"),
        ("wait... no -- ``so''  'x' ....", "wait ... no -- `` so '' ' x ' ... ."),
        ("O'Neill l'homme 'tis x_y \u00ab\u00e9\u00bb", "O ' Neill l ' homme ' tis x _ y \u00ab \u00e9 \u00bb"),
        ("e\u0301t\u00e9 \u0939\u093f\u0928\u094d\u0926\u0940", "e\u0301t\u00e9 \u0939\u093f\u0928\u094d\u0926\u0940"),
        ("\u0645\u06cc\u200c\u0631\u0648\u062f\u200c a\u200bb", "\u0645\u06cc\u200c\u0631\u0648\u062f a b"),
        ("\u2764\ufe0f\U0001f600", "\u2764 \U0001f600"),
        ("\ufeff \u0085\u001c\n", ""),
    ],
)  # fmt: skip
def test_what_a_word_is(text: str, expected: str):
    assert words_of(text) == expected.split(" " if expected else None)


@given(TEXTS)
def test_both_engines_cut_alike_and_cut_words_stay(text: str):
    cut = words_of(text)
    assert by_tokenizers(text) == cut
    assert words_of(" ".join(cut)) == cut
    assert [word for chunk in text.split() for word in words_of(chunk)] == cut  # no word spans white space


@pytest.mark.slow
def test_both_engines_agree_on_every_character():
    text = "".join(f"a{character}b {character}1 " for character in CHARACTERS)
    assert by_tokenizers(text) == words_of(text)


@given(TEXTS)
def test_small_letters_are_those_of_tokenizers(text: str):
    known = "".join(c for c in text if lowered(c) != c or normalizers.Lowercase().normalize_str(c) == c)
    assert normalizers.Lowercase().normalize_str(known) == lowered(known)


def test_only_letters_younger_than_the_tables_of_python_are_not_made_small():
    lowercase = normalizers.Lowercase()
    different = [character for character in CHARACTERS if lowercase.normalize_str(character) != lowered(character)]
    assert len(different) < 100
    assert {lowered(character) for character in different} == set(different)


@given(st.lists(TEXTS), st.booleans())
def test_counting_is_cutting(texts: list[str], lowercase: bool):
    counted = count_texts(texts, lowercase)
    assert counted == WordCounts(Counter(word for text in texts for word in words_of(text, lowercase)), 0)


@pytest.mark.parametrize("unit", ["a", "1,", "a-", "a.", "\u4e2d", "n't", "a\u200c"])
def test_what_never_ends_is_cut_alike_and_not_refused(unit: str):
    text = unit * 30_000
    cut = words_of(text)
    assert by_tokenizers(text) == cut == words_of(" ".join(cut))
    assert max(map(len, cut)) <= 2000


def test_words_are_ranked_by_count_and_then_by_text():
    counted = count_texts(["b B a c a c d", "\u00e9"])
    assert counted.ranked() == ["a", "c", "B", "b", "d", "\u00e9"]
    assert counted.ranked(min_count=2) == ["a", "c"]
    assert count_texts(["b B a"], lowercase=True).ranked() == ["b", "a"]


def test_the_rarest_are_dropped_and_how_much_a_count_may_miss_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(words, "_TEXTS_AT_ONCE", 1)
    monkeypatch.setattr(words, "_MOST_CHUNKS", 0)
    texts = ["a a a b b", "c d", "c c a e", "b f g"]
    # There are 5 words after the third text: a 4, c 3, b 2, d 1, e 1. The excess over the third count stays: 2 are
    # missed.
    assert count_texts(texts[:3], most_words=4) == WordCounts(Counter(a=4, c=3), 2, 3)
    # After the fourth: a 4, c 3, b 1, f 1, g 1. So b occurred three times and has missed the whole reported error.
    assert count_texts(texts, most_words=4) == WordCounts(Counter(a=4, c=3), 3, 6)


def check(exact: WordCounts, counted: WordCounts, most_words: int) -> None:
    assert exact.most_missed == 0
    assert len(counted.counts) <= most_words
    for word, count in exact.counts.items():
        assert counted.counts[word] <= count <= counted.counts[word] + counted.most_missed


@pytest.mark.parametrize("most_words", [2, 10, 100])
def test_no_count_misses_more_than_is_said(monkeypatch: pytest.MonkeyPatch, most_words: int):
    monkeypatch.setattr(words, "_TEXTS_AT_ONCE", 1)
    monkeypatch.setattr(words, "_MOST_CHUNKS", 20)
    draws = np.random.default_rng(0).zipf(1.3, 20_000) % 5000
    texts = [" ".join(map(str, some)) for some in draws.reshape(-1, 50)]
    counted = count_texts(texts, most_words=most_words)
    assert counted.most_missed > 0
    check(count_texts(texts), counted, most_words)
    assert counted == count_texts(texts, most_words=most_words)


def test_all_texts_of_a_corpus_are_counted_and_its_progress_is_told(tmp_path: Path):
    line = "It's a caf\u00e9, isn't it? " * 10_000
    (tmp_path / "a.txt").write_text(f"{line}\n{line}\nend")
    stages = []
    for unit in ("document", "line"):
        corpus = open_corpus((str(tmp_path / "a.txt"),), Reading(unit=unit), tmp_path / "cache")
        counted = count_words(corpus, lowercase=True, progress=lambda *progress: stages.append(progress))
        expected = dict.fromkeys(["it", "'s", "a", "caf\u00e9", ",", "is", "n't", "?"], 20_000) | {
            "it": 40_000,
            "end": 1,
        }
        assert counted.counts == expected
    assert stages[-1] == ("words", corpus.num_bytes, corpus.num_bytes)
    assert len(stages) == 2  # below 1 MiB, only the end is reported


def test_memory_is_bounded_where_everything_is_another_word(monkeypatch: pytest.MonkeyPatch):
    """Memory is bounded if each word is different: the words between two cuts are limited in number and characters."""
    monkeypatch.setattr(words, "_TEXTS_AT_ONCE", 1)
    for limit in ("_MOST_CHUNKS", "_MOST_CHUNK_CHARS"):
        with monkeypatch.context() as patch:
            patch.setattr(words, limit, 100)
            held = list(words._counted_chunks((f"{number} " * 10 for number in range(1000)), words._MOST_CHUNKS))
            assert 10 <= len(held) <= 1001
            assert sum(held, Counter()) == Counter({str(number): 10 for number in range(1000)})
