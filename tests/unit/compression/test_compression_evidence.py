"""The evaluation data for models: samples, counts and quality are the same as in a training."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from model_folders import model_folder, tokenizer, write_rows
from plimsoll.compression import evidence as shrink_evidence
from plimsoll.compression.evidence import JobEvidence, TextEvidence
from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration
from plimsoll.data.datasets import open_datasets
from plimsoll.data.prepare import prepare
from plimsoll.errors import DataError, JobError
from plimsoll.models.build import build_model, save_model
from plimsoll.models.loading import load_model
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice

WORDS = ["red", "blue", "green", "warm", "cold", "far"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write sixty labelled texts to a folder."""
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


def judged(place, job):
    """Return the evidence of a job, its quality result, and all validation samples with the output of a plain pass."""
    prepared, model = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    found = evidence.quality(evidence.load(place / "model", None), None)
    _, validation = open_datasets(prepared, job)
    batch = validation.batch(np.arange(len(validation)))
    with torch.no_grad():
        output = model(**batch)
    return evidence, found, batch, output


@pytest.mark.parametrize("tokens_per_pass", [1024, 32], ids=["one pass", "passes of four samples, the last of three"])
def test_quality_is_the_loss_and_the_accuracy_of_all_validation_samples(place, monkeypatch, tokens_per_pass):
    monkeypatch.setattr(shrink_evidence, "_TOKENS_PER_PASS", tokens_per_pass)
    job = job_of(place)
    _, found, batch, output = judged(place, job)
    assert found.num_samples == len(batch["labels"]) == 15
    assert found.loss == pytest.approx(output.loss.item(), rel=1e-5)
    assert found.accuracy == pytest.approx((output.logits.argmax(1) == batch["labels"]).float().mean().item())


@pytest.mark.parametrize(("sequence_length", "expected"), [(8, 128), (205, 4), (2000, 1)])
def test_a_pass_has_as_many_samples_as_have_a_thousand_tokens_and_at_least_one(place, sequence_length, expected):
    assert JobEvidence(job_of(place, sequence_length=sequence_length), place).pass_samples == expected


def test_a_language_model_is_judged_by_its_loss_alone(place):
    """A language model is judged by its loss alone, over windows of eight tokens."""
    data = {"train": str(place / "x.jsonl"), "validation": 0.25, "text": "text"}
    job = job_of(place, task="language-modeling", data=data)
    evidence, found, batch, output = judged(place, job)
    assert (found.loss, found.num_samples) == (pytest.approx(output.loss.item(), rel=1e-5), len(batch["labels"]))
    assert (found.accuracy, found.entity_f1, found.similarity) == (None, None, None)
    assert sum(len(batch["input_ids"]) for batch in evidence.batches(None)) == found.num_samples
    assert evidence.inference(place / "model").name == "score"
    assert evidence.head == "language-modeling"


def test_a_tagger_is_judged_by_its_words_and_its_entities(place):
    texts = (f"w{number} B-X\nin O\nw{number} I-X\n" for number in range(40))
    (place / "x.conll").write_text("\n".join(texts))
    data = {"train": str(place / "x.conll"), "validation": 0.25}
    job = job_of(place, task="token-classification", data=data)
    evidence, found, batch, output = judged(place, job)
    is_word = batch["labels"] >= 0
    right = (output.logits.argmax(-1) == batch["labels"])[is_word].float().mean().item()
    assert (found.loss, found.accuracy) == (pytest.approx(output.loss.item(), rel=1e-5), pytest.approx(right))
    assert found.entity_f1 is not None
    assert (found.num_samples, found.similarity) == (10, None)
    assert evidence.inference(place / "model") is None


def test_a_model_that_was_trained_for_integers_is_dense_and_becomes_them(place):
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8}
    job = job_of(place, model={"architecture": "gpt2", **sizes}, quantization_aware="int8")
    _, trained = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    bundle, choice = Bundle(evidence.load(place / "model", None)), Choice(technique="int8")
    assert SHRINKERS["int8"].refusal(bundle, choice) is None
    SHRINKERS["int8"].shrink(bundle, choice, Calibration())
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(bundle.model(ids).logits, trained(ids).logits, atol=1e-5)


def test_a_part_of_the_samples_is_drawn_evenly(place):
    job = job_of(place)
    prepared, _ = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache", most_samples=5)
    assert evidence.quality(evidence.load(place / "model", None), None).num_samples == 5
    _, validation = open_datasets(prepared, job)
    judged = torch.cat([batch["input_ids"] for batch in evidence.batches(None)])
    assert torch.equal(judged, validation.batch(np.array([0, 3, 7, 10, 14]))["input_ids"])


@pytest.mark.parametrize("most_samples", [None, 4])
def test_of_texts_in_windows_whole_ones_are_judged(place, most_samples):
    """Texts in windows are judged as whole texts.

    Windows have three tokens, so a text has up to three windows, and all of them are used.
    """
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


