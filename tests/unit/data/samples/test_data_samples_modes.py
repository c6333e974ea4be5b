"""The mode marked as a job's equals its data sets and loader; the numbers of other modes are derived by hand."""

from pathlib import Path

import numpy as np
import pytest

from plimsoll.data.datasets import open_datasets
from plimsoll.data.inspect import inspect_corpus, tokenize_corpus
from plimsoll.data.prepare import prepare
from plimsoll.data.samples.modes import Texts
from plimsoll.data.samples.packing import PackedDataset
from plimsoll.data.samples.streams import StreamDataset
from plimsoll.models.assemble import loader_of
from plimsoll.records.corpus import Filling
from plimsoll.records.job import Job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create 100 texts of two classes, with 1 to 40 sentences each. Neighbours have similar lengths."""
    folder = tmp_path_factory.mktemp("texts")
    drawn = np.random.default_rng(0)
    for number in range(100):
        num_sentences = 1 + int(number % 50 / 50 * 40 * drawn.random())
        sentences = ["It was " + "very " * int(drawn.integers(0, 9)) + "good." for _ in range(num_sentences)]
        path = folder / ("ham", "spam")[number // 50] / f"{number:03d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(sentences) + " " + "x" * (16 * (number % 7 == 0)))
    return folder


def job_of(folder: Path, **fields: object) -> Job:
    data = {"train": str(folder), **fields.pop("data", {})}
    given = {"model": "gpt2", "tokenizer": {"vocab_size": 300}, "sequence_length": 64, "batch_size": 8, "data": data}
    return Job.from_fields(given | fields)


def marked(job: Job, cache: Path) -> Filling:
    (filling,) = [filling for filling in inspect_corpus(job, cache).fillings if filling.is_this_job]
    return filling


def real_shares(job: Job, cache: Path) -> tuple[int, float, float]:
    """Return the samples of an epoch, the share of padding in their batches, and the useful tokens per sample."""
    samples, _ = open_datasets(prepare(job, cache), job)
    if isinstance(samples, PackedDataset):
        packs = samples.packs
        return len(samples), packs.padding_share, packs.spans.num_tokens / len(samples)
    loader = loader_of(job, samples)
    num_samples = num_elements = num_filled = num_useful = 0
    while (batch := loader.peek()).epoch == 0:
        num_samples += len(batch.sample_ids)
        num_elements += batch.fields["input_ids"].numel()
        filled = batch.fields.get("attention_mask", batch.fields["input_ids"] >= 0)
        num_filled += int(filled.sum())
        is_classified = batch.fields["labels"].ndim == 1
        num_useful += int((filled if is_classified else batch.fields["labels"] != -100).sum())
        loader.advance()
    loader.close()
    assert num_samples == len(samples)
    return num_samples, 1 - num_filled / num_elements, num_useful / num_samples


LABELLED = {"task": "classification"}
TRUNCATED = {"on_the_fly": True, "long_texts": "truncate", "workers": 0}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("windows of 64", {}),
        ("windows of 64", {"data": {"stride": 64, "order": "blocks"}}),
        ("windows of 64, stride 16", {"data": {"stride": 16}}),
        ("windows of 64, stride 63", {"data": {"stride": 63}}),
        ("windows of texts, shuffle", LABELLED),
        ("windows of texts, stride 16, shuffle", LABELLED | {"data": {"stride": 16}}),
        ("windows of texts, stride 16, by_length", LABELLED | {"data": {"stride": 16, "order": "by_length"}}),
        ("windows of texts, blocks", LABELLED | {"data": {"order": "blocks"}}),
        ("windows of texts, as_is", LABELLED | {"data": {"order": "as_is"}}),
        ("truncated texts, as_is", LABELLED | {"data": {"order": "as_is", "long_texts": "truncate"}}),
        ("windows at sentences, shuffle", LABELLED | {"data": {"borders": "sentence"}}),
        ("windows at sentences, as_is", {"data": {"borders": "sentence", "order": "as_is"}}),
        ("windows at sentences, by_length", {"data": {"borders": "sentence", "order": "by_length"}}),
        ("truncated texts, shuffle", {"data": {"borders": "sentence", "long_texts": "truncate"}}),
        ("texts, blocks", {"data": {"borders": "sentence", "order": "blocks"}, "sequence_length": 4096}),
        ("packed texts", {"data": {"pack": True}}),
        ("packed texts", {"data": {"pack": True, "long_texts": "truncate"}}),
        ("truncated texts, shuffle", {"data": TRUNCATED}),
        ("truncated texts, by_length", LABELLED | {"data": TRUNCATED | {"order": "by_length"}}),
        (
            "windows of texts, by_length",
            LABELLED | {"data": {"order": "by_length"}, "batch_tokens": 32 * 64, "batch_size": 32},
        ),
    ],
)
def test_the_way_of_a_job_is_what_its_training_gets(folder: Path, tmp_path: Path, name: str, fields: dict):
    job = job_of(folder, **fields)
    drawn = marked(job, tmp_path)
    tokenize_corpus(job, tmp_path)
    stored = marked(job, tmp_path)
    num_samples, padding_share, useful_tokens = real_shares(job, tmp_path)
    for found in (drawn, stored):
        assert (found.name, found.num_samples) == (name, num_samples)
        assert found.padding_share == pytest.approx(padding_share, abs=1e-9)
        assert found.useful_tokens / found.batch_samples == pytest.approx(useful_tokens)
    assert stored == drawn


def test_streams_count_each_predicted_token_once(folder: Path, tmp_path: Path):
    job = job_of(folder, model="lstm", data={"order": "streams"})
    found = marked(job, tmp_path)
    samples, _ = open_datasets(prepare(job, tmp_path), job)
    assert (found.name, found.num_samples, found.padding_share) == ("streams of 64", len(samples), 0)
    assert isinstance(samples, StreamDataset)
    num_predicted = round(found.useful_tokens * samples.slots.num_windows)
    assert num_predicted == int((samples.lengths(np.arange(len(samples))) - 1).sum())
    assert found.num_dropped_tokens == samples.slots.num_dropped_tokens < job.batch_size


def test_windows_that_overlap_count_each_predicted_token_once():
    job = job_of(Path("texts"), sequence_length=8, batch_size=2, data={"stride": 4})
    plain, strided = (
        filling for filling in Texts(job, np.array([10, 12])).fillings() if "windows of 8" in filling.name
    )
    # 24 tokens including end tokens: windows begin at 0, 8, 16, and with the stride at 0, 4, 8, 12, 16
    assert (plain.num_samples, plain.useful_tokens, plain.num_dropped_tokens) == (3, 16, 0)
    assert (strided.num_samples, strided.useful_tokens, strided.num_dropped_tokens) == (5, 2 * 24 / 5, 0)
    assert [plain.is_this_job, strided.is_this_job] == [False, True]


def test_texts_that_stand_for_others_are_counted_as_often():
    job = job_of(Path("texts"), sequence_length=8, batch_size=2, task="classification", data={"order": "blocks"})
    ways = {filling.name: filling for filling in Texts(job, np.array([10, 8, 3]), scale=1000.0).fillings()}
    assert ways["windows of texts, blocks"].is_this_job
    assert ways["windows of texts, blocks"].num_samples == 4000
    assert ways["windows of texts, blocks"].num_long_texts == 1000
    assert ways["truncated texts, shuffle"].num_dropped_tokens == 2000
    assert "truncated texts, blocks" not in ways
