"""The speed of each stage is told; a corpus that is large and not tokenized is not fed."""

from pathlib import Path

import pytest

import plimsoll.run.feed
from plimsoll.records.job import Job
from plimsoll.run.feed import time_corpus


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(plimsoll.run.feed, "_SECONDS", 0.05)
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


def test_a_large_corpus_is_not_tokenized_only_to_be_timed(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plimsoll.run.feed, "_SMALL_BYTES", 1000)
    assert len(time_corpus(job, tmp_path / "cache").rates) == 3