def test_as_many_samples_calibrate_as_passes_have_and_they_are_drawn_evenly(place, monkeypatch):
    monkeypatch.setattr(shrink_evidence, "_TOKENS_PER_PASS", 16)
    monkeypatch.setattr(shrink_evidence, "_CALIBRATION_PASSES", 3)
    job = job_of(place)
    prepared, _ = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    passes = [batch["input_ids"] for batch in evidence.calibration(None).batches()]
    train, _ = open_datasets(prepared, job)
    drawn = [train.batch(np.array(ids))["input_ids"] for ids in ([0, 8], [17, 26], [35, 44])]
    assert all(torch.equal(one, other) for one, other in zip(passes, drawn, strict=True))


def test_tokens_of_both_parts_of_the_corpus_are_counted(place):
    (place / "held.jsonl").write_text('{"text": "red red far", "label": "a"}\n')
    data = {"train": str(place / "x.jsonl"), "label": "label", "validation": str(place / "held.jsonl")}
    job = job_of(place, data=data)
    prepared, _ = saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    counts = evidence.calibration(None).token_counts
    assert counts.sum() == prepared.train.num_tokens + prepared.validation.num_tokens > prepared.train.num_tokens


def test_without_validation_data_nothing_is_judged(place):
    job = job_of(place, data={"train": str(place / "x.jsonl"), "label": "label"})
    saved(place, job)
    evidence = JobEvidence(job.model_copy(update={"model": str(place / "model")}), place / "cache")
    with pytest.raises(DataError, match="data.validation is None, so smaller models cannot be evaluated"):
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
    task = evidence.inference(folder)
    with torch.no_grad():
        vectors = [task.compute(model, batch)[0] for batch in evidence.batches(None)]
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
        others = [task.compute(model, batch)[0] for batch in evidence.batches(None)]
    cosines = [(a @ b) / (a.norm() * b.norm()) for a, b in zip(torch.cat(vectors), torch.cat(others), strict=True)]
    found = evidence.quality(model, None)
    assert found.similarity == pytest.approx(sum(map(float, cosines)) / 3, abs=1e-6)
    assert found.similarity < 0.99
    assert found.loss == pytest.approx(1 - found.similarity)
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


def test_of_texts_the_first_are_judged_and_all_are_the_corpus(tmp_path):
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    evidence = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", ["w1", "w2 w3", "w4 w4 w4"]), most_samples=2)
    assert evidence.quality(evidence.load(folder, None), None).num_samples == 2
    (batch,) = evidence.batches(None)
    assert batch["input_ids"].tolist() == [[2, 5, 3, 0], [2, 6, 7, 3]]  # token 5 stands for w1
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    counts = evidence.calibration(None).token_counts
    assert counts[:9].tolist() == [0, 0, 3, 3, 0, 1, 1, 1, 3]
    assert len(counts) == 94


@pytest.mark.parametrize(("token", "expected"), [("[SEP]", 3), (None, 0)])
def test_texts_are_padded_with_the_token_of_the_tokenizer(tmp_path, token, expected):
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    names = tokenizer()
    names.pad_token = token
    names.save_pretrained(folder)
    (batch,) = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", ["w1", "w2 w3"])).batches(None)
    assert batch["input_ids"][0].tolist() == [2, 5, 3, expected]


@pytest.mark.parametrize(("positions", "expected"), [(64, 64), (512, 256)])
def test_long_texts_are_cut_to_what_the_model_reads_and_to_a_length_that_is_usual(tmp_path, positions, expected):
    folder = model_folder(tmp_path / "model", class_name="BertModel", max_position_embeddings=positions)
    names = tokenizer()
    names.model_max_length = positions
    names.save_pretrained(folder)
    (batch,) = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", ["w1 " * 600])).batches(None)
    assert batch["input_ids"].shape == (1, expected)


def test_of_embeddings_only_vectors_of_another_size_are_not_judged(tmp_path):
    evidence = TextEvidence(tmp_path, tmp_path / "x.jsonl")
    assert evidence.head == "none"
    assert evidence.cannot_judge("hidden").startswith("vectors of another size cannot be compared")
    assert [evidence.cannot_judge(method) for method in ("heads", "layers")] == [None, None]


def test_vectors_of_another_size_cannot_be_compared(tmp_path):
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    other = model_folder(tmp_path / "other", class_name="BertModel", hidden_size=32)
    evidence = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", ["w1 w2"]))
    with pytest.raises(JobError, match="the vectors have 32 numbers and the original's 16"):
        evidence.quality(load_model(other).model, None)


def test_a_file_without_texts_is_refused(tmp_path):
    folder = model_folder(tmp_path / "model", class_name="BertModel")
    evidence = TextEvidence(folder, write_rows(tmp_path / "x.jsonl", [""]))
    with pytest.raises(DataError, match="has no row with text"):
        evidence.quality(evidence.load(folder, None), None)
