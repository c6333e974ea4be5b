"""Rows that wait for words: in three forms, of which the first in the file wins; words without a vector are skipped."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.embeddings.wanted import CAPITALISED, EXACT, LOWER, MISSING, NO_WORD, PADDING, Wanted


def given_all(wanted: Wanted, *blocks: list[str]) -> dict[int, str]:
    """Give blocks of words that all have vectors, and return the final word of each row."""
    has = {}
    for words in blocks:
        raw = [word.encode() for word in words]
        pairs = wanted.give(raw, np.ones(len(raw), np.bool_))
        assert pairs.refused == frozenset()
        has.update({row: words[index] for row, index in zip(pairs.rows.tolist(), pairs.indexes.tolist(), strict=True)})
    return has


def test_rows_wait_as_what_they_are():
    wanted = Wanted(["<pad>", None, "The", "the", ""], 0, True)
    assert wanted.state.tolist() == [PADDING, NO_WORD, MISSING, MISSING, MISSING]
    assert {*wanted.words} == {b"The", b"the", b""}


def test_forms_of_a_word_are_tried_only_where_case_is_ignored():
    assert {*Wanted(["USA"], None, True).words} == {b"USA", b"usa", b"Usa"}
    assert {*Wanted(["USA"], None, False).words} == {b"USA"}


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 2, 3, 4], [0, 2, 4]])
@pytest.mark.parametrize(
    ("file", "word", "state"),
    [
        (["usa", "Usa", "USA", "USA"], "USA", EXACT),
        (["Usa", "usa", "usa", "x"], "usa", LOWER),
        (["x", "Usa", "y", "Usa"], "Usa", CAPITALISED),
        (["USa", "uSA", "x", "y"], None, MISSING),
    ],
)
def test_the_best_form_wins_wherever_it_stands(cuts: list[int], file: list[str], word: str | None, state: int):
    wanted = Wanted(["USA"], None, True)
    has = given_all(wanted, *[file[begin:end] for begin, end in pairwise(cuts)])
    assert has.get(0) == word
    assert wanted.state.tolist() == [state]


def test_a_word_of_lower_case_may_be_found_capitalised():
    wanted = Wanted(["paris"], None, True)
    assert given_all(wanted, ["PARIS", "Paris"]) == {0: "Paris"}
    assert wanted.state.tolist() == [CAPITALISED]


def test_several_rows_may_take_one_word():
    wanted = Wanted(["the", "The", "THE"], None, True)
    assert given_all(wanted, ["the"]) == {0: "the", 1: "the", 2: "the"}
    assert wanted.state.tolist() == [EXACT, LOWER, LOWER]
    assert given_all(wanted, ["THE", "the", "The"]) == {1: "The", 2: "THE"}
    assert wanted.state.tolist() == [EXACT, EXACT, EXACT]


def test_of_equal_words_the_first_is_taken_and_the_others_are_counted():
    wanted = Wanted(["a", "b"], None, True)
    first = wanted.give([b"a", b"a", b"b"], np.ones(3, np.bool_))
    assert (first.rows.tolist(), first.indexes.tolist()) == ([0, 1], [0, 2])
    again = wanted.give([b"b", b"a"], np.ones(2, np.bool_))
    assert (again.rows.tolist(), again.indexes.tolist()) == ([], [])
    assert (first.again, again.again) == ((b"a",), (b"b", b"a"))


def test_a_word_without_a_vector_leaves_its_rows_to_the_next_one():
    wanted = Wanted(["a", "b"], None, True)
    pairs = wanted.give([b"a", b"b", b"A", b"a", b"a"], np.array([False, True, True, True, False]))
    assert dict(zip(pairs.rows.tolist(), pairs.indexes.tolist(), strict=True)) == {0: 3, 1: 1}
    assert pairs.refused == {0}  # the last word was not needed, so its fault does not matter
    assert wanted.state.tolist() == [EXACT, EXACT]


def test_words_that_nothing_waits_for_are_not_open():
    wanted = Wanted(["The", "a"], None, True)
    words = [b"a", b"the", b"The", b"x"]
    assert wanted.open_words(words).tolist() == [0, 1, 2]
    given_all(wanted, ["a", "the"])
    assert wanted.open_words(words).tolist() == [2]
    given_all(wanted, ["The"])
    assert wanted.open_words(words).tolist() == []


def test_surrogates_do_not_stop_anything():
    wanted = Wanted(["\ud800", "ß"], None, True)
    assert "ß".encode() in wanted.words
    assert given_all(wanted, ["ß"]) == {1: "ß"}


def slow_rows(vocabulary: list[str], file: list[str]) -> list[int | None]:
    """Return the place in the file of the word of each row."""
    return [
        next((file.index(form) for form in (word, word.lower(), word.capitalize()) if form in file), None)
        for word in vocabulary
    ]


some_words = st.lists(st.text("aAbBßİ", max_size=3))


@given(some_words.map(lambda words: [*dict.fromkeys(words)]), some_words, st.lists(st.integers(0, 12)))
def test_any_file_in_any_parts_gives_rows_as_a_slow_reader_does(
    vocabulary: list[str], file: list[str], cuts: list[int]
):
    wanted = Wanted(vocabulary, None, True)
    found: dict[int, int] = {}
    num_again = 0
    for begin, end in pairwise([0, *sorted(min(cut, len(file)) for cut in cuts), len(file)]):
        pairs = wanted.give([word.encode() for word in file[begin:end]], np.ones(end - begin, np.bool_))
        num_again += len(pairs.again)
        found.update(zip(pairs.rows.tolist(), (begin + pairs.indexes).tolist(), strict=True))
    assert [found.get(row) for row in range(len(vocabulary))] == slow_rows(vocabulary, file)
    assert num_again == len(file) - len({*file})
