"""Augmentation of tokens: the extremes by hand, the share of changed tokens, and tokens that never change."""

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.batches.augment import TokenAugmentation, UserFunction, spared, swap_places
from plimsoll.data.batches.order import sample_keys
from plimsoll.errors import DataError
from plimsoll.records.augmentation import Augmentation

MASK, SPECIAL = 999, [0, 5]


def augmented(tokens: list[list[int]], epoch: int = 0, **fields: object) -> list[list[int]]:
    """Return the augmented tokens of samples 0, 1, 2, ..."""
    augmentation = TokenAugmentation(Augmentation(**fields), 7, SPECIAL, MASK, 1000)
    lengths = np.array([len(row) for row in tokens])
    flat = np.array([token for row in tokens for token in row])
    changed, _, lengths = augmentation.apply(flat, None, lengths, np.arange(len(tokens)), epoch)
    return [row.tolist() for row in np.split(changed, np.cumsum(lengths)[:-1])]


ROWS = [[1, 2, 5, 3, 0], [4], [0], [6, 7, 8, 0]]


def test_nothing_asked_changes_nothing():
    assert augmented(ROWS) == ROWS
    assert augmented(ROWS, synonyms="words.tsv", delete_word=1.0) == ROWS  # these change the text, not the tokens


def test_everything_masked_leaves_special_tokens():
    assert augmented(ROWS, mask=1.0) == [[MASK, MASK, 5, MASK, 0], [MASK], [0], [MASK, MASK, MASK, 0]]


def test_everything_deleted_leaves_one_token_and_the_special_ones():
    rows = augmented(ROWS, delete=1.0)
    assert [len(row) for row in rows] == [3, 1, 1, 2]
    assert [[token for token in row if token in SPECIAL] for row in rows] == [[5, 0], [], [0], [0]]


def test_neighbours_trade_places_around_special_tokens(monkeypatch: pytest.MonkeyPatch):
    hits = iter([np.array([0.0, 0.9, 0.9, 0.0, 0.9, 0.9]), np.zeros(6)])
    monkeypatch.setattr("plimsoll.data.batches.augment.uniform", lambda *_: next(hits))
    is_free = np.array([True, False, True, True, True, False])
    places = swap_places(np.zeros(1, np.uint64), is_free, np.array([6]), 0.5, 1)
    assert places.tolist() == [2, 1, 0, 4, 3, 5]  # 0 and 2 are neighbours: the fixed place between them may not move


