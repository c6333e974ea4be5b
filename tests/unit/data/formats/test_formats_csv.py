"""Comma- and tab-separated values, compared with `csv` for any cut of the file; each fault names its line."""

import csv
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import check_all_ways, cut_into, opened, written
from plimsoll.errors import DataError, PlimsollWarning

BORDERS = st.sampled_from([(8, 8), (24, 16), (64, 24), (256, 64)])
TEXTS = st.text(st.sampled_from(list('ab \n\r\t"\\,\u00e9\u20ac\U0001f600\u2028')), max_size=12)
NEWS = Path(__file__).parents[5] / "shared" / "data" / "text" / "agnews-test.csv"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["no", "yes", "7"]), TEXTS), max_size=12),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    st.sampled_from([".csv", ".tsv"]),
    st.sampled_from(["\n", "\r\n"]),
    BORDERS,
)
def test_rows_do_not_depend_on_where_a_file_is_cut(rows, quoting: int, suffix: str, line_end: str, borders):
    file, delimiter = io.StringIO(newline=""), "\t" if suffix == ".tsv" else ","
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=line_end)
    # `csv` does not quote a lone carriage return, which the reader takes for the end of a row
    if quoting == csv.QUOTE_MINIMAL:
        rows = [(label, text.replace("\r", "")) for label, text in rows]
    writer.writerows([("y", "text"), *rows])
    expected = list(csv.reader(io.StringIO(file.getvalue(), newline=""), delimiter=delimiter))[1:]
    kept = [(text, label) for label, text in expected if text]
    with cut_into(*borders), tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, f"a{suffix}"), file.getvalue())
        if not kept:
            with pytest.raises(DataError, match="a header and no row with text below it"):
                opened(path, label="y")
            return
        corpus = opened(path, label="y")
        check_all_ways(corpus, [text for text, _ in kept], [3, 7, 1, 20, -1])
        assert corpus.labels is not None
        assert [corpus.label_names[number] for number in corpus.labels] == [label for _, label in kept]


GOOD = 'id,text\n1,"one\nor more"\n\n2,two\n'


@pytest.mark.parametrize("part_bytes", [16, 1 << 20])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("3,x,y", "it has 3 fields where the first row has 2"),
        ("3", "it has 1 fields where the first row has 2"),
        ('3,"x"y', r"it is not csv \(',' expected after '\"'\)"),
        ("3,a\rb", r"it is not csv \(a return in a field without quotes\): correct the row; set"),
        (b"3,caf\xe9", r"byte 36 \(0xe9\) is not UTF-8"),
        (b"3,\0", "byte 33 is NUL"),
        ("3," + "x" * 5000, r"the row that begins at byte 31 has more than 1000 B \(at least [15]002 bytes\)"),
    ],
)
def test_each_fault_is_said_with_its_line_or_skipped(tmp_path: Path, row: str | bytes, why: str, part_bytes: int):
    raw = row.encode() if isinstance(row, str) else row
    path = written(tmp_path / "a.csv", GOOD.encode() + raw + b"\n4,four\n")
    with cut_into(part_bytes, 64):
        with pytest.raises(DataError, match=rf"a\.csv as text: line 6: {why}"):
            opened(path, max_text_bytes=1000)
        corpus = opened(path, max_text_bytes=1000, on_error="skip")
    check_all_ways(corpus, ["one\nor more", "two", "four"], [2, 0])
    assert (corpus.num_skipped, "a.csv: line 6: " in corpus.skipped[0]) == (1, True)


def test_a_stray_quote_inside_a_field_is_a_character(tmp_path: Path):
    path = written(tmp_path / "a.csv", GOOD + '3,x 5" disk\n4,"y ""z"""\n5,a "" b"\n')
    assert list(opened(path)) == ["one\nor more", "two", 'x 5" disk', 'y "z"', 'a "" b"']


@given(st.lists(st.text(st.sampled_from(list('a",\n \u00e9')), max_size=9), min_size=1, max_size=9), BORDERS)
def test_rows_are_those_of_pythons_csv_wherever_a_file_is_cut(pieces: list[str], borders: tuple[int, int]):
    content = "x,y\n" + "".join(pieces)
    try:
        rows = [row for row in csv.reader(io.StringIO(content, newline=""), strict=True) if row][1:]
        is_sound = all(len(row) == 2 for row in rows)
    except csv.Error:
        is_sound = False
    kept = [row[1] for row in rows if row[1]] if is_sound else []
    with cut_into(*borders), tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "a.csv"), content)
        if not kept:
            with pytest.raises(DataError):
                opened(path, text="y")
        else:
            check_all_ways(opened(path, text="y"), kept, [3, 7, 1, 20, -1])


