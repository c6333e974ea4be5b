"""Objects in lines, compared with `json` for any cut of the file; each fault names its line."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import check_all_ways, cut_into, opened, written
from plimsoll.errors import DataError

BORDERS = st.sampled_from([(8, 8), (24, 16), (64, 24), (256, 64)])
TEXTS = st.text(st.sampled_from(list('ab \n\r\t"\\,\u00e9\u20ac\U0001f600\u2028\u0085')), max_size=12)
GOOD = b'{"text": "one", "y": "a"}\n{"text": "two", "y": "b"}\n\n'


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(TEXTS, st.sampled_from(["no", "yes", 7, True])), max_size=12),
    st.sampled_from(["\n", "\r\n", "\n \n"]),
    st.booleans(),
    st.booleans(),
    BORDERS,
)
def test_rows_do_not_depend_on_where_a_file_is_cut(rows, line_end: str, is_ascii: bool, is_ended: bool, borders):
    lines = [json.dumps({"id": i, "text": t, "y": y}, ensure_ascii=is_ascii) for i, (t, y) in enumerate(rows)]
    content = line_end.join(lines) + (line_end if is_ended else "")
    kept = [(text, y) for text, y in rows if text]
    with cut_into(*borders), tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "a.jsonl"), content)
        if not kept:
            with pytest.raises(DataError, match="nothing but white space"):
                opened(path, label="y")
            return
        corpus = opened(path, label="y")
        check_all_ways(corpus, [text for text, _ in kept], [3, 7, 1, 20, -1])
        assert corpus.labels is not None
        names = [corpus.label_names[number] for number in corpus.labels]
        assert names == [json.dumps(y) if isinstance(y, bool) else str(y) for _, y in kept]


FAULTS = [
    ('{"text": "x"', r"it is not JSON \(Expecting ',' delimiter at character 13\)"),
    ('{"text": 5, "y": 1}', "its column 'text' holds a number and no string"),
    ('{"text": null, "y": 1}', "its column 'text' holds null"),
    ('{"texts": "x", "y": 1}', r"there is no column 'text': did you mean 'texts'\? It has 'texts', 'y'"),
    ('["x"]', "it is a list and not an object"),
    ('{"text": "x", "y": 0.5}', "its label 'y' is a number: write a string or a whole number"),
    ('{"text": "x"}', "there is no column 'y': it has 'text'"),
    ('{"text": "\\ud800", "y": 1}', "half of a surrogate pair"),
    ("[" * 100_000, "it is nested too deep"),
    (b'{"text": "caf\xe9", "y": 1}', r"byte 66 \(0xe9\) is not UTF-8"),
    (b'{"text": "\0", "y": 1}', r"it is not JSON \(Invalid control character"),
]


@pytest.mark.parametrize("part_bytes", [16, 1 << 20])
@pytest.mark.parametrize(("line", "why"), FAULTS, ids=range(len(FAULTS)))
def test_each_fault_is_said_with_its_line_or_skipped(tmp_path: Path, line: str | bytes, why: str, part_bytes: int):
    raw = line.encode() if isinstance(line, str) else line
    path = written(tmp_path / "a.jsonl", GOOD + raw + b"\r\n" + GOOD)
    with cut_into(part_bytes if len(raw) < 1000 else 1 << 20, 64):
        with pytest.raises(DataError, match=rf"a\.jsonl as text: line 4: .*{why}.*set on_error: skip"):
            opened(path, label="y")
        corpus = opened(path, label="y", on_error="skip")
    check_all_ways(corpus, ["one", "two", "one", "two"], [2, 0])
    assert corpus.num_skipped == 1
    assert "a.jsonl: line 4: " in corpus.skipped[0]


def test_a_long_row_is_a_fault_and_is_read_no_further(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", GOOD + b'{"text": "' + b"x" * 1000 + b'", "y": 1}\n' + GOOD)
    with cut_into(64, 64):
        with pytest.raises(
            DataError, match=r"line 4: the row that begins at byte 53 has more than 500 B .*raise max_te"
        ):
            opened(path, label="y", max_text_bytes=500)
        corpus = opened(path, label="y", max_text_bytes=500, on_error="skip")
    check_all_ways(corpus, ["one", "two", "one", "two"], [2, 0])


def test_the_text_is_the_column_text_or_the_only_one_of_strings(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", '\n{"id": 3, "body": "b", "text": "t"}')
    assert list(opened(path)) == ["t"]
    assert list(opened(path, text="body")) == ["b"]
    assert list(opened(path, text=("body", "text"))) == ["b\nt"]
    assert list(opened(written(path, '{"id": 3, "body": "b", "y": "z"}'), label="y")) == ["b"]
    with pytest.raises(
        DataError, match="none of its columns 'id', 'body', 'y' is called text, and 2 .*; give one with text"
    ):
        opened(path)
    assert list(opened(written(tmp_path / "b.ndjson", "\ufeff" + '{"text": "\\u20ac"}'))) == ["\u20ac"]
