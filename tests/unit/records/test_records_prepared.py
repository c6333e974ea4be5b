"""The record of prepared data: the folders that training reads, and the properties that follow from its fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.records.prepared import Prepared, PreparedText

COUNTS = {"num_documents": 2, "num_bytes": 9, "num_samples": 3, "num_skipped": 0, "skipped": ()}


@pytest.mark.parametrize(
    ("folders", "read"),
    [
        ({}, ["index"]),
        ({"labels_folder": "labels"}, ["index", "labels"]),
        ({"tokens_folder": "tokens", "spans_folder": "spans", "packs_folder": "packs"}, ["tokens", "spans", "packs"]),
    ],
    ids=str,
)
def test_training_reads_the_tokens_or_the_texts_and_what_is_made_of_them(folders: dict[str, str], read: list[str]):
    text = PreparedText(corpus_key="key", index_folder="index", **folders, **COUNTS)
    assert text.folders == tuple(map(Path, read))


@pytest.mark.parametrize(("num_long", "num_truncated", "has_windows"), [(0, 0, False), (2, 2, False), (2, 0, True)])
def test_long_texts_are_several_samples_unless_they_are_truncated(num_long, num_truncated, has_windows):
    counts = COUNTS | {"num_long_texts": num_long, "num_truncated": num_truncated}
    assert PreparedText(corpus_key="key", index_folder="index", **counts).has_windows == has_windows


def test_rows_are_filled_with_the_end_token_where_there_is_no_other(tmp_path: Path):
    text = PreparedText(corpus_key="key", index_folder="index", **COUNTS)
    prepared = Prepared(key="key", train=text, tokenizer_folder="tokenizer", vocab_size=9, end_id=4)
    assert (prepared.pad_id, prepared.num_labels) == (4, None)
    assert prepared.model_copy(update={"padding_token": 7, "label_names": ("a", "b")}).pad_id == 7
    prepared.save(tmp_path / "prepared.json")
    assert Prepared.load(tmp_path / "prepared.json") == prepared
