"""What models are judged by: the samples, the counts and the quality are those that a training would see."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from model_folders import model_folder, write_rows
from plimsoll.data.prepare import open_datasets, prepare
from plimsoll.errors import DataError, JobError
from plimsoll.models.build import build_model, save_model
from plimsoll.models.loading import load_model
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.run import shrink_evidence
from plimsoll.run.shrink_evidence import JobEvidence, TextEvidence
from plimsoll.weights.shrink import SHRINKERS, Calibration, Subject

WORDS = ["red", "blue", "green", "warm", "cold", "far"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Sixty labelled texts, a job for them and a model with the weights it begins with."""
    root = tmp_path_factory.mktemp("evidence")
    lines = [{"text": " ".join(WORDS[(i * j) % 6] for j in range(3 + i % 4)), "label": "ab"[i % 2]} for i in range(60)]
    (root / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def job_of(place, **changes):
    fields = {
        "model": {"architecture": "gru", "hidden_size": 8, "embedding_size": 8}, "task": "classification",
        "data": {"train": str(place / "x.jsonl"), "label": "label", "validation": 0.25},
        "tokenizer": {"train": "words", "vocab_size": 50}, "sequence_length": 8, "batch_size": 4,
    }  # fmt: skip
    return Job.from_fields(fields | changes)


def saved(place, job):
    prepared = prepare(job, place / "cache")
    torch.manual_seed(1)
    model = build_model(job, prepared.vocab_size, prepared.num_labels, prepared.end_id).eval()
    save_model(model, place / "model")
    return prepared, model


def test_quality_is_the_loss_and_the_accuracy_of_all_validation_samples(place):
    job = job_of(place)
    prepared, model = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    found = evidence.quality(evidence.load(place / "model", None), None)
    _, validation = open_datasets(prepared, job)
    batch = validation.batch(np.arange(len(validation)))
    with torch.no_grad():
        output = model(**batch)
    assert found.num_samples == len(validation) == 15
    assert found.loss == pytest.approx(output.loss.item(), rel=1e-5)
    assert found.accuracy == pytest.approx((output.logits.argmax(1) == batch["labels"]).float().mean().item())


def test_a_model_that_was_trained_for_integers_is_dense_and_becomes_them(place):
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8}
    job = job_of(place, model={"architecture": "gpt2", **sizes}, quantization_aware="int8")
    _, trained = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    subject, choice = Subject(evidence.load(place / "model", None)), Choice(technique="int8")
    assert SHRINKERS["int8"].refusal(subject, choice) is None
    SHRINKERS["int8"].shrink(subject, choice, Calibration())
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(subject.model(ids).logits, trained(ids).logits, atol=1e-5)


def test_a_part_of_the_samples_is_drawn_evenly(place):
    job = job_of(place)
    saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache", most_samples=5)
    assert evidence.quality(evidence.load(place / "model", None), None).num_samples == 5


@pytest.mark.parametrize("most_samples", [None, 4])
def test_of_texts_in_windows_whole_ones_are_judged(place, most_samples):
    """Three tokens a window: a text has up to three, and is judged by all of them."""
    job = job_of(place, sequence_length=3)
    job = job.model_copy(update={"data": job.data.model_copy(update={"long_texts": "window"})})
    prepared, model = saved(place, job)
    given = job.model_copy(update={"model": str(place / "model")})
    evidence = JobEvidence(given, place / "cache", most_samples)
    _, validation = open_datasets(prepared, job)
    judged = [int(number) for batch in evidence._passes(evidence._data(None)) for number in batch.sample_ids]
    texts = validation.windows.parents(np.array(judged))
    assert len(validation) > len(np.unique(texts)) == (most_samples or 15)
    right = 0
    for text in np.unique(texts):
        batch = validation.batch(np.array(judged)[texts == text])
        assert len(batch["labels"]) == validation.windows.num_of_parents(np.array([text]))[0]
        with torch.no_grad():
            right += int(model(**batch).logits.mean(0).argmax() == batch["labels"][0])
    found = evidence.quality(evidence.load(place / "model", None), None)
    assert (found.num_samples, found.accuracy) == (most_samples or 15, pytest.approx(right / (most_samples or 15)))


def test_calibration_comes_from_the_training_samples_and_is_the_same_each_time(place):
    job = job_of(place)
    prepared, _ = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    calibration = evidence.calibration(None)
    first, second = (list(calibration.batches()) for _ in range(2))
    assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(first, second, strict=True))
    assert sum(len(batch["labels"]) for batch in first) == 45
    assert calibration.token_counts.shape == (prepared.vocab_size,)
    assert calibration.token_counts.sum() == prepared.train.num_tokens


def test_without_validation_data_nothing_is_judged(place):
    job = job_of(place, data={"train": str(place / "x.jsonl"), "label": "label"})
    saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    with pytest.raises(DataError, match="data.validation is None: nothing says what a smaller model is worth"):
        evidence.calibration(None)


def test_tokens_read_on_the_fly_are_not_counted(place):
    data = {
        "train": str(place / "x.jsonl"), "label": "label", "validation": 0.25, "on_the_fly": True,
        "long_texts": "truncate",
    }  # fmt: skip
    job = job_of(place, data=data)
    saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    assert evidence.calibration(None).token_counts is None


def test_embeddings_are_judged_by_their_likeness_to_the_originals(tmp_path):
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    data = write_rows(tmp_path / "x.jsonl", ["w1 w2", "w3", "", "w1 w4 w5"])
    evidence = TextEvidence(folder, data)
    model = evidence.load(folder, None)
    same = evidence.quality(model, None)
    assert (same.similarity, same.num_samples) == (pytest.approx(1.0), 3)
    assert same.loss == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert evidence.quality(model, None).similarity < 0.99
    counts = evidence.calibration(None).token_counts
    assert counts.sum() == sum(int(batch["attention_mask"].sum()) for batch in evidence.batches(None))


def test_texts_go_in_passes_of_so_many_tokens_and_a_few_passes_calibrate(tmp_path, monkeypatch):
    monkeypatch.setattr(shrink_evidence, "_TOKENS_PER_PASS", 12)
    monkeypatch.setattr(shrink_evidence, "_CALIBRATION_PASSES", 2)
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    rows = ["w1 w2 w3 w4", "w3", "w4 w5", "w1", "w1 w4 w5", "w2 w3 w4", "w1", "w5", "w4"]
    evidence = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", rows))
    passes = [batch["attention_mask"] for batch in evidence.batches(None)]
    assert len(passes) > 3
    for mask in passes[:-1]:
        lengths = mask[:-1].sum(1)
        assert mask.numel() >= 12 > len(lengths) * max(lengths, default=0)
    assert len(list(evidence.calibration(None).batches())) == 2


def test_vectors_of_another_size_cannot_be_compared(tmp_path):
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    other = model_folder(tmp_path / "other", class_name="BertModel", hidden_size=32)
    evidence = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", ["w1 w2"]))
    with pytest.raises(JobError, match="the vectors have 32 numbers and the original's 16"):
        evidence.quality(load_model(other).model, None)


def test_a_file_without_texts_is_refused(tmp_path):
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    evidence = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", [""]))
    with pytest.raises(DataError, match="has no row with a text"):
        evidence.quality(evidence.load(folder, None), None)
