"""Preparation of a job's data through the cache, and the modules that the training process does not load."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plimsoll.data.datasets import open_datasets
from plimsoll.data.prepare import is_whole, prepare, prepare_again
from plimsoll.data.tokens.store import open_tokens
from plimsoll.data.tokens.tokenizer import open_tokenizer
from plimsoll.errors import DataError
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared
from tagged_files import conll, sentences_of_names


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for label, word in (("ham", "good"), ("spam", "buy")):
        for number in range(10):
            path = tmp_path / "data" / label / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{word} text number {number}, with words to train on\n" * (number + 1))
    return tmp_path / "data"


def job_of(texts: Path, **fields) -> Job:
    data = {"train": str(texts), **fields.pop("data", {})}
    given = {"model": "gpt2", "data": data, "tokenizer": {"vocab_size": 260}, "sequence_length": 16, **fields}
    return Job.from_fields(given)


def first_tokens(dataset, number: int) -> list[int]:
    return dataset.batch(np.array([number]))["input_ids"][0].tolist()


def test_language_modelling_from_files_to_windows(texts: Path, tmp_path: Path):
    job = job_of(texts)
    prepared = prepare(job, tmp_path / "cache")
    assert (prepared.train.num_documents, prepared.vocab_size, prepared.end_id, prepared.num_labels) == (
        20,
        260,
        0,
        None,
    )
    assert prepared.train.num_bytes == sum(path.stat().st_size for path in texts.rglob("*.txt"))
    training, validation = open_datasets(prepared, job)
    assert validation is None
    assert len(training) == prepared.train.num_tokens // 16
    backend = open_tokenizer(Path(prepared.tokenizer_folder)).backend
    decoded = backend.decode(first_tokens(training, 0), skip_special_tokens=False)
    assert (texts / "ham" / "0.txt").read_text().startswith(decoded)


def test_a_text_shorter_than_a_sample_is_refused_when_it_is_prepared(texts: Path, tmp_path: Path):
    with pytest.raises(
        DataError, match=r"the training text has \d+ tokens, but one sample is sequence_length = 100000: give more"
    ):
        prepare(job_of(texts, sequence_length=100_000), tmp_path / "cache")


def test_of_two_texts_the_error_says_which_is_too_short(texts: Path, tmp_path: Path):
    (tmp_path / "few.txt").write_text("hi")
    data = {"validation": str(tmp_path / "few.txt")}
    with pytest.raises(DataError, match=r"the validation text \(.*few\.txt\) has \d+ tokens, but one sample"):
        prepare(job_of(texts, sequence_length=100, data=data), tmp_path / "cache")
    with pytest.raises(
        DataError, match=r"the validation text \(.*few\.txt\) of \d+ tokens is too short for batch_size"
    ):
        prepare(job_of(texts, data=data | {"order": "streams"}), tmp_path / "cache")


@pytest.mark.parametrize("data", [{}, {"on_the_fly": True, "long_texts": "truncate"}], ids=["once", "on the fly"])
def test_texts_become_words(texts: Path, tmp_path: Path, data: dict):
    job = job_of(texts, task="classification", data=data, tokenizer={"train": "words", "vocab_size": 5})
    prepared = prepare(job, tmp_path / "cache")
    assert (prepared.vocab_size, prepared.special_ids) == (5, (0, 1))
    training, _ = open_datasets(prepared, job)
    # "good text number 0, with words to train on": the most frequent words by count, then text, are ",", number, on.
    assert first_tokens(training, 0)[:9] == [1, 1, 3, 1, 2, 1, 1, 1, 1]


def test_prepared_data_are_a_record_that_can_be_a_file(texts: Path, tmp_path: Path):
    (texts / "image.png").write_bytes(b"\0")
    prepared = prepare(job_of(texts), tmp_path / "cache")
    assert prepared.train.num_skipped == 1
    assert "image.png: line 1: byte 0 is NUL" in prepared.train.skipped[0]
    prepared.save(tmp_path / "prepared.json")
    assert Prepared.load(tmp_path / "prepared.json") == prepared


def test_nothing_is_done_twice_and_nothing_written_outside_the_cache(texts: Path, tmp_path: Path):
    before = sorted(texts.rglob("*"))
    stages = []
    reports = []
    for _ in range(2):
        reports.append(prepare(job_of(texts), tmp_path / "cache", lambda stage, done, total: stages.append(stage)))
    assert reports[0] == reports[1]
    assert list(dict.fromkeys(stages)) == ["index", "tokenizer", "tokens"]
    assert stages.count("tokens") == 1
    assert sorted(texts.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data"]


def test_a_relative_cache_is_found_again_from_elsewhere(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepare(job_of(texts), Path("cache"))
    monkeypatch.chdir("/")
    assert len(open_datasets(prepared, job_of(texts))[0])


EVERY_WAY = [
    {},
    {"order": "as_is"},
    {"order": "blocks"},
    {"order": "streams"},
    {"stride": 8},
    {"pack": True},
    {"borders": "sentence"},
    {"borders": "paragraph", "order": "by_length"},
    {"on_the_fly": True, "long_texts": "truncate"},
]


@pytest.mark.parametrize("fields", [{}, {"task": "classification"}], ids=["language model", "classification"])
@pytest.mark.parametrize("way", EVERY_WAY, ids=str)
def test_no_text_is_on_both_sides(texts: Path, tmp_path: Path, way: dict, fields: dict):
    if fields and ("pack" in way or way.get("order") == "streams"):
        return
    for number, path in enumerate(sorted(texts.rglob("*.txt"))):
        path.write_text(f"w{number}. " * 40)
    tokenizer = {"train": "words", "vocab_size": 100}
    model = {"model": "lstm", "batch_size": 4} if way.get("order") == "streams" else {}
    job = job_of(texts, data={"validation": 0.2, **way}, tokenizer=tokenizer, **model, **fields)
    prepared = prepare(job, tmp_path / "cache")
    backend = open_tokenizer(Path(prepared.tokenizer_folder)).backend
    number_of = {backend.token_to_id(f"w{number}"): number for number in range(20)}

    def texts_in(samples) -> set[int]:
        ids = samples.batch(np.arange(len(samples)))["input_ids"]
        return {number_of[token] for token in ids.unique().tolist() if token in number_of}

    training, validation = map(texts_in, open_datasets(prepared, job))
    assert (len(training), len(validation)) == (16, 4)
    assert not training & validation
    if way.get("order") in {"as_is", "blocks", "streams"}:
        assert validation == {16, 17, 18, 19}
    assert (prepared.num_held_out_texts, prepared.num_trained_on, prepared.holds_out_windows) == (4, 0, False)


def test_of_one_text_windows_are_held_out_and_that_is_said(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one two three " * 100)
    job = job_of(tmp_path / "a.txt", data={"validation": 0.2})
    prepared = prepare(job, tmp_path / "cache")
    training, validation = open_datasets(prepared, job)
    num_windows = prepared.train.num_tokens // 16
    assert (len(training), len(validation)) == (num_windows - round(num_windows * 0.2), round(num_windows * 0.2))
    assert (prepared.num_held_out_texts, prepared.holds_out_windows) == (0, True)


def test_a_held_out_text_that_is_a_training_text_too_is_counted(texts: Path, tmp_path: Path):
    copies = tmp_path / "copies"
    shutil.copytree(texts, copies)
    (copies / "ham" / "0.txt").write_text("a text of its own")
    for fields in ({}, {"task": "classification"}, {"data": {"on_the_fly": True, "long_texts": "truncate"}}):
        job = job_of(texts, **fields | {"data": fields.get("data", {}) | {"validation": str(copies)}})
        prepared = prepare(job, tmp_path / "cache")
        assert (prepared.num_held_out_texts, prepared.num_trained_on) == (20, 19)
    (tmp_path / "rows.txt").write_text("the same line again\n" * 20)
    for data in ({}, {"pack": True}, {"borders": "sentence"}):
        job = job_of(tmp_path / "rows.txt", data={"unit": "line", "validation": 0.4, **data})
        assert prepare(job, tmp_path / "cache").num_trained_on == 8


def test_a_validation_file_among_the_training_texts_is_refused(texts: Path, tmp_path: Path):
    job = job_of(texts, data={"validation": str(texts / "ham" / "0.txt")})
    with pytest.raises(DataError, match=r"the validation text .*0\.txt is among the training texts, so nothing would"):
        prepare(job, tmp_path / "cache")


def test_a_held_out_share_of_too_little_text_says_what_is_too_short(texts: Path, tmp_path: Path):
    for path in texts.rglob("*.txt"):
        path.write_text("few words")
    with pytest.raises(DataError, match=r"the held-out text \(1 of 20 texts\) has \d+ tokens, but one sample"):
        prepare(job_of(texts, data={"validation": 0.01}, sequence_length=40), tmp_path / "cache")


def test_classification_with_validation_from_another_folder(texts: Path, tmp_path: Path):
    other = tmp_path / "other" / "spam"
    other.mkdir(parents=True)
    (other / "1.txt").write_text("buy this")
    job = job_of(texts, task="classification", data={"validation": str(tmp_path / "other")})
    prepared = prepare(job, tmp_path / "cache")
    assert (prepared.label_names, prepared.num_labels) == (("ham", "spam"), 2)
    assert prepared.validation.num_documents == 1
    training, validation = open_datasets(prepared, job)
    ids = np.arange(len(training))
    assert training.batch(ids)["labels"].tolist() == (training.parents(ids) >= 10).astype(int).tolist()
    assert validation.batch(np.array([0]))["labels"].tolist() == [1]


def test_the_key_is_of_the_samples_and_not_of_their_place(texts: Path, tmp_path: Path):
    key = prepare(job_of(texts), tmp_path / "cache").key
    assert prepare(job_of(texts), tmp_path / "elsewhere").key == key
    assert prepare(job_of(texts, sequence_length=32, steps=5), tmp_path / "cache").key == key
    moved = texts.rename(tmp_path / "moved")
    assert prepare(job_of(moved), tmp_path / "cache").key == key
    others = [
        job_of(moved, tokenizer={"vocab_size": 258}),
        job_of(moved, data={"validation": 0.1}),
        job_of(moved, data={"unit": "line"}),
        job_of(moved, task="classification"),
    ]
    keys = {prepare(other, tmp_path / "cache").key for other in others}
    assert len(keys | {key}) == 5


def test_a_cache_that_is_gone_is_said_so(texts: Path, tmp_path: Path):
    job = job_of(texts, task="classification")
    prepared = prepare(job, tmp_path / "cache")
    (Path(prepared.train.labels_folder) / "labels.npy").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"the labels .* are missing from the cache, or damaged: prepare them again, as --resume does"
    ):
        open_datasets(prepared, job)
    (Path(prepared.train.tokens_folder) / "tokens.bin").unlink()
    with pytest.raises(
        DataError, match=r"the tokens .* are missing from the cache, or damaged: prepare them again, as --resume does"
    ):
        open_datasets(prepared, job)


OPEN = """
import sys
from pathlib import Path
import torch
import numpy as np
from plimsoll.data.batches.loader import Loader
from plimsoll.data.datasets import open_datasets
from plimsoll.records.prepared import Prepared
from plimsoll.records.job import Job

