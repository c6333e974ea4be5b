"""Held-out texts are whole texts, and texts that occur in both parts are found."""

import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import written
from plimsoll.data.formats import Reading
from plimsoll.data.samples.windows import split
from plimsoll.data.text import held_out as module
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.held_out import (
    choose_texts,
    num_held_out,
    num_repeated,
    refuse_same_files,
    sides,
    signatures,
)
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError
from plimsoll.records.job import Job
from token_stores import store_of


@pytest.mark.parametrize("is_drawn", [True, False])
def test_the_texts_held_out_are_those_of_a_split(is_drawn: bool):
    is_held_out = sides(23, 0.3, 5, is_drawn)[1].is_chosen
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


def test_equal_texts_have_equal_hashes_and_others_others(tmp_path: Path):
    long = "word " * 30_000
    texts = ["one", "two", " one\n", "", " \n", long, f"\n{long}\n", f"{long}x", "o ne", "one", f"{long} {long}"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    corpus = open_corpus((written(tmp_path / "a.jsonl", rows),), Reading(), tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TEXTS_PER_PASS", 3)
        found = [one for some in signatures(corpus) for one in zip(*(part.tolist() for part in some), strict=True)]
    kept = [text.strip() for text in texts if text]  # an empty row does not count as a text
    assert [number for number, _ in found] == [number for number, text in enumerate(kept) if text]
    by_text = {kept[number]: one for number, one in found}
    assert [by_text[kept[number]] for number, _ in found] == [one for _, one in found]
    assert len(set(by_text.values())) == len(by_text) == 6


def test_texts_on_both_sides_are_counted_in_any_format(tmp_path: Path):
    def corpus(name: str, content: str | bytes, **asked) -> Corpus:
        return open_corpus((written(tmp_path / name, content),), Reading(**asked), tmp_path / "cache")

    def count(train: Corpus, other: Corpus | None, share: float | None = None) -> int:
        job = Job.model_validate({"model": {"architecture": "lstm"}, "data": {"train": "a.txt", "validation": share}})
        return num_repeated(train, job, other, tmp_path / "cache")

    train = corpus("a.txt", "one\ntwo\nfour\n", unit="line")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in ("two", "three", "two", "four "))
    assert count(train, corpus("b.txt", "two\nthree\n", unit="line")) == 1
    assert count(train, corpus("b.txt.gz", gzip.compress(b"two\nthree\nfour\n"), unit="line")) == 2
    assert count(train, corpus("b.jsonl", rows)) == 3
    assert count(train, corpus("b.json", json.dumps({"data": [{"text": "one"}]}))) == 1
    document = corpus("c.txt", "one document\nof two lines\n")
    assert count(document, corpus("c.csv", 'text\n"one document\nof two lines"\n')) == 1
    assert count(corpus("d.txt", "same\n" * 10, unit="line"), None, 0.5) == 5
    assert count(train, None, 0.5) == 0


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
    message = r"the validation text .* is among the training texts.*: move it out of data.train, or"
    with pytest.raises(DataError, match=message):
        refuse_same_files(train, validation)
    (tmp_path / "copy.txt").write_text("one")  # a separate file with equal content is reported but not refused
    refuse_same_files(train, open_corpus((str(tmp_path / "copy.txt"),), Reading(), tmp_path / "cache"))
