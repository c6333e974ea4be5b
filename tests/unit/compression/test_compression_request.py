"""The inputs of a compression that follow from a user's arguments: the model and its evaluation data."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from plimsoll.compression.request import ShrinkOptions, ShrinkSource, decisive, find_source
from plimsoll.errors import DataError, InputError, JobError
from plimsoll.records.job import Job
from plimsoll.training.run_directory import RunDirectory

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
    with pytest.raises(JobError, match="has no model yet: run `plimsoll train --resume"):
        find_source(run.path)
    folder(run.model)
    assert find_source(run.path) == ShrinkSource(run.model, find_source(run.path).job)
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
    found = find_source(model, tmp_path / "x.csv", ("body",), "stars", False, ("batch_size=8",))
    job = found.job
    assert not found.is_to_train  # no option requests a training
    assert (job.task, job.sequence_length, job.batch_size) == ("classification", 64, 8)
    assert (job.data.text, job.data.label, job.data.header, job.data.validation) == (("body",), "stars", False, 0.2)
    assert (job.optimizer.name, job.optimizer.lr) == ("adamw", 5e-5)


def test_a_language_model_with_a_file_needs_no_labels(tmp_path):
    model = folder(tmp_path / "model", architectures=["GPT2LMHeadModel"], n_positions=1024)
    job = find_source(model, tmp_path / "x.txt").job
    assert (job.task, job.sequence_length, job.data.label) == ("language-modeling", 256, None)


@pytest.mark.parametrize(
    ("config", "label", "task", "sequence_length"),
    [
        ({"architecture": "lstm"}, None, "language-modeling", 256),
        ({"architecture": "gru", "num_labels": 2}, "stars", "classification", 256),
        ({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128}, None, "language-modeling", 128),
        ({"architectures": ["XForCausalLM"], "max_position_embeddings": 99, "n_positions": 40}, None,
         "language-modeling", 40),
        ({"architectures": ["XForCausalLM"], "n_positions": None}, None, "language-modeling", 256),
        ({"architectures": ["XForCausalLM"], "n_positions": 257}, None, "language-modeling", 256),
    ],
)  # fmt: skip
def test_a_folder_says_what_its_model_is_for_and_how_much_it_reads(config, label, task, sequence_length, tmp_path):
    job = find_source(folder(tmp_path / "model", **config), tmp_path / "x.jsonl", label=label).job
    assert (job.task, job.sequence_length) == (task, sequence_length)


def test_a_teacher_and_embeddings_of_the_job_are_those_of_the_model_that_was_trained(tmp_path):
    folder(tmp_path / "model")
    fields = {"distill": {"teacher": "big"}, "task": "language-modeling", "embeddings": "words.vec"}
    fields["data"] = {"train": "a.txt", "validation": 0.1}
    job = write_job(tmp_path / "job.yaml", **fields, tokenizer={"train": "words", "vocab_size": 50})
    assert Job.from_yaml(job).distill is not None
    found = find_source(job).job
    assert (found.distill, found.embeddings, found.data.order) == (None, None, "shuffle")


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": ["XForMaskedLM"]}])
def test_a_model_of_sentence_transformers_or_of_no_name_is_one_of_embeddings(config, tmp_path):
    model = folder(tmp_path / "model", **config)
    if config.get("architectures"):
        (model / "modules.json").write_text("[]")
    (tmp_path / "x.txt").write_text("a text")
    assert find_source(model, tmp_path / "x.txt").job is None


def test_a_model_of_embeddings_is_judged_by_its_vectors(tmp_path):
    model = folder(tmp_path / "model", architectures=["BertModel"])
    data = tmp_path / "x.csv"
    data.write_text("a text\n")
    source = find_source(model, data, ("1",), None, False)
    assert (source.job, source.data, source.described) == (None, data, f"the texts of {data}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no data to evaluate smaller models of .* on: give texts with --data"),
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
        ({"architectures": ["BertForMaskedLM"]}, {}, "is a BertForMaskedLM, whose head is not supported"),
        ({"architectures": ["BertForTokenClassification"]}, {}, "is a token classifier: give a job file"),
        ({"architecture": "lstm", "is_tagger": True}, {}, "is a token classifier: give a job file"),
    ],
)
def test_what_does_not_go_with_a_folder_is_refused(config, given, said, tmp_path):
    model = folder(tmp_path / "model", **config)
    with pytest.raises(InputError, match=said):
        find_source(model, tmp_path / "x.csv", **given)


@pytest.mark.parametrize("given", [{"data": "x.csv"}, {"columns": ("body",)}, {"label": "stars"}, {"label": ""}])
def test_data_beside_a_job_or_a_run_are_refused(tmp_path, given):
    run = RunDirectory.create(tmp_path / "run", force=False)
    write_job(run.job)
    for place in (write_job(tmp_path / "job.yaml"), run.path):
        said = f"already names its data: leave out --data {given.get('data')}, --column and --label"
        with pytest.raises(InputError, match=re.escape(said)):
            find_source(place, **given)


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
    with pytest.raises(JobError, match="is not a folder with weights.*train it first"):
        find_source(job)
    with pytest.raises(JobError, match="is not a folder with weights.*train it first"):
        find_source(write_job(tmp_path / "job.yaml"))  # the folder does not exist
    folder(tmp_path / "model")
    job = write_job(tmp_path / "job.yaml", data={"train": "train.jsonl", "label": "stars"})
    with pytest.raises(DataError, match="data.validation is None.*data.validation=0.1"):
        find_source(job)


def test_a_model_of_ones_own_that_was_trained_is_not_asked_to_be_finished(tmp_path):
    """A trained model defined by user code is refused without advice to finish its run.

    Its run has weights but no configuration, so finishing the run again would not help.
    """
    run = RunDirectory.create(tmp_path / "run", force=False)
    job = {"model": "mine:build", "data": {"train": "x.txt", "validation": 0.5}}
    run.write_job(Job.from_fields(job))
    (run.path / "plan.json").write_text("{}")
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"")
    with pytest.raises(JobError, match="trained mine:build, a model defined by your code, but .* support only"):
        find_source(tmp_path / "run")


def test_what_is_read_and_what_it_is_judged_by_are_named(tmp_path):
    (tmp_path / "model").mkdir()
    texts = ShrinkSource(tmp_path / "model", data=tmp_path / "x.txt")
    assert texts.belongings == (tmp_path / "model", tmp_path / "x.txt")
    assert texts.described == f"the texts of {tmp_path / 'x.txt'}"
    job = Job.from_fields({"model": str(tmp_path / "model"), "data": {"train": "x.txt", "validation": 0.25}})
    assert ShrinkSource(tmp_path / "model", job).described == "25% of the training data"


def test_which_chains_are_made_does_not_decide_what_they_come_to(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "x.txt").write_text("w1")
    source, options = ShrinkSource(tmp_path / "model", data=tmp_path / "x.txt"), ShrinkOptions()
    before = decisive(source, options)
    assert decisive(source, replace(options, target_bytes=9, forbids=("int8",), most_tries=1)) == before
    assert decisive(source, replace(options, most_samples=3)) != before
    assert decisive(source, replace(options, recover_steps=3)) != before
    (tmp_path / "x.txt").write_text("w1 w2")
    assert decisive(source, options) != before
