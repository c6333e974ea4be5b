"""Where the rows of a JSON file that is one object are: read, or refused with what to type."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from corpora import opened, written
from plimsoll.data.formats import Reading
from plimsoll.data.text.json_shapes import field_of_rows
from plimsoll.errors import DataError

ROWS = [{"text": f"text {number}", "label": number % 2} for number in range(5)]
TEXTS = [row["text"] for row in ROWS]


def shape_of(value: Any, **asked: Any) -> str | None:
    return field_of_rows(iter([json.dumps(value).encode()]), Reading(**asked))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "value",
    [
        {"version": "1.1", "data": ROWS},
        {"data": ROWS, "about": {"text": "of the file"}, "numbers": [1, 2], "empty": []},
        {"a b": ROWS},
    ],
)
def test_the_only_list_of_objects_is_read(tmp_path: Path, value: dict[str, Any], indent: int | None):
    corpus = opened(written(tmp_path / "a.json", json.dumps(value, indent=indent)), label="label")
    assert list(corpus) == TEXTS
    assert corpus.labels is not None
    assert corpus.labels.tolist() == [0, 1, 0, 1, 0]


def test_a_fault_in_a_list_inside_an_object_names_its_line(tmp_path: Path):
    path = written(tmp_path / "a.json", '{"version": "1",\n"data": [\n{"text": "one"},\n{"body": "two"}, 3]}')
    with pytest.raises(DataError, match=r"a\.json as text: line 4: there is no column 'text': it has 'body'"):
        opened(path)
    corpus = opened(path, on_error="skip")
    assert list(corpus) == ["one"]
    assert corpus.num_skipped == 2


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"train": ROWS, "test": ROWS}, "'train' is a list of 5 objects, 'test' is .* `jq -c '.train\\[\\]'"),
        ({"text": "one", "data": ROWS}, r"a text of its own and a list of objects .* put \[ and \] around the object"),
        ({"text": ["one", "two"], "label": [0, 1]}, "one object of columns .*'text' is a list of 2.*read_json"),
        ({"text": {"0": "one"}, "label": {"0": 1}}, "one object of columns .*'text' is an object"),
        ({"version": "1.1", "sentences": ["one", "two"]}, "without a list of objects, and none of its fields 'vers"),
        ({"version": "1.1", "data": [["one", 0], ["two", 1]]}, "'data' is a list of 2"),
        ({"version": "1.1", "data": []}, "'data' is a list of 0"),
        ({"version": "1.1", "data": {"rows": ROWS}}, "'data' is an object"),
        ({"features": [{"name": "text"}], "rows": [{"row": ROWS[0]}]}, "'features' is a list of 1 objects, 'rows'"),
    ],
)  # fmt: skip
def test_other_objects_are_refused_with_what_is_in_them(tmp_path: Path, value: dict[str, Any], why: str):
    path = written(tmp_path / "x" / "a.json", json.dumps(value))
    with pytest.raises(DataError, match=rf"a\.json as text: .*{why}"):
        opened(path)
    written(tmp_path / "x" / "b.txt", "one\n")
    corpus = opened(tmp_path / "x", on_error="skip")
    assert list(corpus) == ["one"]
    assert any(re.search(why, entry) for entry in corpus.skipped)


def test_nested_questions_are_an_error_that_names_the_fields_there_are(tmp_path: Path):
    articles = [{"title": "a", "paragraphs": [{"context": "one", "qas": [{"question": "why"}]}]}]
    path = written(tmp_path / "a.json", json.dumps({"version": "1.1", "data": articles}))
    with pytest.raises(DataError, match=r"none of its columns 'title', 'paragraphs' .* 'paragraphs' holds objects"):
        opened(path)
    with pytest.raises(DataError, match=r"there is no column 'context': it has 'title', 'paragraphs'"):
        opened(path, text="context")
    lines = written(tmp_path / "b.jsonl", json.dumps({"version": "1.1", "data": ROWS}))
    with pytest.raises(DataError, match=r"'data' holds objects"):  # a line is a row, but its only string no text
        opened(lines)
    assert list(opened(lines, text="version")) == ["1.1"]


def test_an_object_is_one_text_where_that_is_what_was_asked_for(tmp_path: Path):
    assert list(opened(written(tmp_path / "a.json", json.dumps({"body": "one", "stars": 3})))) == ["one"]
    commented = {"body": "one", "comments": [{"by": "me"}, {"by": "you"}]}
    path = written(tmp_path / "b.json", json.dumps(commented))
    assert list(opened(path, text="body")) == ["one"]
    assert list(opened(path, text="by")) == ["me", "you"]  # the same file, asked for otherwise
    assert shape_of({"tokens": ["a", "b"], "tags": ["X", "O"]}, is_tagged=True) is None
    assert shape_of({"version": "1", "data": [{"tokens": ["a"], "tags": ["X"]}]}, is_tagged=True) == "data"
    assert shape_of(ROWS) is None


def test_a_list_of_no_objects_is_said(tmp_path: Path):
    for number, value in enumerate((["one", "two"], [["one", 1]])):
        with pytest.raises(DataError, match=r"line 1: it is (text|a list) and not an object"):
            opened(written(tmp_path / f"{number}.json", json.dumps(value)))
