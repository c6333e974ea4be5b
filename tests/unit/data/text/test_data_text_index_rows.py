"""The index during writing: names in order, and removal of a file's rows."""

from pathlib import Path

import numpy as np
import pytest

from corpora import opened, written
from plimsoll.data.text import index_rows
from plimsoll.data.text.index_rows import sorted_names
from plimsoll.errors import DataError, PlimsollWarning


def test_names_of_classes_are_sorted_as_what_they_are():
    assert sorted_names([10, 9, "2", -1]) == ["-1", "2", "9", "10"]
    assert sorted_names(["b", 10, "a", 9]) == ["10", "9", "a", "b"]
    assert sorted_names([]) == []


def test_labels_are_stored_as_small_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_rows, "_CODES_AT_ONCE", 7)
    labels = np.random.default_rng(0).integers(0, 300, 2000).tolist()
    path = written(tmp_path / "a.jsonl", "".join(f'{{"text": "x", "y": {label}}}\n' for label in labels))
    corpus = opened(path, label="y")
    assert corpus.labels is not None
    assert corpus.labels.dtype == "uint16"
    assert [int(corpus.label_names[number]) for number in corpus.labels] == labels
    assert corpus.label_names == tuple(str(label) for label in sorted(set(labels)))


def test_a_column_of_too_many_classes_is_none_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_rows, "MOST_LABELS", 3)
    path = written(tmp_path / "a.jsonl", "".join(f'{{"text": "x", "y": {label}}}\n' for label in range(9)))
    with pytest.raises(
        DataError, match=r"'y' of .*a\.jsonl holds more than 3 classes, for example '0', '1', '2': give"
    ):
        opened(path, label="y")


def test_what_was_found_of_a_file_is_taken_back_if_it_turns_out_to_be_no_text(tmp_path: Path):
    blank = b"\n" * (3 << 20)
    written(tmp_path / "texts" / "a.txt", b"one\n" + blank + b"two\n")
    written(tmp_path / "texts" / "b.txt", b"three\n" + blank + b"four\n" * 9 + b"\xff\n")
    written(tmp_path / "texts" / "c.txt", b"five\n" + blank)
    with pytest.warns(PlimsollWarning, match=r"b\.txt: line 3145739: byte"):
        corpus = opened(tmp_path / "texts")
    assert list(corpus) == ["one", "two", "five"]
    assert [corpus[number] for number in range(3)] == ["one", "two", "five"]
    assert corpus.byte_lengths(np.arange(3)).tolist() == [3, 4, 4]
