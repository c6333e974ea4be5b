"""Classes from the names of folders."""

import json
from pathlib import Path

import pytest

from plimsoll.data.formats import Reading
from plimsoll.data.samples.labels import (
    labels_from_column,
    labels_from_folders,
    labels_of,
    names_of_checkpoint,
    names_to_number_by,
)
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError


def corpus_of(folder: Path, files: dict[str, str], unit: str = "document") -> Corpus:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return open_corpus((str(folder),), Reading(unit=unit), folder.parent / "cache")


def test_the_class_of_a_text_is_the_folder_of_its_file(tmp_path: Path):
    files = {"spam/1.txt": "x\ny\n", "ham/1.txt": "x", "ham/2.txt": "x\ny\nz", "deep/spam/1.txt": "x"}
    names, labels = labels_from_folders(corpus_of(tmp_path / "data", files))
    assert names == ("ham", "spam")
    assert labels.tolist() == [1, 0, 0, 1]  # deep/spam, ham, ham, spam
    assert labels.dtype == "uint8"
    _, of_lines = labels_from_folders(corpus_of(tmp_path / "data", {}, "line"))
    assert of_lines.tolist() == [1, 0, 0, 0, 0, 1, 1]


def test_validation_texts_are_numbered_like_the_training_texts(tmp_path: Path):
    corpus = corpus_of(tmp_path / "data", {"b/1.txt": "x", "c/1.txt": "x"})
    names, labels = labels_from_folders(corpus, ("a", "b", "c"))
    assert (names, labels.tolist()) == (("a", "b", "c"), [1, 2])
    with pytest.raises(DataError, match="has the classes c, but the training data only a, b: name its folders"):
        labels_from_folders(corpus, ("a", "b"))


def test_fewer_than_two_classes_are_an_error_that_shows_the_layout(tmp_path: Path):
    corpus = corpus_of(tmp_path / "data", {"1.txt": "x", "2.txt": "x"})
    with pytest.raises(
        DataError, match=r"all 2 files are in folder 'data': put the files of each class .* data/<label>/\*\.txt"
    ):
        labels_from_folders(corpus)
    with pytest.raises(DataError, match=r"the only file is in folder 'in': .* name the column .* with data\.label"):
        labels_from_folders(corpus_of(tmp_path / "in", {"1.txt": "x"}))


def test_a_class_without_text_is_not_dropped_in_silence(tmp_path: Path):
    corpus = corpus_of(tmp_path / "data", {"a/1.txt": "x", "b/1.txt": "x", "b/2.txt": "", "c/1.txt": ""})
    with pytest.raises(DataError, match=r"the classes c have no text .* from a, b: put text into these folders"):
        labels_from_folders(corpus)


def table(path: Path, labels: list[str | int]) -> Corpus:
    path.write_text("".join(f'{{"text": "x", "label": {json.dumps(label)}}}\n' for label in labels))
    return open_corpus((str(path),), Reading(label="label"), path.parent / "cache")


def test_the_class_of_a_row_is_in_its_column(tmp_path: Path):
    names, labels = labels_of(table(tmp_path / "a.jsonl", ["spam", "ham", "spam"]))
    assert (names, labels.tolist(), str(labels.dtype)) == (("ham", "spam"), [1, 0, 1], "uint8")
    names, labels = labels_of(table(tmp_path / "b.jsonl", [10, 9, -1]))
    assert (names, labels.tolist()) == (("-1", "9", "10"), [2, 1, 0])


def test_validation_rows_are_numbered_like_the_training_rows(tmp_path: Path):
    corpus = table(tmp_path / "a.jsonl", ["c", "a", "c"])
    assert labels_from_column(corpus, ("a", "b", "c"))[1].tolist() == [2, 0, 2]
    with pytest.raises(DataError, match=r"classes 'c', but the training .* only 'a', 'cc': .* \(did you mean 'cc'\?\)"):
        labels_from_column(corpus, ("a", "cc"))
    with pytest.raises(DataError, match="at least 2 classes, but the label of all 2 texts is 'a': give the column"):
        labels_from_column(table(tmp_path / "b.jsonl", ["a", "a"]))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"id2label": {"0": "spam", "1": "ham"}}, ("spam", "ham")),
        ({"label_names": ["spam", "ham"]}, ("spam", "ham")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, None),
        ({"id2label": {"0": "a", "1": "a"}}, None),
        ({"id2label": {"0": "a", "2": "b"}}, None),
        ({}, None),
        ([], None),
    ],
)
def test_a_checkpoint_names_its_classes_in_its_own_order(config, names, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert names_of_checkpoint(tmp_path) == names


def test_texts_are_numbered_as_the_checkpoint_that_learns_from_them_does(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "spam", "1": "ham", "2": "news"}}))
    corpus = table(tmp_path / "a.jsonl", ["ham", "spam", "ham"])
    names = names_to_number_by(corpus, str(tmp_path))
    assert names == ("spam", "ham", "news")
    assert labels_of(corpus, names)[1].tolist() == [1, 0, 1]
    other = table(tmp_path / "b.jsonl", ["ham", "eggs"])
    assert names_to_number_by(other, str(tmp_path)) is None
    assert names_to_number_by(corpus, {"architecture": "bert"}) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a", "y": 1}\n{"text": "b", "y": -100}\n{"text": "c", "y": 0}\n'),
        ("a.csv", "text,y\na,1\nb,-100\nc,0\n"),
    ],
)
def test_a_label_of_minus_100_is_none(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"line [23]: its label .*-100, which means no label"):
        open_corpus((str(tmp_path / name),), Reading(label="y"), tmp_path / "cache")
    corpus = open_corpus((str(tmp_path / name),), Reading(label="y", on_error="skip"), tmp_path / "cache")
    assert (corpus.label_names, list(corpus)) == (("0", "1"), ["a", "c"])
