"""The measured speed of each stage of reading data; a large corpus that is not tokenized is not read."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import plimsoll.training.feed_speed
from plimsoll.data.inspect import tokenize_corpus
from plimsoll.data.pipeline import reading_of
from plimsoll.data.text.index import open_corpus
from plimsoll.records.job import Job
from plimsoll.training.feed_speed import _in_order, _shuffled, time_corpus


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SECONDS", 0.05)
    (tmp_path / "a.txt").write_text("some words to read and to tokenize\n" * 200)
    data = {"train": str(tmp_path / "a.txt"), "unit": "line"}
    return Job.from_fields({"model": "gpt2", "data": data, "tokenizer": {"vocab_size": 300}, "sequence_length": 16})


def test_every_stage_has_a_rate_and_feeding_its_memory(job: Job, tmp_path: Path):
    feed = time_corpus(job, tmp_path / "cache")
    assert [(rate.stage, rate.unit) for rate in feed.rates] == [
        ("read", "texts"), ("read", "texts"), ("tokenize", "bytes"), ("feed", "samples"), ("feed", "tokens"),
    ]  # fmt: skip
    assert all(rate.per_second > 0 for rate in feed.rates)
    samples, tokens = feed.rates[-2:]
    assert tokens.per_second == pytest.approx(16 * samples.per_second)
    assert tokens.private_bytes > 20 << 20


def test_a_rate_is_what_was_done_in_a_second_and_ends_after_some(monkeypatch: pytest.MonkeyPatch):
    """The rate is six per second, measured for more than a second."""
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SECONDS", 1.0)
    clock = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def done() -> Iterator[int]:
        while True:
            clock[0] += 0.5
            yield 3

    rate = plimsoll.training.feed_speed._rate("read", "in order", "texts", done())
    assert (rate.per_second, clock[0]) == (6.0, 11.5)


def test_by_a_clock_that_ticks_at_each_look_the_rates_are_known(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each stage ends at the third reading of the clock, which is read once more. Batches read it every 16th time."""
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SECONDS", 2.0)
    ticks = itertools.count(100)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    feed = time_corpus(job.model_copy(update={"batch_size": 1}), tmp_path / "cache")
    assert [rate.detail for rate in feed.rates[:3]] == ["in order", "shuffled, 1024 at a time", "all cores"]
    assert {rate.detail for rate in feed.rates[3:]} == {f"{job.data.order}, workers {job.data.workers}"}
    texts, batches = 3 * 200, 2 * 16 + 1
    assert [rate.per_second for rate in feed.rates] == [
        texts / 4, texts / 4, texts * len("some words to read and to tokenize") / 4,
        batches / 4, batches * 16 / 4,
    ]  # fmt: skip


def test_texts_are_read_a_thousand_at_a_time_and_again_and_again(tmp_path: Path):
    lines = [f"line {number}" for number in range(1500)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    job = Job.from_fields({"model": "gpt2", "data": {"train": str(tmp_path / "a.txt"), "unit": "line"}})
    corpus = open_corpus(job.data.sources, reading_of(job), tmp_path / "cache")
    assert list(itertools.islice(_in_order(corpus), 3)) == [lines[:1024], lines[1024:], lines[:1024]]
    first, second, third, fourth = itertools.islice(_shuffled(corpus), 4)
    assert [len(first), len(second), len(third)] == [1024, 476, 1024]
    assert sorted(first + second) == sorted(third + fourth) == sorted(lines)
    assert lines[:1024] != first != third


def test_padding_is_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SECONDS", 0.05)
    for label, text in (("ham", "ab"), ("spam", "abcdefgh")):
        (tmp_path / "texts" / label).mkdir(parents=True)
        (tmp_path / "texts" / label / "1.txt").write_text(text)
    fields = {"model": "gpt2", "task": "classification", "data": str(tmp_path / "texts"), "batch_size": 2}
    job = Job.from_fields(fields | {"tokenizer": {"vocab_size": 257}, "sequence_length": 16})
    samples, tokens = time_corpus(job, tmp_path / "cache").rates[-2:]
    assert tokens.per_second == pytest.approx((2 + 8) / 2 * samples.per_second)


def test_a_large_corpus_is_not_tokenized_only_to_be_timed(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SMALL_BYTES", 1000)
    feed = time_corpus(job, tmp_path / "cache")
    assert len(feed.rates) == 3
    assert feed.notes == ("Not fed: 6.8 KiB of text are not tokenized: `plimsoll data tokenize` first",)
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SMALL_BYTES", feed.corpus.num_bytes)
    assert len(time_corpus(job, tmp_path / "other").rates) == 5
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SMALL_BYTES", 1000)
    tokenize_corpus(job, tmp_path / "cache")
    assert len(time_corpus(job, tmp_path / "cache").rates) == 5


def test_texts_that_are_tokenized_as_they_are_read_are_fed_however_large(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plimsoll.training.feed_speed, "_SMALL_BYTES", 1000)
    data = job.data.model_copy(update={"on_the_fly": True, "long_texts": "truncate", "workers": 0})
    feed = time_corpus(job.model_copy(update={"data": data}), tmp_path / "cache")
    assert ([rate.stage for rate in feed.rates[3:]], feed.notes) == (["feed", "feed"], ())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sequence_length": 9000}, r"the training text has \d+ tokens, but one sample is sequence_length = 9000: .*"),
        ({"batch_size": 5000}, r"the data has \d+ samples, but one step takes batch_size = 5000: .*"),
    ],
)
def test_what_was_timed_is_shown_where_the_text_does_not_fill_a_batch(job: Job, tmp_path: Path, fields, why: str):
    feed = time_corpus(job.model_copy(update=fields), tmp_path / "cache")
    assert [rate.stage for rate in feed.rates] == ["read", "read", "tokenize"]
    (note,) = feed.notes
    assert re.fullmatch(f"Not fed: {why}", note)
