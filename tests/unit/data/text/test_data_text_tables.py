"""Tables in parquet, Arrow and Hugging Face data sets: columns, classes and faults."""

import builtins
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from corpora import check_all_ways, opened, written
from plimsoll.data.formats import Reading
from plimsoll.data.text import convert, tables
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.errors import DataError

datasets = pytest.importorskip("datasets", reason="datasets is an extra")

ROWS = {"id": [1, 2, 3, 4], "text": ["one", "two\nlines", "", "caf\u00e9"], "y": ["b", "a", "c", "b"]}


@pytest.fixture(autouse=True)
def _quiet_and_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


def classes_of(corpus: Corpus) -> list[str]:
    assert corpus.labels is not None
    return [corpus.label_names[number] for number in corpus.labels]


def parquet(path: Path, rows: dict | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(rows or ROWS), path, **options)
    return path


def arrow(path: Path, is_stream: bool) -> Path:
    table = pyarrow.table(ROWS)
    make = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, 2)
    return path


def test_parquet_and_both_kinds_of_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "_BATCH_ROWS", 3)
    paths = [
        parquet(tmp_path / "a.parquet", row_group_size=2),
        arrow(tmp_path / "b.arrow", is_stream=True),
        arrow(tmp_path / "c.arrow", is_stream=False),
    ]
    for path in paths:
        corpus = opened(path, label="y")
        check_all_ways(corpus, ["one", "two\nlines", "caf\u00e9"], [2, 0])
        assert classes_of(corpus) == ["b", "a", "b"]
        assert corpus.label_names == ("a", "b")  # no row of class c has text


def test_columns_joined_and_of_other_kinds_of_strings(tmp_path: Path):
    rows = {
        "title": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
        "body": pyarrow.array(["x", "y", "z"], pyarrow.large_string()),
        "good": [True, False, True],
    }
    path = parquet(tmp_path / "a.parquet", rows)
    corpus = opened(path, text=("title", "body"), label="good")
    assert list(corpus) == ["a\nx", "b\ny", "a\nz"]
    assert classes_of(corpus) == ["true", "false", "true"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"text": "txt"}, r"there is no column 'txt': did you mean 'text'\? It has 'id', 'text', 'y'"),
        ({"text": "id"}, r"the column 'id' of .*a\.parquet holds int64 and no strings: give a column of text"),
        ({"label": "z"}, "there is no column 'z'"),
    ],
)
def test_columns_that_cannot_be_used_are_said(tmp_path: Path, fields: dict[str, str], why: str):
    with pytest.raises(DataError, match=why):
        opened(parquet(tmp_path / "a.parquet"), **fields)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ({"text": ["a", None, "c"], "y": [1, 2, 3]}, "row 2 has no text .null.: correct it, or set on_error: skip"),
        ({"text": ["a", "b" * 200, "c"], "y": [1, 2, 3]}, r"row 2 has more than 100 B of text \(200 bytes\)"),
        ({"text": ["a", "b", "c"], "y": [1, None, 3]}, "row 2 has no class in 'y'"),
    ],
)
def test_each_fault_is_said_with_its_row_or_skipped(tmp_path: Path, rows: dict, why: str):
    path = parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError, match=rf"cannot use .*a\.parquet as text: {why}"):
        opened(path, label="y", max_text_bytes=100)
    corpus = opened(path, label="y", max_text_bytes=100, on_error="skip")
    assert (list(corpus), classes_of(corpus), corpus.num_skipped) == (["a", "c"], ["1", "3"], 1)
    assert corpus.skipped[0].startswith(f"{path}: row 2 has ")


def test_strings_that_are_not_utf8_are_faults(tmp_path: Path):
    strings = pyarrow.array([b"a", b"\xff", b"c"]).cast(pyarrow.string(), safe=False)
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 3, strings.buffers())})
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="row 2 is not UTF-8"):
        opened(path)
    assert list(opened(path, on_error="skip")) == ["a", "c"]


def test_a_dataset_is_converted_as_it_was_chosen(tmp_path: Path):
    names = datasets.ClassLabel(names=["world", "sports"])
    dataset = datasets.Dataset.from_dict({"text": ["one", "two", "three", "four"], "label": [1, 0, -1, 1]})
    dataset = dataset.cast_column("label", names).select([3, 0, 1])
    corpus = open_corpus((dataset,), Reading(label="label"), tmp_path / "cache")
    check_all_ways(corpus, ["four", "one", "two"], [2, 0])
    assert classes_of(corpus) == ["sports", "sports", "world"]
    assert corpus.label_names == ("sports", "world")
    again = open_corpus((dataset,), Reading(label="label"), tmp_path / "cache")
    assert again.key == corpus.key
    assert len(list((tmp_path / "cache").glob("packed-*[!k]"))) == 1


def test_a_class_that_is_none_is_a_fault(tmp_path: Path):
    dataset = datasets.Dataset.from_dict({"text": ["one"], "label": [-1]})
    dataset = dataset.cast_column("label", datasets.ClassLabel(names=["a", "b"]))
    with pytest.raises(DataError, match="row 1 has no class in 'label'"):
        open_corpus((dataset,), Reading(label="label"), tmp_path / "cache")


def test_a_saved_folder_is_known_as_a_dataset(tmp_path: Path):
    train, test = (datasets.Dataset.from_dict({"text": [text]}) for text in ("one", "two"))
    train.save_to_disk(tmp_path / "saved")
    assert list(opened(tmp_path / "saved")) == ["one"]
    assert list(opened(tmp_path / "saved")) == ["one"]
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    assert list(opened(tmp_path / "both")) == ["one"]
    source = f"hf:{tmp_path / 'both'}::test"
    assert list(open_corpus((source,), Reading(), tmp_path / "cache")) == ["two"]
    with pytest.raises(DataError, match="has the splits 'train', 'test': choose one with hf:<folder>::<split>"):
        open_corpus((f"hf:{tmp_path / 'both'}::dev",), Reading(), tmp_path / "cache")


def test_a_name_goes_through_load_dataset(tmp_path: Path):
    folder = tmp_path / "reviews"
    written(folder / "train.csv", "text,label\ngood,1\nbad,0\n")
    written(folder / "test.csv", "text,label\nfine,1\n")
    corpus = open_corpus((f"hf:{folder}",), Reading(label="label"), tmp_path / "cache")
    assert (list(corpus), classes_of(corpus)) == (["good", "bad"], ["1", "0"])
    assert list(open_corpus((f"hf:{folder}::test",), Reading(), tmp_path / "cache")) == ["fine"]
    with pytest.raises(
        DataError, match=r"cannot load hf:no-such-name/anywhere .*: check the name, and write hf:NAME:C"
    ):
        open_corpus(("hf:no-such-name/anywhere",), Reading(), tmp_path / "cache")


def test_what_is_no_plain_dataset_is_refused(tmp_path: Path):
    streaming = datasets.Dataset.from_dict({"text": ["x"]}).to_iterable_dataset()
    with pytest.raises(DataError, match="is a IterableDataset: give a path, hf:NAME, or a Dataset without streaming"):
        open_corpus((streaming,), Reading(), tmp_path / "cache")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import_module = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "datasets":
            raise ImportError(name)
        return import_module(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"datasets is not installed: run pip install 'torch-plimsoll\[datasets\]'"):
        open_corpus(("hf:imdb",), Reading(), tmp_path / "cache")


def test_every_format_that_is_converted_as_a_table_has_its_opener():
    assert tuple(tables.OPENERS) == convert._TABLES
