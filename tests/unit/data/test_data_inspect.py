"""Facts about a corpus, derived by hand: lengths, the padding of each mode, and dropped tokens."""

from pathlib import Path

import pytest

from made_tokenizers import saved, with_template, word_piece
from plimsoll.data.datasets import open_datasets
from plimsoll.data.inspect import index_corpus, inspect_corpus, tokenize_corpus
from plimsoll.data.prepare import prepare
from plimsoll.data.tokens.store import open_tokens
from plimsoll.data.tokens.tokenizer import open_tokenizer
from plimsoll.records.corpus import Inspection
from plimsoll.records.job import Job
from tagged_files import conll, sentences_of_names

LENGTHS = [2, 2, 2, 6, 6, 20, 20, 40]  # in bytes; each byte is a token


def job_of(folder: Path, **fields: object) -> Job:
    for label in ("ham", "spam"):
        (folder / label).mkdir(exist_ok=True)
    for number, length in enumerate(LENGTHS):
        text = "".join(chr(97 + (7 * number + 5 * place) % 26) for place in range(length))
        (folder / ("ham", "spam")[number % 2] / f"{number}.txt").write_text(text)
    data = {"train": [str(folder / "ham"), str(folder / "spam")], **fields.pop("data", {})}
    given = {"model": "gpt2", "tokenizer": {"vocab_size": 257}, "sequence_length": 16, "batch_size": 2, "data": data}
    return Job.from_fields(given | fields)


def inspected(tmp_path: Path, **fields: object) -> Inspection:
    (tmp_path / "texts").mkdir(exist_ok=True)
    return inspect_corpus(job_of(tmp_path / "texts", **fields), tmp_path / "cache")


def test_an_index_and_tokens_are_described(tmp_path: Path):
    job = job_of(tmp_path, task="classification")
    facts = index_corpus(job, tmp_path / "cache")
    assert (facts.num_files, facts.num_texts, facts.num_bytes, facts.num_skipped) == (8, 8, sum(LENGTHS), 0)
    assert {label.name: label.num_texts for label in facts.labels} == {"ham": 4, "spam": 4}
    tokens = tokenize_corpus(job, tmp_path / "cache")
    assert (tokens.num_tokens, tokens.token_type) == (sum(LENGTHS) + 8, "uint16")
    assert len(open_tokens(Path(tokens.tokens_folder)).tokens) == tokens.num_tokens


def test_lengths_are_those_of_the_texts_whether_tokens_are_stored_or_not(tmp_path: Path):
    drawn = inspected(tmp_path)
    tokenize_corpus(job_of(tmp_path / "texts"), tmp_path / "cache")
    stored = inspected(tmp_path)
    for found in (drawn, stored):
        assert (found.num_seen_texts, found.num_seen_tokens, found.num_tokens) == (8, 98, 98)
        assert dict(found.quantiles) == {0.0: 2, 0.5: 6, 0.9: 40, 0.99: 40, 1.0: 40}
        assert found.bytes_per_token == 1.0
    assert len(drawn.examples) == 3


def test_the_ways_to_fill_batches_of_labelled_texts(tmp_path: Path):
    found = inspected(tmp_path, task="classification", data={"order": "by_length"})
    ways = {filling.name: filling for filling in found.fillings}
    windows = [2, 2, 2, 6, 6, 16, 4, 16, 4, 16, 16, 8]  # 20 is cut into 16 and 4, 40 into 16, 16 and 8
    assert ways["windows of texts, all of 16"].num_samples == len(windows)
    assert ways["windows of texts, all of 16"].padding_share == pytest.approx(1 - sum(windows) / (12 * 16))
    # by length, two per batch: 16 16, 16 16, 8 6, 6 4, 4 2, 2 2; rows this short are not rounded up
    assert ways["windows of texts, by_length"].padding_share == pytest.approx(1 - 98 / (4 * 16 + 2 * (8 + 6 + 4 + 2)))
    assert ways["windows of texts, by_length"].is_this_job
    assert [name for name, filling in ways.items() if filling.is_this_job] == ["windows of texts, by_length"]
    assert ways["truncated texts, all of 16"].num_dropped_tokens == 4 + 4 + 24
    assert ways["truncated texts, shuffle"].num_samples == 8
    assert ways["truncated texts, by_length"].padding_share <= ways["truncated texts, shuffle"].padding_share
    assert found.notes == ("3 of 8 texts are longer than sequence_length = 16: data.long_texts = window.",)


def test_the_ways_of_a_language_model(tmp_path: Path):
    ways = {filling.name: filling for filling in inspected(tmp_path).fillings}
    assert (ways["windows of 16"].num_samples, ways["windows of 16"].num_dropped_tokens) == (6, 106 % 16)
    assert ways["windows of 16"].is_this_job
    assert ways["packed texts"].padding_share < 0.3
    packed = {filling.name: filling for filling in inspected(tmp_path, data={"pack": True}).fillings}
    assert [name for name, filling in packed.items() if filling.is_this_job] == ["packed texts"]


def test_the_tokens_of_a_table_are_those_of_its_texts_and_not_of_its_other_columns(tmp_path: Path):
    table = tmp_path / "a.jsonl"
    table.write_text('{"text": "abcdef", "other": "this is not read"}\n' * 5)
    job = Job.from_texts([str(table)], ("tokenizer.vocab_size=257", "sequence_length=16"))
    found = inspect_corpus(job, tmp_path / "cache")
    assert (found.num_tokens, found.num_seen_tokens) == (30, 30)
    tokenize_corpus(job, tmp_path / "cache")
    again = inspect_corpus(job, tmp_path / "cache")
    assert (again.num_tokens, again.bytes_per_token) == (30, found.bytes_per_token)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        (
            {"data": {"long_texts": "stop"}},
            "3 of 8 texts are longer than sequence_length = 16: data.long_texts = stop, so training would stop: "
            "set data.long_texts=truncate, or a larger sequence_length.",
        ),
        (
            {"batch_size": 9, "data": {"long_texts": "truncate"}},
            "The texts do not fill one batch of batch_size = 9, so no line is marked as this job: give more "
            "text, or set a smaller batch_size.",
        ),
    ],
)
def test_a_job_that_cannot_train_is_no_way_and_it_is_said_why(tmp_path: Path, fields: dict, note: str):
    found = inspected(tmp_path, task="classification", **fields)
    assert not [filling.name for filling in found.fillings if filling.is_this_job]
    assert found.notes[-1] == note


