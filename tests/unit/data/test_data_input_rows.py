"""The rows of an input file, none left out: formats, faults, extra columns, and reading from a given row."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from plimsoll.data.formats import Reading
from plimsoll.data.input_rows import InputRow, open_rows
from plimsoll.errors import DataError

RECORDS = [
    {"id": number, "text": text} for number, text in enumerate(["one", "zwei – drei", "a\nb", 'say "no"', "沈む 🚢"])
]
TEXTS = [record["text"] for record in RECORDS]


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS), encoding="utf-8")


def table_of_text(path: Path, delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "text"], *([record["id"], record["text"]] for record in RECORDS)])


def packed(path: Path) -> None:
    inner = path.with_suffix("")
    WRITERS[inner.suffix](inner)
    content = inner.read_bytes()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    else:
        with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(content)


def arrow(path: Path) -> None:
    table = pyarrow.Table.from_pylist(RECORDS)
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


WRITERS: dict[str, Callable[[Path], None]] = {
    ".jsonl": jsonl,
    ".csv": table_of_text,
    ".tsv": lambda path: table_of_text(path, "\t"),
    ".gz": packed,
    ".zst": packed,
    ".parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path),
    ".arrow": arrow,
}


def rows_of(path: Path, first: int = 0, keep: tuple[str, ...] = (), **reading: Any) -> list[InputRow]:
    return list(open_rows(path, Reading(**reading), keep).rows(first))


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson.gz", "a.csv", "a.tsv", "a.csv.gz", "a.jsonl.zst", "a.parquet", "a.arrow"]
)
def test_every_format_gives_all_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.replace("ndjson", "jsonl")
    WRITERS[path.suffix](path)
    rows = rows_of(path, keep=("id",))
    assert [row.text for row in rows] == TEXTS
    assert [row.number for row in rows] == [0, 1, 2, 3, 4]
    assert [str(row.kept["id"]) for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows_of(path, first=3, keep=("id",)) == rows[3:]


def test_lines_of_a_text_are_rows_also_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n\xff\nlast")
    assert rows_of(path) == [
        InputRow(0, "one"),
        InputRow(1, "", "the text is empty"),
        InputRow(2, "two"),
        InputRow(3, "", "it is not UTF-8 (byte 0xff at 0)"),
        InputRow(4, "last"),
    ]


def test_rows_of_jsonl_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "ok", "id": 1}', '{"id": 2}', "{", '{"text": null}', "[1]", "", '{"text": ""}', '{"text": 5}']
    path.write_text("\n".join([*lines, '{"text": "\\ud800"}', "[" * 100_000]) + "\n")
    found = rows_of(path, keep=("id",))
    assert [row.number for row in found] == list(range(9))  # a blank line does not count as a row
    assert [row.text for row in found] == ["ok", *[""] * 8]
    faults = [row.fault or "" for row in found]
    expected = ["", "there is no column 'text'", "it is not JSON", "holds null and no string", "and not an object",
                "the text is empty", "holds a number and no string", "half of a surrogate pair",
                "nested too deep"]  # fmt: skip
    assert [said in fault for said, fault in zip(expected, faults, strict=True)] == [True] * 9
    assert found[1].kept == {"id": 2}


def test_rows_of_csv_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,ok\n2\n\n3,"a\nb"\n4,\n5,x,y\n6,"open\nuntil\nthe end\n')
    found = rows_of(path, keep=("id",))
    assert [row.text for row in found] == ["ok", "", "a\nb", "", "", ""]
    assert [row.fault for row in found] == [
        None,
        "it has 1 fields where the first row has 2",
        None,
        "the text is empty",
        "it has 3 fields where the first row has 2",
        "a quote in it that is not closed takes the 2 lines after it into the same row",
    ]


def test_columns_without_names_have_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("3,head one,body one\n4,head two,body two\n")
    rows = rows_of(path, text=("2", "3"), keep=("1",))
    assert [(row.text, row.kept) for row in rows] == [
        ("head one\nbody one", {"1": "3"}),
        ("head two\nbody two", {"1": "4"}),
    ]


def test_the_only_column_of_strings_is_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1, "body": "x"}\n{"n": 2, "body": "y"}\n')
    assert [row.text for row in rows_of(path)] == ["x", "y"]
    path.write_text('{"title": "t", "body": "x"}\n')
    with pytest.raises(DataError, match="none of its columns"):
        rows_of(path)


def test_a_first_row_without_a_text_does_not_make_another_column_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x"}\n{"id": "y", "text": "z"}\n')
    assert [row.text for row in rows_of(path)] == ["", "z"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_a_row_that_is_too_long_is_a_fault_and_the_next_is_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    forms = {".jsonl": '{{"text": "{}"}}\n', ".csv": '"{}",1\n', ".txt": "{}\n"}
    form = forms[path.suffix]
    head = "text,n\n" if path.suffix == ".csv" else ""
    path.write_text(head + form.format("a") + form.format("b" * 3_000_000) + form.format("c"))
    rows = rows_of(path, max_text_bytes=1 << 20)
    assert [row.text for row in rows] == ["a", "", "c"]
    assert "the row has 2.9 MiB, more than 1.0 MiB" in (rows[1].fault or "")


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.txt"):
        (tmp_path / name).touch()
        assert rows_of(tmp_path / name) == []


def test_it_tells_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 600_000)
    told: list[int] = []
    assert sum(1 for _ in open_rows(path, Reading()).rows(0, told.append)) == 600_000
    assert told[-1] == path.stat().st_size
    assert told == sorted(told)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        open_rows(tmp_path / "a.jsonl", Reading())
    with pytest.raises(DataError, match="is a folder"):
        open_rows(tmp_path, Reading())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-20])
    with pytest.raises(DataError, match="cannot unpack"):
        rows_of(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot read"):
        rows_of(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(DataError, match="plain text, which has no column 'id'"):
        rows_of(tmp_path / "a.txt", keep=("id",))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_column_that_is_not_there_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    WRITERS[suffix](path)
    with pytest.raises(DataError, match="no column 'txet': did you mean 'text'"):
        rows_of(path, text="txet")
    with pytest.raises(DataError, match="no column 'no'"):
        rows_of(path, keep=("no",))


def test_another_state_of_the_file_has_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x\n")
    before = open_rows(path, Reading()).identity
    assert open_rows(path, Reading()).identity == before
    path.write_text("y\n")
    assert open_rows(path, Reading()).identity != before


def test_the_list_in_an_object_holds_the_rows_and_what_may_be_either_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": "1.1", "data": RECORDS}))
    assert [row.text for row in rows_of(path)] == TEXTS
    path.write_text(json.dumps({"train": RECORDS, "test": RECORDS}))
    with pytest.raises(DataError, match=r"cannot use .*a\.json: it is one object with 2 lists of objects"):
        rows_of(path)
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"title": "one", "paragraphs": RECORDS}))
    with pytest.raises(DataError, match=r"cannot use .*b\.jsonl: .*'paragraphs' holds objects"):
        rows_of(path)