def private_bytes():
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096

import plimsoll.data.samples.windows
job = Job.from_json(Path(sys.argv[1]).read_text())
prepared = Prepared.load(Path(sys.argv[2]))
torch.from_numpy(np.zeros(10))
before = private_bytes()
training, validation = open_datasets(prepared, job)
loader = Loader(training, 4, 0)
for _ in range(200):
    loader.peek(); loader.advance()
print(private_bytes() - before, sorted({"tokenizers", "transformers"} & set(sys.modules)))
"""


@pytest.mark.long
def test_the_training_process_loads_no_tokenizer_and_keeps_a_few_megabytes(texts: Path, tmp_path: Path):
    (texts / "ham" / "long.txt").write_text("a long text of many words. " * 60_000)
    job = job_of(texts, data={"validation": 0.1})
    job.save(tmp_path / "job.json")
    prepare(job, tmp_path / "cache").save(tmp_path / "prepared.json")
    command = [sys.executable, "-c", OPEN, str(tmp_path / "job.json"), str(tmp_path / "prepared.json")]
    grown_bytes, loaded = subprocess.check_output(command, text=True).split(maxsplit=1)
    assert int(grown_bytes) < 4 << 20
    assert loaded.strip() == "[]"


def test_preparing_loads_no_torch(texts: Path, tmp_path: Path):
    job_of(texts).save(tmp_path / "job.json")
    code = (
        "import sys; from pathlib import Path\n"
        "from plimsoll.data.prepare import prepare; from plimsoll.records.job import Job\n"
        "prepare(Job.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2])); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "job.json"), str(tmp_path / "cache")]
    assert subprocess.check_output(command, text=True) == "False\n"


@pytest.fixture
def lost(texts: Path, tmp_path: Path) -> tuple[Job, Prepared]:
    """Return prepared data whose cache was deleted."""
    shutil.copytree(texts, tmp_path / "other")
    job = job_of(texts, task="classification", data={"validation": str(tmp_path / "other")})
    prepared = prepare(job, tmp_path / "cache")
    assert is_whole(prepared)
    shutil.rmtree(tmp_path / "cache")
    return job, prepared


def test_what_was_deleted_is_prepared_again_to_the_same_data(lost: tuple[Job, Prepared], tmp_path: Path):
    job, prepared = lost
    assert not is_whole(prepared)
    assert prepare_again(job, prepared, tmp_path / "cache") == prepared
    assert is_whole(prepared)


@pytest.mark.parametrize("folder", ["tokens", "tokenizer", "labels"])
def test_data_of_which_a_part_is_gone_are_not_whole(texts: Path, tmp_path: Path, folder: str):
    prepared = prepare(job_of(texts, task="classification"), tmp_path / "cache")
    shutil.rmtree(next((tmp_path / "cache").glob(f"{folder}-*[0-9a-f]")))
    assert not is_whole(prepared)


def test_other_texts_are_not_taken_for_those_that_were_lost(lost: tuple[Job, Prepared], texts: Path, tmp_path: Path):
    (texts / "ham" / "0.txt").write_text("another text, of 28 bytes\n")
    with pytest.raises(
        DataError, match=r"cannot be made again: the texts.* have changed \(then 20 texts of \d+ bytes, now"
    ):
        prepare_again(*lost, tmp_path / "cache")


def test_texts_that_are_gone_are_named(lost: tuple[Job, Prepared], texts: Path, tmp_path: Path):
    shutil.rmtree(texts)
    with pytest.raises(
        DataError, match=r"the tokens .*cache\) cannot be made again: there is no file or folder .*data"
    ):
        prepare_again(*lost, tmp_path / "cache")


def table_of(folder: Path) -> Path:
    """Write rows of three classes; every tenth text is long."""
    rows = [
        {"body": f"text {number} of words " * (1 + 9 * (number % 10 == 0)), "stars": number % 3} for number in range(60)
    ]
    path = folder / "reviews.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


LABELLED = {"text": "body", "label": "stars"}


def test_labels_are_those_of_a_column(tmp_path: Path):
    job = job_of(table_of(tmp_path), task="classification", data=LABELLED)
    prepared = prepare(job, tmp_path / "cache")
    assert prepared.label_names == ("0", "1", "2")
    training, _ = open_datasets(prepared, job)
    assert len(training) == prepared.train.num_samples > 60  # long texts become several windows
    assert (prepared.train.num_documents, prepared.train.num_truncated) == (60, 0)
    ids = np.arange(len(training))
    assert training.batch(ids)["labels"].tolist() == (training.parents(ids) % 3).tolist()


def test_no_text_is_on_both_sides_of_a_split(tmp_path: Path):
    job = job_of(table_of(tmp_path), task="classification", data=LABELLED | {"validation": 0.2})
    prepared = prepare(job, tmp_path / "cache")
    parts = [set(part.parents(np.arange(len(part))).tolist()) for part in open_datasets(prepared, job)]
    assert sorted([*parts[0], *parts[1]]) == list(range(60))
    assert len(parts[1]) == 12
    whole = prepare(job_of(table_of(tmp_path), task="classification", data=LABELLED), tmp_path / "cache")
    assert prepared.key != whole.key


def test_long_texts_are_truncated_or_refused_where_that_is_asked_for(tmp_path: Path):
    table = table_of(tmp_path)
    job = job_of(table, task="classification", data=LABELLED | {"long_texts": "truncate"})
    train = prepare(job, tmp_path / "cache").train
    assert (train.num_samples, train.num_truncated, train.num_long_texts) == (
        60,
        train.num_long_texts,
        train.num_long_texts,
    )
    assert train.num_dropped_tokens > train.num_truncated > 0
    with pytest.raises(
        DataError, match=r"\d+ of 60 texts are longer than sequence_length = 16, the longest \d+ tokens"
    ):
        prepare(job_of(table, task="classification", data=LABELLED | {"long_texts": "stop"}), tmp_path / "cache")


def test_whole_texts_are_packed_into_rows(texts: Path, tmp_path: Path):
    job = job_of(texts, data={"unit": "line", "pack": True, "validation": 0.1}, sequence_length=64)
    prepared = prepare(job, tmp_path / "cache")
    training, validation = open_datasets(prepared, job)
    assert prepared.train.num_samples == len(training)
    assert prepared.validation.num_samples == len(validation)
    batch = training.batch(np.arange(4))
    assert sorted(batch) == ["input_ids", "labels", "position_ids"]
    assert (batch["position_ids"] == 0).sum() > 4


def test_windows_end_at_sentences(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("This is one. Here is another one. " * 40)
    job = job_of(path, data={"borders": "sentence"}, sequence_length=64)
    prepared = prepare(job, tmp_path / "cache")
    training, _ = open_datasets(prepared, job)
    backend = open_tokenizer(Path(prepared.tokenizer_folder)).backend
    decoded = [backend.decode(training[number]["input_ids"].tolist()) for number in range(len(training) - 1)]
    assert prepared.train.num_cut_inside == 0
    assert all(text.rstrip().endswith(".") for text in decoded), decoded


def test_texts_are_tokenized_on_the_fly_and_augmented_in_training_only(texts: Path, tmp_path: Path):
    data = {"on_the_fly": True, "long_texts": "truncate", "validation": 0.2, "augment": {"delete_word": 0.5}}
    job = job_of(texts, task="classification", data=data, sequence_length=64)
    prepared = prepare(job, tmp_path / "cache")
    assert prepared.train.tokens_folder is None
    training, validation = open_datasets(prepared, job)
    assert (len(training), len(validation)) == (16, 4)
    ids = np.arange(4)
    drawn = [training.batch(ids, epoch)["input_ids"].tolist() for epoch in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    seen = [validation.batch(ids, epoch)["input_ids"].tolist() for epoch in (0, 1)]
    assert seen[0] == seen[1]


def test_samples_that_come_as_they_are_come_so_from_a_part_too(texts: Path, tmp_path: Path):
    job = job_of(texts, data={"validation": 0.25, "order": "as_is"})
    prepared = prepare(job, tmp_path / "cache")
    training, validation = open_datasets(prepared, job)
    whole = open_datasets(prepared, job_of(texts))[0]
    assert first_tokens(training, 3) == first_tokens(whole, 3)
    store = open_tokens(Path(prepared.train.tokens_folder))
    assert first_tokens(validation, 0) == store.tokens[store.ends[14] + 1 :][:16].tolist()


def test_streams_hold_out_the_end_of_the_text_and_begin_where_texts_do(texts: Path, tmp_path: Path):
    job = job_of(texts, model="lstm", batch_size=4, data={"validation": 0.25, "order": "streams", "reset": "texts"})
    prepared = prepare(job, tmp_path / "cache")
    training, validation = open_datasets(prepared, job)
    store = open_tokens(Path(prepared.train.tokens_folder))
    begin = int(store.ends[14]) + 1  # the last 5 of 20 texts are held out
    assert (training.slots.num_tokens, validation.slots.num_tokens) == (begin, len(store.tokens) - begin)
    assert first_tokens(validation, 0) == store.tokens[begin:][:16].tolist()
    streams = training.batch(np.arange(len(training)))
    assert prepared.train.num_samples >= len(training)
    marked = streams["input_ids"][streams["resets"] & (streams["labels"] >= 0)].tolist()  # padding is excluded
    assert set(marked) <= {int(store.tokens[0]), *(int(store.tokens[end + 1]) for end in store.ends[:-1])}
    whole = prepare(job.model_copy(update={"data": job.data.model_copy(update={"reset": None})}), tmp_path / "cache")
    assert whole.key == prepared.key
    assert (whole.gradient_reach.most_tokens, prepared.gradient_reach.most_tokens) == (15, 15)
    assert prepared.gradient_reach.mean_tokens < whole.gradient_reach.mean_tokens < 8.1


def test_streams_of_a_text_of_its_own_are_evaluated_on(texts: Path, tmp_path: Path):
    data = {"train": str(texts / "ham"), "validation": str(texts / "spam"), "order": "streams"}
    job = job_of(texts, model="lstm", batch_size=4, data=data)
    prepared = prepare(job, tmp_path / "cache")
    training, validation = open_datasets(prepared, job)
    assert (training.slots.num_tokens, validation.slots.num_tokens) == (
        prepared.train.num_tokens,
        prepared.validation.num_tokens,
    )
    assert prepare(job_of(texts, model="lstm"), tmp_path / "cache").gradient_reach is None


def test_a_text_too_short_for_its_stream_slots_is_refused_during_preparation(texts: Path, tmp_path: Path):
    short = job_of(texts, model="lstm", batch_size=4000, data={"order": "streams"})
    with pytest.raises(
        DataError, match=r"the training text has \d+ tokens, but batch_size = 4000 stream slots .*--set batch_size="
    ):
        prepare(short, tmp_path / "cache")


def test_words_with_tags_become_samples_with_a_label_for_each_word(tmp_path: Path):
    (tmp_path / "train.conll").write_text(conll(sentences_of_names(40)))
    # its tags would be numbered differently without the training file
    (tmp_path / "valid.conll").write_text("Ada I-NAME\n\nslept O\n")
    job = job_of(
        tmp_path / "train.conll", task="token-classification", sequence_length=6,
        data={"stride": 4, "validation": str(tmp_path / "valid.conll")}, tokenizer={"train": "words"},
    )  # fmt: skip
    prepared = prepare(job, tmp_path / "cache")
    assert prepared.label_names == ("B-NAME", "I-NAME", "O")
    assert (prepared.num_labels, prepared.train.labels_folder, prepared.train.has_windows) == (3, None, True)
    training, validation = open_datasets(prepared, job)
    assert validation is not None
    assert validation.batch(np.array([0, 1]))["labels"].tolist() == [[1], [2]]
    labels = training.batch(np.arange(len(training)))["labels"]
    assert int((labels >= 0).sum()) == sum(map(len, sentences_of_names(40)))
    (tmp_path / "train.conll").write_text(conll(sentences_of_names(40)).replace("I-NAME", "B-NAME"))
    assert (
        prepare(job_of(tmp_path / "train.conll", task="token-classification"), tmp_path / "cache").key != prepared.key
    )


def test_a_share_of_sentences_is_held_out_with_all_their_windows(tmp_path: Path):
    (tmp_path / "train.conll").write_text(conll(sentences_of_names(40)))
    job = job_of(
        tmp_path / "train.conll", task="token-classification", sequence_length=4, data={"validation": 0.25},
        tokenizer={"train": "words"},
    )  # fmt: skip
    training, validation = open_datasets(prepare(job, tmp_path / "cache"), job)
    assert validation is not None
    labels = [dataset.batch(np.arange(len(dataset)))["labels"] for dataset in (training, validation)]
    assert sum(int((of >= 0).sum()) for of in labels) == sum(map(len, sentences_of_names(40)))
    ids = np.arange(len(validation))
    assert len(np.unique(validation.parents(ids))) == 10