def test_lines_that_a_quote_takes_are_counted_where_rows_are_skipped(tmp_path: Path):
    path = written(tmp_path / "a.csv", GOOD + '3,"x 5 disk\n4,y\n5,z\n')
    corpus = opened(path, on_error="skip")
    assert corpus.num_skipped == 1
    assert "line 6: a quote in it that is not closed takes the 2 lines after it into the same row" in corpus.skipped[0]


def test_a_quote_that_is_not_closed_takes_the_rest_with_it(tmp_path: Path):
    path = written(tmp_path / "a.csv", GOOD + '3,"x\n4,y\n')
    with pytest.raises(
        DataError, match="line 6: a quote in it that is not closed takes the 1 lines after it into the same row: cor"
    ):
        opened(path)
    assert list(opened(path, on_error="skip")) == ["one\nor more", "two"]


@given(st.lists(st.text(st.sampled_from(list('ab "\\,\r\u00e9')), max_size=12), max_size=12), BORDERS)
def test_quotes_without_a_meaning_are_characters_wherever_a_file_is_cut(texts, borders):
    content = "".join(f'{number}"\t{text}\n' for number, text in enumerate(texts))
    # a carriage return at the end of a text belongs to the end of the line
    kept = [text for text in (text.rstrip("\r") for text in texts) if text]
    with cut_into(*borders), tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "a.tsv"), content)
        if not kept:
            with pytest.raises(DataError, match="nothing but white space"):
                opened(path, quotes=False, header=False, text="2")
            return
        check_all_ways(opened(path, quotes=False, header=False, text="2"), kept, [3, 7, 1, 20, -1])


def test_that_quotes_may_have_no_meaning_is_said_where_one_is_not_closed(tmp_path: Path):
    path = written(tmp_path / "a.tsv", 'id\ttext\n1\t"x" 5 disk\n2\ty\n')
    with pytest.raises(DataError, match="set quotes: false if quotes are ordinary characters in this file"):
        opened(path)
    assert list(opened(path, quotes=False)) == ['"x" 5 disk', "y"]
    path = written(tmp_path / "b.tsv", '"x 5 disk\ny\nz\n')
    with pytest.raises(DataError, match="its first row is not csv .*set quotes: false"):
        opened(path, header=False)
    assert list(opened(path, header=False, quotes=False)) == ['"x 5 disk', "y", "z"]


@pytest.mark.parametrize(
    ("content", "fields", "texts"),
    [
        ("3,a,b\n4,c,d\n", {"text": "2"}, ["a", "c"]),
        ("3,a,b\n4,c,d\n", {"text": ("2", "3"), "header": False}, ["a\nb", "c\nd"]),
        ("x,a\n1,b\n", {"text": "a"}, ["b"]),
        ("x,text\n1,b\n", {}, ["b"]),
        ("text\nb", {"header": False}, ["text", "b"]),
        ("1,2\n3,x", {"text": "2", "header": True}, ["x"]),
        ("7,a\n", {}, ["a"]),  # the first row contains a number, so it is not a header
        ("\ufeffid,body\r\n1,b\r\n", {"header": True}, ["b"]),
    ],
)
def test_whether_the_first_row_names_the_columns(tmp_path: Path, content: str, fields: dict, texts: list[str]):
    assert list(opened(written(tmp_path / "a.csv", content), **fields)) == texts


@pytest.mark.parametrize(
    ("content", "fields", "why"),
    [
        ("name,body\nx,y\n", {}, r"it is unclear whether its first row \('name', 'body'\) names the columns"),
        (
            "name,body\nx,y\n",
            {"text": "bodi"},
            r"there is no column 'bodi': did you mean 'body'\? It has 'name', 'body'",
        ),
        ("1,a,b\n", {}, "none of its columns '1', '2', '3' is called text, and 2 of them could be the text"),
        ('"a"b\n', {"header": False}, r"its first row is not csv \(',' expected"),
        (
            "text,id,text\nx,1,y\n",
            {},
            r"2 of its columns \(1, 3\) are called 'text', so the name is ambiguous, .* rename all but one",
        ),
        ("y,a,y\n1,b,2\n", {"text": "a", "label": "y"}, r"2 of its columns \(1, 3\) are called 'y'"),
    ],
)
def test_columns_that_cannot_be_found_are_said(tmp_path: Path, content: str, fields: dict, why: str):
    with pytest.raises(DataError, match=rf"a\.csv as text: {why}"):
        opened(written(tmp_path / "a.csv", content), **fields)


