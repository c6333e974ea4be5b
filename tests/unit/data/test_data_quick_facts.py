"""Facts about texts that are known without reading them; they equal the facts found by reading."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from plimsoll.data.formats import Reading
from plimsoll.data.quick_facts import TextSketch, sketch_texts
from plimsoll.data.samples.labels import labels_from_folders
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.byte_pairs import whole_bytes
from plimsoll.data.tokens.tokenizer import prepare_tokenizer
from plimsoll.errors import DataError
from plimsoll.records.job import Job
from tagged_files import conll, sentences_of_names


def job_of(data: Path | list[Path], task: str = "language-modeling", **fields: object) -> Job:
    sources = [str(path) for path in data] if isinstance(data, list) else str(data)
    return Job.from_fields({"model": {"architecture": "gpt2"}, "data": sources, "task": task, **fields})


def class_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if "empty" in name else "some text\n")
    return folder


def tokenizer_file(folder: Path, ids: dict[str, int], end_token: str) -> Path:
    Tokenizer(models.WordLevel(ids, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_token}))
    return folder


def test_a_tokenizer_to_be_trained_has_the_size_that_is_asked_for_as_a_guess_where_the_texts_are_not_here(tmp_path):
    guess = TextSketch(1234, None, 0, tokenizer_bytes=230 << 20, guessed=frozenset({"vocabulary"}))
    for source in (tmp_path / "absent.txt", "s3://bucket/texts/*.txt"):
        assert sketch_texts(job_of(source, tokenizer={"vocab_size": 1234})) == guess


def test_of_much_text_no_tokenizer_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "text.txt"
    text.write_text("word " * 100)
    assert sketch_texts(job_of(text)) == TextSketch(261, None, 0, tokenizer_bytes=whole_bytes(500))
    monkeypatch.setattr("plimsoll.data.quick_facts.FEW_BYTES", 499)
    assert sketch_texts(job_of(text)) == TextSketch(
        8000, None, 0, tokenizer_bytes=230 << 20, guessed=frozenset({"vocabulary"})
    )


def test_of_a_tokenizer_that_exists_the_largest_id_counts(tmp_path: Path):
    # three tokens, but 41 rows, because the largest id is 40
    folder = tokenizer_file(tmp_path, {"a": 0, "b": 2, "</s>": 40}, "</s>")
    sketch = sketch_texts(job_of(tmp_path / "absent.txt", tokenizer={"path": str(folder)}))
    assert sketch == TextSketch(vocab_size=41, num_labels=None, end_id=40, pad_id=40)


@pytest.mark.parametrize(
    ("settings", "size"),
    [({"vocab_size": 265}, 265), ({}, 269), ({"train": "words"}, 7), ({"train": "words", "min_count": 51}, 3)],
)
def test_it_agrees_with_the_tokenizer_that_the_training_uses(tmp_path: Path, settings: dict[str, object], size: int):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 50)
    job = job_of(text, tokenizer=settings)
    corpus = open_corpus((str(text),), Reading(), tmp_path / "cache")
    trained = prepare_tokenizer(job.tokenizer, corpus, tmp_path / "cache")
    again = sketch_texts(job_of(text, tokenizer={"path": str(trained.folder)}))
    sizes = trained.vocab_size, None, trained.end_id, trained.pad_id
    assert again.of_model == sizes == sketch_texts(job).of_model == (size, None, 0, 0)
    assert again.tokenizer_bytes is None
    most_bytes = whole_bytes(text.stat().st_size)
    assert sketch_texts(job).tokenizer_bytes == (None if settings.get("train") == "words" else most_bytes)


def test_a_tokenizer_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="absent"):
        sketch_texts(job_of(tmp_path, tokenizer={"path": str(tmp_path / "absent")}))


def test_language_modelling_needs_no_texts(tmp_path: Path):
    assert sketch_texts(job_of(tmp_path / "absent")).num_labels is None


def test_labels_are_the_folders_of_the_files_as_the_training_finds_them(tmp_path: Path):
    folder = class_files(tmp_path / "data", "spam/1.txt", "ham/1.txt", "ham/2.txt", "deep/eggs/1.txt", ".git/x")
    sketch = sketch_texts(job_of(folder, "classification", tokenizer={"vocab_size": 260}))
    names, _ = labels_from_folders(open_corpus((str(folder),), Reading(), tmp_path / "cache"))
    assert sketch.of_model == (260, len(names), 0, 0) == (260, 3, 0, 0)


def test_folders_of_one_name_are_one_class_wherever_they_are(tmp_path: Path):
    folder = class_files(tmp_path / "data", "one/pos/1.txt", "two/pos/1.txt", "one/neg/1.txt", "two/neg/1.txt", "so/1")
    names, _ = labels_from_folders(open_corpus((str(folder),), Reading(), tmp_path / "cache"))
    assert names == ("neg", "pos", "so")
    assert sketch_texts(job_of(folder, "classification")).num_labels == 3


def test_labels_come_from_every_source_and_empty_files_count(tmp_path: Path):
    sources = [
        class_files(tmp_path / "one", "a/1.txt", "b/empty.txt"),
        class_files(tmp_path / "two", "c/1.txt") / "c" / "1.txt",
    ]
    assert sketch_texts(job_of(sources, "classification")).num_labels == 3


def test_a_single_folder_still_makes_a_classifier_of_two(tmp_path: Path):
    # Training then reports the single class as an error. A model with one label would be another architecture.
    assert sketch_texts(job_of(class_files(tmp_path / "data", "1.txt"), "classification")).num_labels == 2


def test_classes_cannot_be_counted_without_files(tmp_path: Path):
    with pytest.raises(DataError, match="there is no file or folder .*absent: check the path"):
        sketch_texts(job_of(tmp_path / "absent", "classification"))


def test_tags_of_words_are_counted_in_the_heads_of_files(tmp_path: Path):
    text = conll(sentences_of_names(20))
    (tmp_path / "a.conll").write_text(text[: len(text) - 3])  # cut inside a line, as the head of a file may be
    (tmp_path / "b.txt").write_text("slept VERB\n\n")
    sources = [tmp_path / "a.conll", tmp_path / "b.txt"]
    assert sketch_texts(job_of(sources, "token-classification")).num_labels == 4
    (tmp_path / "c.jsonl").write_text('{"tokens": ["a"], "tags": [0]}\n{"tokens": ["a", "b"], "ta')
    assert sketch_texts(job_of(tmp_path / "c.jsonl", "token-classification")).num_labels == 2
