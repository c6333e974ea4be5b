"""Conversion of JSON files to JSON lines: the objects that `json` finds, with the lines where they begin.

If a file is one object, its list of rows is found, or an error states the remedy.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import opened, written
from plimsoll.data.formats import Reading
from plimsoll.data.text.json_values import are_lines, field_of_rows, fields_of_object, json_lines
from plimsoll.errors import DataError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.sampled_from(list('a"\\\n\r\u20ac\U0001f600[]{},:')), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=5)


def cut(content: bytes, num_bytes: int) -> Iterator[bytes]:
    return (content[begin : begin + num_bytes] for begin in range(0, len(content), num_bytes))


def lines(content: str | bytes, num_bytes: int = 1 << 20, most_bytes: int = 1 << 20) -> list[bytes]:
    raw = content.encode() if isinstance(content, str) else content
    return b"".join(json_lines(cut(raw, num_bytes), most_bytes)).split(b"\n")


@settings(max_examples=150, deadline=None)
@given(OBJECTS, st.sampled_from([None, 0, 2]), st.booleans(), st.sampled_from([1, 3, 7, 1 << 20]), st.booleans())
def test_the_objects_are_those_of_json(objects, indent, ascii_only: bool, num_bytes: int, is_list: bool):
    dump = {"indent": indent, "ensure_ascii": ascii_only}
    content = json.dumps(objects, **dump) if is_list else "\n".join(json.dumps(one, **dump) for one in objects)
    found = [line for line in lines(content, num_bytes) if line.strip()]
    assert [json.loads(line) for line in found] == objects


def test_an_object_is_in_the_line_in_which_it_begins():
    found = lines('\n[\n  {"a":\n 1},\n\n  {"a": 2}, {"a": 3},\n {"a": 4}]\n')
    assert [(number, json.loads(line)["a"]) for number, line in enumerate(found, 1) if line.strip()] == [
        (3, 1),
        (6, 2),
        (7, 3),  # the second object of its line
        (8, 4),
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[\n{"a": 1}\n{"a": 2}]', "line 3: .*neither a comma nor the end of the list"),
        ('[{"a": 1},\n]', "line 2: .*no object after a comma"),
        ('[{"a": 1}', "line 1: .*the list does not end"),
        ('[{"a": 1}]\n\nx', "line 3: .*text after the end of the list"),
        ('[\n\n{"a": tru}]', "line 3: .*Expecting value"),
        ('[{"a":\n "', "line 2: .*Unterminated string"),
        (b'[\n{"a": "\xff"}]', "line 1: .*byte 0xff is not UTF-8"),
        ('["' + "x" * 3000 + '"]', r"line 1: .*more than 1000 B"),
        ("[" * 100_000, "line 1: .*it is nested too deep"),
    ],
)
def test_what_is_no_list_is_said_with_its_line(content: str | bytes, why: str):
    with pytest.raises(DataError, match=why):
        lines(
            content,
            num_bytes=64 if "xx" in str(content) else 1 << 20,
            most_bytes=1000 if "xx" in str(content) else 1 << 20,
        )


@pytest.mark.parametrize(
    ("head", "is_of_lines"),
    [
        (b'\xef\xbb\xbf\n{"a": 1}\n{', True),
        (b'{"a": 1}\n\n', False),  # the only line: its object may contain the rows
        (b'{\n"a": 1}', False),
        (b'[{"a": 1}]', False),
        (b"", False),
        (b"1\n", False),
    ],
)
def test_a_first_line_of_several_that_is_an_object_makes_it_json_lines(head: bytes, is_of_lines: bool):
    assert are_lines(head) is is_of_lines


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), OBJECTS, st.sampled_from([None, 2]), st.integers(1, 9))
def test_the_list_in_an_object_is_that_of_json(before, objects, indent, num_bytes: int):
    whole = {**before, "rows": objects, "after": before}
    content = json.dumps(whole, indent=indent).encode()
    fields = fields_of_object(cut(content, num_bytes), 1 << 20)
    assert fields is not None
    assert list(fields) == list(whole)
    assert fields["rows"].num_objects == len(objects)
    found = b"".join(json_lines(cut(content, num_bytes), 1 << 20, "rows")).split(b"\n")
    assert [json.loads(line) for line in found if line.strip()] == objects
    assert fields_of_object(cut(content * 2, num_bytes), 1 << 20) is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"a": 1', "the object does not end"),
        ('{"a": 1,}', "no field after a comma"),
        ('{"a" 1}', "a name without a colon"),
        ("{a: 1}", "a field without a name"),
        ('{"a": 1\n"b": 2}', "line 2: .*neither a comma nor the end of the object after a field"),
        ('{"a": 1, "a": 2}', "the field 'a' twice"),
        ('{"a": [1}', "neither a comma nor the end of the list"),
    ],
)
def test_what_is_no_object_is_said(content: str, why: str):
    with pytest.raises(DataError, match=why):
        fields_of_object(iter([content.encode()]), 1 << 20)


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
    # a line is a row, but its only string is not the text
    with pytest.raises(DataError, match=r"'data' holds objects"):
        opened(lines)
    assert list(opened(lines, text="version")) == ["1.1"]


def test_an_object_is_one_text_where_that_is_what_was_asked_for(tmp_path: Path):
    assert list(opened(written(tmp_path / "a.json", json.dumps({"body": "one", "stars": 3})))) == ["one"]
    commented = {"body": "one", "comments": [{"by": "me"}, {"by": "you"}]}
    path = written(tmp_path / "b.json", json.dumps(commented))
    assert list(opened(path, text="body")) == ["one"]
    assert list(opened(path, text="by")) == ["me", "you"]  # the same file with another text column
    assert shape_of({"tokens": ["a", "b"], "tags": ["X", "O"]}, is_tagged=True) is None
    assert shape_of({"version": "1", "data": [{"tokens": ["a"], "tags": ["X"]}]}, is_tagged=True) == "data"
    assert shape_of(ROWS) is None


def test_a_list_of_no_objects_is_said(tmp_path: Path):
    for number, value in enumerate((["one", "two"], [["one", 1]])):
        with pytest.raises(DataError, match=r"line 1: it is (text|a list) and not an object"):
            opened(written(tmp_path / f"{number}.json", json.dumps(value)))