def test_the_last_of_a_sample_does_not_leave_it():
    for distance in (1, 5):
        keys, lengths = sample_keys(0, 0, np.arange(50)), np.full(50, 4)
        places = swap_places(keys, np.ones(200, np.bool_), lengths, 1.0, distance)
        assert (places // 4 == np.arange(200) // 4).all()
        assert sorted(places.tolist()) == list(range(200))


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_shares_are_those_asked_for(share: float):
    num = 100_000
    tokens = [list(range(10, 110))] * (num // 100)
    slack = 4 * (share * (1 - share) / num) ** 0.5  # 4 standard deviations
    masked = [token for row in augmented(tokens, mask=share) for token in row]
    assert abs(masked.count(MASK) / num - share) < slack
    assert abs(sum(map(len, augmented(tokens, delete=share))) / num - (1 - share)) < slack
    moved = [tuple(row) for row in augmented(tokens, swap=share)]
    assert len(set(moved)) > len(tokens) * 0.9
    assert all(sorted(row) == list(range(10, 110)) for row in moved)


def test_every_epoch_draws_anew_and_the_same_again():
    row = [list(range(10, 60))]
    fields = {"mask": 0.2, "delete": 0.2, "swap": 0.2}
    drawn = [augmented(row, epoch, **fields) for epoch in (0, 1, 2, 1)]
    assert drawn[1] == drawn[3]
    assert drawn[0] != drawn[1] != drawn[2]


def test_changes_are_the_same_on_every_machine_and_in_every_version():
    assert augmented([list(range(10, 20))], mask=0.2, delete=0.2, swap=0.2) == [KNOWN]


KNOWN = [10, 11, 12, 15, 17, 18, 19]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(0, 3))
def test_labels_move_with_their_tokens(rows: list[list[int]], epoch: int):
    augmentation = TokenAugmentation(Augmentation(delete=0.4, swap=0.4, swap_distance=3), 1, SPECIAL, None, 100)
    flat = np.array([token for row in rows for token in row])
    lengths = np.array([len(row) for row in rows])
    tokens, labels, kept = augmentation.apply(flat, flat + 100, lengths, np.arange(len(rows)), epoch)
    assert labels is not None
    assert (labels == tokens + 100).all()
    assert kept.min() >= 1
    assert kept.sum() == len(tokens)
    for before, after in zip(rows, np.split(tokens, np.cumsum(kept)[:-1]), strict=True):
        special = [token for token in before if token in SPECIAL]
        assert [token for token in after.tolist() if token in SPECIAL] == special


def test_words_are_swapped_and_deleted_whole():
    """Words are swapped and deleted whole.

    Words have one to three tokens (10 to 19, 20 and 30 to 39 mark the word) and stand between special tokens.
    """
    words = [[word * 100 + piece for piece in range(1 + word % 3)] for word in range(1, 40)]
    flat = [SPECIAL[0], *(token for word in words for token in word), SPECIAL[0]]
    begins = np.array([token in SPECIAL or token % 100 == 0 for token in flat])
    labels = np.where(begins, np.array(flat), -100)
    given = np.array(flat * 2), np.concatenate((labels, labels)), np.array([len(flat)] * 2)
    augmentation = TokenAugmentation(Augmentation(swap=0.4, swap_distance=3, delete=0.2), 0, SPECIAL, None, 1000)
    tokens, moved, lengths = augmentation.apply(*given, np.arange(2), 0, np.concatenate((begins, begins)))
    assert tokens.tolist() != given[0].tolist()
    for row, own in zip(np.split(tokens, lengths[:1]), np.split(moved, lengths[:1]), strict=True):
        assert (row[0], row[-1]) == (SPECIAL[0], SPECIAL[0])
        found = [row[begin:end].tolist() for begin, end in pairwise([*np.flatnonzero(own != -100)[1:]])]
        assert len(found) < len(words)
        assert all(word in words for word in found)
        assert sorted(found) != found


def test_one_of_each_sample_is_spared():
    draws = np.array([0.1, 0.3, 0.2, 0.0])
    is_free = np.array([True, True, True, False])
    assert spared(draws, 0.25, is_free, np.array([3, 1])).tolist() == [False, True, False, False]
    assert spared(draws, 0.9, is_free, np.array([3, 1])).tolist() == [False, True, False, False]
    assert spared(draws, 0.9, is_free, np.array([2, 2])).tolist() == [False, True, True, False]


def test_masking_needs_a_mask_token():
    with pytest.raises(DataError, match=r"mask = 0\.1 needs a mask token and this tokenizer has none: name one of its"):
        TokenAugmentation(Augmentation(mask=0.1), 0, [], None, 10)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noise_of_tests.py").write_text(
        "import random\n"
        "def turned(tokens): return tokens[::-1]\n"
        "def drawn(tokens, seed): return [random.Random(seed).randrange(100)]\n"
        "def nothing(tokens): return []\n"
        "def text(tokens): return 'a'\n"
        "def longer(tokens): return list(tokens) * 1000\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("functions")
def test_a_function_has_the_last_word():
    assert augmented([[1, 2, 3], [4]], token_function="noise_of_tests:turned") == [[3, 2, 1], [4]]
    first, second = augmented([[1, 2, 3], [4]], token_function="noise_of_tests:drawn")
    assert first != second
    # the draw depends on seed and sample
    assert augmented([[9], [8, 7]], token_function="noise_of_tests:drawn") == [first, second]
    function = pickle.loads(pickle.dumps(UserFunction("noise_of_tests:turned", "token_function")))
    assert function([1, 2], 0) == [2, 1]


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("name", ["nothing", "text", "longer"])
def test_a_function_must_return_tokens(name: str):
    with pytest.raises(DataError, match=rf"token_function noise_of_tests:{name} returned .*: return 1 to 1000 token"):
        augmented([[1, 2, 3]], token_function=f"noise_of_tests:{name}")


@pytest.mark.parametrize("name", ["no_such_module_here:f", "json:no_such_function"])
def test_a_function_that_is_missing_is_named(name: str):
    with pytest.raises(DataError, match=rf"token_function = {name} cannot be imported \(.*\): check the name"):
        TokenAugmentation(Augmentation(token_function=name), 0, [], None, 10)
