"""What is made smaller, and what it is judged by, of what a user gives."""

from __future__ import annotations

import json
import re

import pytest

from plimsoll.errors import DataError, InputError, JobError
from plimsoll.run.directory import RunDirectory
from plimsoll.run.shrink_source import find_source

JOB = {
    "task": "classification", "tokenizer": "model", "sequence_length": 32,
    "data": {"train": "train.jsonl", "text": "body", "label": "stars", "validation": 0.25},
}  # fmt: skip


def folder(path, **config):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_job(path, **changes):
    path.write_text(json.dumps(JOB | {"model": str(path.parent / "model")} | changes))
    return path


def test_a_job_brings_its_folder_and_its_data(tmp_path):
    folder(tmp_path / "model", architectures=["BertForSequenceClassification"])
    source = find_source(write_job(tmp_path / "job.yaml"))
    assert source.folder == tmp_path / "model"
    assert source.job.model == str((tmp_path / "model").resolve())
    assert (source.described, source.trained, source.cache) == ("25% of the training data", None, None)


def test_a_run_brings_its_model_its_record_and_its_tokens(tmp_path):
    run = RunDirectory.create(tmp_path / "run", force=False)
    write_job(run.job)
    (run.path / "plan.json").write_text("{}")
    with pytest.raises(JobError, match="has no model yet: finish it"):
        find_source(run.path)
    folder(run.model)
    run.record.write_text("{}")
    run.cache.mkdir()
    source = find_source(run.path, changes=("data.validation=held.jsonl", "batch_size=4"))
    assert (source.folder, source.trained, source.cache) == (run.model, run.record, run.cache)
    assert source.job.batch_size == 4
    assert source.described.endswith("held.jsonl")


def test_the_state_between_windows_is_not_what_a_smaller_model_is_judged_by(tmp_path):
    folder(tmp_path / "model", architecture="lstm")
    fields = {
        "task": "language-modeling",
        "data": {"train": "a.txt", "order": "streams", "reset": "texts", "validation": 0.1},
    }
    data = find_source(write_job(tmp_path / "job.yaml", **fields)).job.data
    assert (data.order, data.reset) == ("shuffle", None)


def test_a_classifier_with_a_file_gets_a_job_of_its_own(tmp_path):
    model = folder(tmp_path / "model", architectures=["BertForSequenceClassification"], max_position_embeddings=64)
    job = find_source(model, tmp_path / "x.csv", ("body",), "stars", False, ("batch_size=8",)).job
    assert (job.task, job.sequence_length, job.batch_size) == ("classification", 64, 8)
    assert (job.data.text, job.data.label, job.data.header, job.data.validation) == (("body",), "stars", False, 0.2)


def test_a_language_model_with_a_file_needs_no_labels(tmp_path):
    model = folder(tmp_path / "model", architectures=["GPT2LMHeadModel"], n_positions=1024)
    job = find_source(model, tmp_path / "x.txt").job
    assert (job.task, job.sequence_length) == ("language-modeling", 256)


def test_a_model_of_embeddings_is_judged_by_its_vectors(tmp_path):
    model = folder(tmp_path / "model", architectures=["BertModel"])
    data = tmp_path / "x.csv"
    data.write_text("a text\n")
    source = find_source(model, data, ("1",), None, False)
    assert (source.job, source.data, source.described) == (None, data, f"the texts of {data}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing says what smaller models of .* are worth: give texts with --data"),
        ({"data": "x.csv"}, "classification and needs the column of the labels: give --label"),
    ],
)
def test_a_classifier_without_labelled_texts_is_refused(given, said, tmp_path):
    model = folder(tmp_path / "model", architectures=["BertForSequenceClassification"])
    with pytest.raises(InputError, match=said):
        find_source(model, **{name: tmp_path / value for name, value in given.items()})


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, {"label": "stars"}, "has no use for --label stars: leave it out"),
        ({"architectures": ["BertModel"]}, {"label": "stars"}, "no labels and no job: leave out --label stars"),
        ({"architectures": ["BertModel"]}, {"changes": ("batch_size=4",)}, "leave out --set batch_size=4"),
        ({"architectures": ["BertModel"]}, {}, "there is no file .*x.csv: give --data a file"),
        ({"architectures": ["BertForMaskedLM"]}, {}, "is a BertForMaskedLM, whose head nothing here judges"),
        ({"architectures": ["BertForTokenClassification"]}, {}, "is a classifier of tokens: give a job file"),
        ({"architecture": "lstm", "is_tagger": True}, {}, "is a classifier of tokens: give a job file"),
    ],
)
def test_what_does_not_go_with_a_folder_is_refused(config, given, said, tmp_path):
    model = folder(tmp_path / "model", **config)
    with pytest.raises(InputError, match=said):
        find_source(model, tmp_path / "x.csv", **given)


def test_data_beside_a_job_are_refused(tmp_path):
    with pytest.raises(InputError, match=re.escape("says itself what its data are: leave out --data x.csv")):
        find_source(write_job(tmp_path / "job.yaml"), "x.csv")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no model in .*: give a run directory"):
        find_source(tmp_path / "nothing", tmp_path / "x.csv")


def test_a_damaged_configuration_is_refused(tmp_path):
    model = folder(tmp_path / "model")
    for text, said in (("{", "cannot be read"), ("[]", "is not an object of settings")):
        (model / "config.json").write_text(text)
        with pytest.raises(JobError, match=said):
            find_source(model, tmp_path / "x.csv")


def test_a_job_without_weights_or_without_data_to_judge_by_is_refused(tmp_path):
    job = write_job(tmp_path / "job.yaml", model={"architecture": "bert"})
    with pytest.raises(JobError, match="is no folder with weights.*train it first"):
        find_source(job)
    folder(tmp_path / "model")
    job = write_job(tmp_path / "job.yaml", data={"train": "train.jsonl", "label": "stars"})
    with pytest.raises(DataError, match="data.validation is None.*data.validation=0.1"):
        find_source(job)
