"""The training of a smaller model: its job, and the results that are read from its run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from plimsoll.compression import recover
from plimsoll.compression.recover import cost_of, train_again
from plimsoll.compression.worker import Source
from plimsoll.errors import InputError
from plimsoll.records.distill import DistillSource
from plimsoll.records.job import Job
from plimsoll.records.run import RunHead
from plimsoll.training.run_directory import RunDirectory
from shrink_records import trained_record

JOB = Job.from_fields({
    "model": "original", "task": "classification", "tokenizer": {"path": "original"}, "steps": 900, "evaluate_every": 5,
    "data": {"train": "x.jsonl", "label": "label", "validation": 0.25}, "batch_size": 4,
})  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """Replace the training command by a function that always fails, and return a list of its arguments."""
    commands = []

    def run(command, **_):
        commands.append(command[command.index("train") + 1 :])
        return subprocess.CompletedProcess(command, 2, json.dumps({"message": "there is no text"}))

    monkeypatch.setattr(recover.subprocess, "run", run)
    return commands


def refused(place, source=Source(folder="small"), budget_bytes=None, teacher=None):
    with pytest.raises(InputError, match=r"small cannot be trained \(there is no text\): correct this, or set"):
        train_again(JOB, source, place, place / "cache", 100, budget_bytes, teacher)
    return Job.from_yaml(place / "job.yaml")


def test_the_job_is_the_users_but_for_the_model_and_the_steps(asked, tmp_path):
    job = refused(tmp_path)
    assert (job.steps, job.evaluate_every, job.checkpoint.every) == (100, None, 25)
    assert (job.batch_size, job.tokenizer.path, job.distill) == (4, str(tmp_path / "original"), None)
    assert "--no-plan" in asked[0]


def test_a_model_with_tokens_of_its_own_a_teacher_and_a_budget(asked, tmp_path):
    job = refused(tmp_path, Source(folder="small", tokenizer="/small"), 1 << 30, Path("/teacher"))
    assert (job.tokenizer.path, job.distill.teacher, job.budget.device_bytes) == ("/small", "/teacher", 1 << 30)
    assert "--no-plan" not in asked[0]


def test_paths_are_those_of_where_the_command_was_given(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    job = refused(Path("work"), Source(folder="small", tokenizer="tokens"))  # the job file lies in another folder
    assert (job.model, job.tokenizer.path) == (str(tmp_path / "small"), str(tmp_path / "tokens"))


def test_a_teacher_of_the_job_itself_is_not_kept_where_there_is_to_be_none(asked, tmp_path):
    job = JOB.model_copy(update={"distill": DistillSource(teacher="/mine")})
    with pytest.raises(InputError):
        train_again(job, Source(folder="small"), tmp_path, tmp_path / "cache", 100, None, None)
    assert Job.from_yaml(tmp_path / "job.yaml").distill is None


def test_what_was_begun_goes_on(asked, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "prepared.json").touch()
    refused(tmp_path)
    assert "--force" in asked.pop()  # the run was killed before its first checkpoint, so it cannot resume
    (tmp_path / "run" / "checkpoints" / "step-000025").mkdir(parents=True)
    refused(tmp_path)
    assert asked == [["--resume", "--out", str(tmp_path / "run"), "--json"]]


@pytest.mark.parametrize(
    ("step_seconds", "expected"),
    [((), None), ((9.0,), 9.0), ((9.0, 2.0), 2.0), ((9.0, 2.0, 3.0), 2.5), ((9.0, 2.0, 1.0, 8.0), 2.0)],
)
def test_a_step_takes_what_is_usual_behind_the_first(step_seconds, expected):
    cost = cost_of(trained_record(*step_seconds, peak_bytes=70), has_teacher=True)
    assert (cost.step_seconds, cost.peak_bytes, cost.has_teacher) == (expected, 70 if step_seconds else None, True)


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (3, 1), (8, 2), (103, 25)])
def test_a_training_has_four_checkpoints_of_which_the_last_is_kept(asked, tmp_path, steps, every):
    with pytest.raises(InputError):
        train_again(JOB, Source(folder="small"), tmp_path, tmp_path / "cache", steps, None, None)
    checkpoint = Job.from_yaml(tmp_path / "job.yaml").checkpoint
    assert (checkpoint.every, checkpoint.keep) == (every, 1)


@pytest.mark.parametrize("teacher", [None, Path("/teacher")])
def test_a_training_that_ends_well_leaves_its_model_and_what_it_took(tmp_path, monkeypatch, teacher):
    def run(command, **_):
        place = RunDirectory(Path(command[command.index("--out") + 1]))
        record = trained_record(9.0, 2.0, peak_bytes=70)
        RunHead(job={}, device=record.device, versions={}, fingerprint={}).save(place.head)
        record.plan.save(place.plan)
        for line in record.steps:
            place.append(line)
        return subprocess.CompletedProcess(command, 0, "")

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(recover.subprocess, "run", run)
    trained = train_again(JOB, Source(folder="small"), tmp_path, tmp_path / "cache", 100, None, teacher)
    assert trained.folder == tmp_path / "run" / "model"
    assert (trained.cost.peak_bytes, trained.cost.has_teacher) == (70, teacher is not None)


@pytest.mark.parametrize("printed", ["", "no json", "{}", "[]", "3"])
def test_what_says_no_reason_has_said_it_on_standard_error(printed, tmp_path, monkeypatch):
    monkeypatch.setattr(
        recover.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, printed)
    )
    with pytest.raises(InputError, match="cannot be trained .standard error has the reason."):
        train_again(JOB, Source(folder="small"), tmp_path, tmp_path / "cache", 100, None, None)