def test_a_column_that_is_not_asked_for_may_be_there_twice(tmp_path: Path):
    assert list(opened(written(tmp_path / "a.csv", "x,text,x\n1,b,2\n"))) == ["b"]


def test_a_header_without_rows_is_said(tmp_path: Path):
    remedy = "and there is no other text: add rows, or set header: false if the first row is a text"
    for number, content in enumerate(["id,text\n", "\ufefftext", "id,text\r\n\r\n1,\r\n"]):
        with pytest.raises(DataError, match=rf"the only file of .*\.csv has a header and no row with .*, {remedy}"):
            opened(written(tmp_path / f"{number}.csv", content))
        written(tmp_path / "all" / f"{number}.csv", content)
    written(tmp_path / "all" / "3.txt", " ")
    with pytest.raises(DataError, match="3 of the 4 files of .* have a header and no row"):
        opened(tmp_path / "all")
    assert list(opened(tmp_path / "0.csv", header=False, text="2")) == ["text"]


def test_escapes_become_the_characters_they_mean(tmp_path: Path):
    path = written(tmp_path / "a.csv", r"1,a\nb\tc\\nd\x\ e" + "\n")
    assert list(opened(path)) == [r"a\nb\tc\\nd\x\ e"]
    assert list(opened(path, escapes=True)) == ["a\nb\tc\\nd\\x\\ e"]


def test_long_fields_and_long_first_rows_are_read(tmp_path: Path):
    rows = ["x" * 300_000, "y" * 1_500_000, "z"]
    path = written(tmp_path / "a.csv", "".join(f"1,{row}\n" for row in reversed(rows)) + f"2,{rows[1]}\n")
    limit = csv.field_size_limit()
    assert list(opened(path)) == [*reversed(rows), rows[1]]
    assert csv.field_size_limit() == limit


@pytest.mark.skipif(not NEWS.is_file(), reason="AG News is not beside this repository")
def test_ag_news():
    with tempfile.TemporaryDirectory() as folder, cut_into(1 << 16, 1 << 16):
        path = written(Path(folder, "news.csv"), NEWS.read_bytes())
        corpus = opened(path, text=("2", "3"), label="1")
        with NEWS.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        check_all_ways(corpus, [f"{title}\n{body}" for _, title, body in rows], [3, 7000, 17])
        assert corpus.label_names == ("1", "2", "3", "4")
        assert corpus.labels is not None
        assert [corpus.label_names[number] for number in corpus.labels] == [label for label, _, _ in rows]


@pytest.mark.parametrize("num_before", [0, 3, 160_000])  # the last case lies in a later part of the file
def test_two_stray_quotes_that_swallow_rows_are_warned_of(tmp_path: Path, num_before: int):
    before = "".join(f"text {number},0\n" for number in range(num_before))
    rows = "".join(f"row {number},1\n" for number in range(30))
    path = written(tmp_path / "a.csv", f'text,label\n{before}"one,1\n{rows}x",1\nlast,0\n')
    said = (
        rf"a row may include other rows by mistake, .*a\.csv: line {num_before + 2}: a quoted field takes the 30 lines"
    )
    with pytest.warns(PlimsollWarning, match=said):
        corpus = opened(path)
    assert len(corpus) == num_before + 2
    with pytest.warns(PlimsollWarning, match=said):  # also if the index comes from the cache
        opened(path)
    assert len(opened(path, quotes=False)) == num_before + 33


@pytest.mark.parametrize(
    "text", ["one\ntwo\nthree\nfour", "Dear all,\nthanks, and so,\nor, well,\nbye", "a,b\none, of all\nc", "\n\n\n,"]
)  # fmt: skip
def test_text_over_several_lines_is_not(tmp_path: Path, text: str):
    assert list(opened(written(tmp_path / "a.csv", f'text,label\n"{text}",1\n'))) == [text]
    assert list(opened(written(tmp_path / "b.csv", f'text\n"{text}"\n'))) == [text]