def test_where_only_some_texts_are_seen_their_windows_at_borders_stand_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.txt").write_text("One is. Two are many.\n" * 200)
    changes = ("data.unit=line", "data.borders=sentence", "tokenizer.vocab_size=257", "sequence_length=16")
    job = Job.from_texts([str(tmp_path / "a.txt")], changes)
    monkeypatch.setattr("plimsoll.data.inspect._MOST_SEEN_TEXTS", 50)
    found = inspect_corpus(job, tmp_path / "cache")
    (own,) = [filling for filling in found.fillings if filling.is_this_job]
    assert (found.num_seen_texts, own.name, own.num_samples) == (50, "windows at sentences, shuffle", 400)


def test_a_tag_table_that_has_no_entity_f1_for_some_of_its_tags_says_which(tmp_path: Path):
    (tmp_path / "a.conll").write_text("Ada B-PER\nBob PER\nslept O\n\n" * 9)
    fields = {"model": "gpt2", "task": "token-classification", "tokenizer": {"train": "words"}, "batch_size": 2}
    found = inspect_corpus(Job.from_fields(fields | {"data": str(tmp_path / "a.conll")}), tmp_path / "cache")
    assert found.notes == (
        "Entity F1 is left out, because some tags have a prefix (B-, I-, E-, S-) and some have none: name 'PER' with "
        "a prefix, such as B-PER and I-PER, or O, to get entity F1.",
    )


@pytest.mark.parametrize("is_tokenized", [False, True])
def test_tags_are_counted_and_words_measured_as_they_are_tokenized(tmp_path: Path, is_tokenized: bool):
    (tmp_path / "a.conll").write_text(conll(sentences_of_names(40)))
    fields = {"model": "gpt2", "task": "token-classification", "tokenizer": {"vocab_size": 300}, "batch_size": 2}
    job = Job.from_fields(fields | {"data": str(tmp_path / "a.conll")})
    if is_tokenized:
        assert tokenize_corpus(job, tmp_path / "cache").num_tokens > 40
    found = inspect_corpus(job, tmp_path / "cache")
    tags = [tag for sentence in sentences_of_names(40) for _, tag in sentence]
    assert {tag.name: tag.num_words for tag in found.corpus.tags} == {tag: tags.count(tag) for tag in set(tags)}
    store = open_tokens(Path(tokenize_corpus(job, tmp_path / "cache").tokens_folder))
    assert found.num_seen_tokens == len(store.tokens) - 40
    assert "windows of texts" not in found.fillings[0].name


@pytest.mark.parametrize("is_tokenized", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"data": {"stride": 5}},
        {"data": {"pack": True}},
        {"data": {"borders": "sentence"}},
        {"data": {"on_the_fly": True, "long_texts": "truncate"}},
        {"task": "classification"},
        {"task": "classification", "data": {"stride": 5}},
        {"task": "classification", "data": {"borders": "sentence"}},
    ],
    ids=str,
)
def test_what_a_tokenizer_puts_around_a_text_is_shown_and_counted(tmp_path: Path, fields: dict, is_tokenized: bool):
    texts = [f"The cat {number} left. It was {'very ' * number}late. And then it came." for number in range(12)]
    folder = saved(tmp_path / "tokenizer", with_template(word_piece(texts), "[CLS] $A [SEP]"), "word_piece")
    for number, text in enumerate(texts):
        path = tmp_path / "texts" / ("ham", "spam")[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = {"model": "gpt2", "tokenizer": str(folder), "sequence_length": 16, "batch_size": 2}
    job = Job.from_fields(given | fields | {"data": {"train": str(tmp_path / "texts"), **fields.get("data", {})}})
    if is_tokenized:
        tokenize_corpus(job, tmp_path / "cache")
    found = inspect_corpus(job, tmp_path / "cache")
    training, _ = open_datasets(prepare(job, tmp_path / "cache"), job)
    own = next(filling for filling in found.fillings if filling.is_this_job)
    assert (found.special_tokens, own.num_samples) == ("[CLS] ... [SEP]", len(training))
    backend = open_tokenizer(Path(prepare(job, tmp_path / "cache").tokenizer_folder)).backend
    assert found.num_seen_tokens == sum(len(backend.encode(text, add_special_tokens=False).ids) for text in texts)
    assert found.num_borders == (24 if job.data.borders else None)


def test_held_out_texts_that_are_trained_on_are_said(tmp_path: Path):
    (tmp_path / "copies.jsonl").write_text('{"text": "ab"}\n{"text": "one that is nowhere else"}\n')
    (tmp_path / "ab.txt").write_text("ab\n")
    train = [str(tmp_path / "texts" / "ham"), str(tmp_path / "ab.txt")]
    found = inspected(tmp_path, data={"train": train, "validation": str(tmp_path / "copies.jsonl")})
    said = "1 of the held-out texts is a training text, too, word for word: metrics on them measure memorization."
    assert said in found.notes
    assert not any("held-out" in note for note in inspected(tmp_path, data={"validation": 0.2}).notes)
