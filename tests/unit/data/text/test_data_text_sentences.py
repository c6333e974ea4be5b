"""Sentences of tagged words: equal for every file format, and each fault names its place."""

import json
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from plimsoll.data.formats import Reading
from plimsoll.data.formats.tagged import words_and_tags
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.data.text.sentences import conll_sentences
from plimsoll.errors import DataError
from tagged_files import conll, sentences_of_names, tagged_corpus

SENTENCES = [[("Ada", "B-PER"), ("slept", "O")], [("New York", "B-LOC")], [("é", "O"), ("Nile", "B-LOC")]]
ROWS = [{"tokens": [word for word, _ in one], "ner_tags": [tag for _, tag in one]} for one in SENTENCES]


def read(corpus: Corpus) -> list[list[tuple[str, str]]]:
    return [list(zip(*words_and_tags(text), strict=True)) for text in corpus.tagged()]


def jsonl(rows: list[object]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def opened(path: Path, **reading: object) -> Corpus:
    return open_corpus((str(path),), Reading(is_tagged=True, **reading), path.parent / "cache")


@pytest.mark.parametrize("delimiter", ["\t", "\t_\t"])
def test_lines_become_sentences(tmp_path: Path, delimiter: str):
    content = "-DOCSTART- -X- O\n\n\n" + conll(SENTENCES, delimiter).replace("\n", "\r\n") + "\r\n \r\n\r\n"
    corpus = tagged_corpus(tmp_path / "a.conll", "\ufeff" + content)
    assert read(corpus) == SENTENCES
    assert corpus.tag_counts == {"B-LOC": 2, "B-PER": 1, "O": 2}
    assert list(corpus) == ["Ada slept", "New York", "é Nile"]


def test_columns_of_lines_are_chosen_by_number(tmp_path: Path):
    text = "# a comment\n1\tAda\tPROPN\tx\n2\tslept\tVERB\tx\n"
    assert read(tagged_corpus(tmp_path / "a.conllu", text, text="2", label="3")) == [
        [("Ada", "PROPN"), ("slept", "VERB")]
    ]
    with pytest.raises(DataError, match="has column numbers, not names, but 'ner_tags' is given: give a number from 1"):
        tagged_corpus(tmp_path / "b.conll", text, label="ner_tags")


def test_rows_become_sentences_and_numbers_get_their_names(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(jsonl([*ROWS, {"tokens": [], "ner_tags": []}]), encoding="utf-8")
    assert read(opened(tmp_path / "a.jsonl")) == SENTENCES
    names = ["O", "B-PER", "B-LOC"]
    numbered = [row | {"ner_tags": [names.index(tag) for tag in row["ner_tags"]]} for row in ROWS]
    features = {"ner_tags": {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "List"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.Table.from_pylist(numbered)
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    assert read(opened(tmp_path / "a.parquet")) == SENTENCES
    (tmp_path / "b.jsonl").write_text(jsonl(numbered), encoding="utf-8")
    assert list(opened(tmp_path / "b.jsonl").tag_counts) == ["0", "1", "2"]


def test_a_data_set_of_hugging_face_brings_its_names(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    names = ["O", "B-PER", "B-LOC"]
    features = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "pos": datasets.Sequence(datasets.Value("int32")),
         "ner": datasets.Sequence(datasets.ClassLabel(names=names))}
    )  # fmt: skip
    rows = {
        "tokens": [row["tokens"] for row in ROWS],
        "pos": [[0] * len(row["tokens"]) for row in ROWS],
        "ner": [[names.index(tag) for tag in row["ner_tags"]] for row in ROWS],
    }
    dataset = datasets.Dataset.from_dict(rows, features)
    reading = Reading(is_tagged=True, label="ner")
    assert read(open_corpus([dataset], reading, tmp_path / "cache")) == SENTENCES
    dataset.to_parquet(tmp_path / "exported.parquet")
    assert read(opened(tmp_path / "exported.parquet", label="ner")) == SENTENCES


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "Some text\nof two words in a line\n", "tags: line 2: 'of two words in a line' has 6 columns"),
        ("a.txt", "alone\n", "line 1: 'alone' has 1 column, not at least 2: a word and its tag"),
        ("a.tsv", "Ada\tB-PER\nslept\t\n", "line 1: word 2 has no tag"),
        ("a.csv", "Ada,B-PER\n", "is csv, whose cells cannot hold lists of words: write it as JSON lines"),
        ("a.jsonl", "{\n", "line 1: it is not JSON"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O", "O"]}\n', "line 1: it has 1 words and 2 tags: give each word one"),
        ("a.jsonl", '{"tokens": ["a\\tb"], "tags": ["O"]}\n', "holds a tab or a line break"),
        ("a.jsonl", '{"tokens": ["\\ud800"], "tags": ["O"]}\n', "half of a surrogate pair"),
        ("a.jsonl", '{"tokens": "a b", "tags": ["O"]}\n', "is a list called tokens or words: give the column"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O"], "pos": ["N"]}\n', "2 could be the tags of 'tokens': give"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [true]}\n', "its tags are '.True.': write a list of names or numbers"),
    ],
)  # fmt: skip
def test_faults_are_said_with_their_place(tmp_path: Path, name: str, content: str, message: str):
    with pytest.raises(DataError, match=message):
        tagged_corpus(tmp_path / name, content)


def test_what_cannot_be_read_is_skipped_where_that_was_asked(tmp_path: Path):
    content = "Ada O\n\nslept\n\nwell O\n"
    corpus = tagged_corpus(tmp_path / "a.conll", content, on_error="skip")
    assert read(corpus) == [[("Ada", "O")], [("well", "O")]]
    assert (corpus.num_skipped, len(corpus.skipped)) == (1, 1)
    assert "line 3: 'slept' has 1 column, not 2 before" in corpus.skipped[0]


def test_no_more_is_held_than_a_sentence(tmp_path: Path):
    path = tmp_path / "long.conll"
    path.write_text(conll(sentences_of_names(200)) * 40)
    tracemalloc.start()
    try:
        num_sentences = sum(1 for _ in conll_sentences(str(path), Reading(is_tagged=True)))
        assert tracemalloc.get_traced_memory()[1] < min(path.stat().st_size, 200 << 10)
    finally:
        tracemalloc.stop()
    assert num_sentences > 7000


def test_a_file_without_an_end_of_a_sentence_is_not_held(tmp_path: Path):
    path = tmp_path / "endless.conll"
    path.write_text("word O\n" * 100_000)
    (only,) = conll_sentences(str(path), Reading(is_tagged=True, max_text_bytes=700))
    assert (only.place, len(only.words)) == ("line 1", 100)
    assert "no empty line follows within 700 B" in str(only.why)


def test_a_tag_of_minus_100_is_none(tmp_path: Path):
    rows = [{"tokens": ["a", "b", "c"], "ner_tags": [-100, 1, 0]}, {"tokens": ["d"], "ner_tags": [-100]}]
    corpora = [tagged_corpus(tmp_path / "a.conll", "a -100\nb 1\nc 0\n\nd -100\n")]
    (tmp_path / "a.jsonl").write_text(jsonl(rows))
    corpora.append(opened(tmp_path / "a.jsonl"))
    for corpus in corpora:
        assert corpus.tag_counts == {"0": 1, "1": 1}
        assert read(corpus) == [[("a", "-100"), ("b", "1"), ("c", "0")], [("d", "-100")]]
    features = {"ner_tags": {"feature": {"names": ["O", "X"], "_type": "ClassLabel"}, "_type": "List"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata), tmp_path / "a.parquet"
    )
    assert opened(tmp_path / "a.parquet").tag_counts == {"O": 1, "X": 1}
