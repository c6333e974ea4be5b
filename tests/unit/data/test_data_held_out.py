"""Held out are whole texts, and what is on both sides all the same is found."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data import held_out as module
from plimsoll.data.formats import Reading
from plimsoll.data.held_out import (
    choose_texts,
    held_out,
    num_held_out,
    num_on_both_sides,
    refuse_same_files,
    signatures,
    signatures_of_texts,
)
from plimsoll.data.index import open_corpus
from plimsoll.data.windows import split
from plimsoll.errors import DataError
from token_stores import store_of


@pytest.mark.parametrize("is_drawn", [True, False])
def test_the_texts_held_out_are_those_of_a_split(is_drawn: bool):
    is_held_out = held_out(23, 0.3, 5, is_drawn)
    _, validation = split(23, 0.3, 5, is_drawn)
    assert np.flatnonzero(is_held_out(np.arange(23))).tolist() == sorted(
        validation[np.arange(len(validation))].tolist()
    )
    assert [num_held_out(23, share) for share in (0.0, 0.001, 0.3, 0.999)] == [0, 1, 7, 22]


@given(
    texts=st.lists(st.lists(st.integers(1, 5), max_size=6), min_size=1, max_size=40),
    data=st.data(),
    texts_per_pass=st.integers(1, 7),
)
def test_chosen_texts_are_end_to_end(tmp_path_factory: pytest.TempPathFactory, texts, data, texts_per_pass):
    chosen = data.draw(st.sets(st.integers(0, len(texts) - 1), min_size=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TEXTS_PER_PASS", texts_per_pass)
        store = store_of(tmp_path_factory.mktemp("store"), texts)
        found = choose_texts(store, "some", lambda ids: np.isin(ids, list(chosen)))
    expected = [token for number in sorted(chosen) for token in [*texts[number], 0]]
    for some in (found, pickle.loads(pickle.dumps(found))):
        assert some.tokens[np.arange(len(some.tokens))].tolist() == expected
        assert some.ends.tolist() == np.flatnonzero(np.array(expected) == 0).tolist()


@given(
    texts=st.lists(st.lists(st.integers(1, 2), max_size=5), min_size=1, max_size=30),
    tokens_per_pass=st.integers(1, 9),
)
def test_equal_texts_have_equal_hashes_and_others_others(tmp_path_factory, texts, tokens_per_pass):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOKENS_PER_PASS", tokens_per_pass)
        found = list(signatures(store_of(tmp_path_factory.mktemp("store"), texts)))
    numbers = [number for some, _ in found for number in some.tolist()]
    hashes = [number for _, some in found for number in some.tolist()]
    assert numbers == [number for number, text in enumerate(texts) if text]
    by_text = {tuple(texts[number]): one for number, one in zip(numbers, hashes, strict=True)}
    assert [by_text[tuple(texts[number])] for number in numbers] == hashes
    assert len(set(by_text.values())) == len(by_text)


def test_texts_on_both_sides_are_counted(tmp_path: Path):
    train = store_of(tmp_path / "a", [[1, 2], [3], [], [4, 4]])
    other = store_of(tmp_path / "b", [[3], [2, 1], [], [3], [4, 4, 4]])
    assert num_on_both_sides(signatures(other), signatures(train)) == 2
    assert num_on_both_sides(signatures(train), signatures(train)) == 3
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("two\nthree\n")
    of_files = [
        signatures_of_texts(open_corpus((str(tmp_path / name),), Reading(unit="line"), tmp_path / "cache"))
        for name in ("a.txt", "b.txt")
    ]
    assert num_on_both_sides(*of_files) == 1


@pytest.mark.parametrize("how", ["itself", "a link", "a hard link", "a folder that is a link"])
def test_a_file_that_is_on_both_sides_is_refused(tmp_path: Path, how: str):
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts" / "a.txt"
    path.write_text("one")
    (tmp_path / "texts" / "b.txt").write_text("two")
    other = path
    if how == "a link":
        other = tmp_path / "link.txt"
        other.symlink_to(path)
    elif how == "a hard link":
        other = tmp_path / "other.txt"
        os.link(path, other)
    elif how == "a folder that is a link":
        (tmp_path / "again").symlink_to(tmp_path / "texts")
        other = tmp_path / "again" / "a.txt"
    train = open_corpus((f"{tmp_path}/texts/*.txt",), Reading(), tmp_path / "cache")
    validation = open_corpus((str(other),), Reading(), tmp_path / "cache")
    message = r"the validation text .* is among the training texts.*: move it to where data.train does not reach, or"
    with pytest.raises(DataError, match=message):
        refuse_same_files(train, validation)
    (tmp_path / "copy.txt").write_text("one")  # a file of its own, which is said but not refused
    refuse_same_files(train, open_corpus((str(tmp_path / "copy.txt"),), Reading(), tmp_path / "cache"))
