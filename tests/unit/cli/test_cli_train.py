"""`plimsoll train`: its refusals before anything starts, and one complete small run."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from plimsoll.cli.main import app
from plimsoll.errors import InputError, JobError, OutputError
from plimsoll.records.run import RunRecord
from plimsoll.training.run_directory import RunDirectory
from processes import LONGEST_SECONDS, environment

JOB = {
    "model": {"architecture": "lstm", "embedding_size": 8, "hidden_size": 8},
    "data": {"train": "text.txt"},
    "tokenizer": {"vocab_size": 300},
    "sequence_length": 16,
    "batch_size": 4,
    "steps": 1000,
}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of the text" for i in range(300)))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def refused(*arguments):
    """Run the command with arguments that it refuses, and return the error."""
    done = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert done.stdout == ""
    return done.exception


def test_a_job_file_is_needed(tmp_path):
    error = refused("--out", tmp_path / "a")
    assert isinstance(error, InputError)
    assert "no job file was given" in str(error)
    assert "add --resume to continue it" in str(error)


def test_a_job_file_that_is_not_there_is_said(tmp_path):
    assert isinstance(refused(tmp_path / "job.yaml", "--out", tmp_path / "a"), JobError)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "much"], "--budget: cannot read 'much'"),
        (["--set", "batchsize=3"], "batch_size"),
        (["--set", "steps=0"], "steps"),
        (["--from-step", 3], "add --resume"),
        (
            ["--pin", "micro batch"],
            "cannot read 'micro batch' as a choice: write a technique, as in activation_offload",
        ),
        (["--pin", "micro_batch=4", "--pin", "micro_batch=2"], "cannot both be pinned"),
        (["--pin", "micro_batch=4", "--forbid", "micro_batch"], "leave one of the two out"),
        (["--no-plan", "--pin", "micro_batch=4"], "--no-plan cannot be combined with --pin micro_batch=4: leave one"),
        (
            ["--no-plan", "--no-trial"],
            "--no-trial has no effect with --no-plan, which never runs a trial: leave out --no",
        ),
        (["--plan", "none.json", "--forbid", "offload"], "--plan none.json cannot be combined with --forbid offload"),
        (["--plan", "none.json"], "there is no 'plan' record at none.json: check the path"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_made(job, tmp_path, arguments, message):
    error = refused(job, "--out", tmp_path / "a", *arguments)
    assert isinstance(error, InputError)
    assert message in str(error)
    assert not (tmp_path / "a").exists()


def test_a_run_that_is_there_is_not_overwritten(job, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("mine")  # another program may have written a file of this name
    error = refused(job, "--out", tmp_path / "a", "--force")
    assert isinstance(error, OutputError)
    assert "is not empty and not a run, so nothing is written there or removed" in str(error)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.yaml"], "leave it out, or drop --resume"),
        (["--force", "--cache", "c"], "leave out --force and --cache, or drop --resume"),
        (["--cache", "c"], "leave out --cache, or drop --resume"),
        (["--no-plan"], "continues with the plan of the run: leave out --no-plan, or drop --resume"),
        (["--no-trial"], "--no-trial has no effect with --resume, which never runs a trial: leave out --no-trial"),
        (["--plan", "p.json"], "leave out --plan p.json, or drop --resume"),
        (["--pin", "offload", "--forbid", "lora"], "leave out --pin offload, --forbid lora, or drop --resume"),
        ([], "is not a run directory, so there is nothing to resume: write `plimsoll train --resume --out DIR"),
    ],
)
def test_going_on_takes_only_what_makes_sense(tmp_path, arguments, message):
    error = refused("--resume", "--out", tmp_path / "a", *arguments)
    assert isinstance(error, InputError)
    assert message in str(error)


@pytest.mark.parametrize("options", [[], ["--no-trial"]])
def test_a_rank_that_is_alone_tries_its_plan_unless_it_is_told_not_to(job, tmp_path, monkeypatch, options):
    asked = []
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("plimsoll.training.ranks.prepared_by_first", lambda *_: (0, 0))
    monkeypatch.setattr("plimsoll.training.session.Session.run", lambda session: asked.append(session.trial))
    refused(job, "--out", tmp_path / "a", *options)  # refused at the end, because there is no run to show
    assert asked == [not options]


def test_going_on_without_a_run_names_the_newest_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seconds, name in enumerate(("b", "a", "without-a-checkpoint"), start=1):
        metrics = tmp_path / "runs" / name / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.touch()
        if seconds < 3:
            (metrics.parent / "checkpoints" / "step-00000001").mkdir(parents=True)
        os.utime(metrics, (seconds, seconds))
    told = "runs/latest is not a run directory, so there is nothing to resume: write `plimsoll train --resume "
    assert str(refused("--resume")) == told + "--out runs/a` for the newest of 2 with a checkpoint in runs"


def train_json(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "plimsoll", "train", *map(str, arguments), "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )


def failure_of(done):
    """Return the JSON object of a failed command, which must contain the message on standard error."""
    (line,) = done.stdout.splitlines()
    fields = json.loads(line)
    assert fields.keys() == {"error", "message", "exit_code"}
    assert fields["exit_code"] == done.returncode
    assert done.stderr == f"error: {fields['message']}\n"
    return fields


def test_json_says_what_this_process_refuses(job, tmp_path):
    assert failure_of(train_json(job, "--out", tmp_path / "a", "--set", "steps=0"))["error"] == "JobError"


def test_json_says_what_a_process_that_it_started_refuses(job, tmp_path):
    failed = failure_of(train_json(job, "--out", tmp_path / "a", "--set", "model.hiden_size=4"))
    assert (failed["error"], failed["exit_code"]) == ("JobError", 2)
    assert "did you mean `hidden_size`" in failed["message"]


def test_json_of_a_run_that_failed_in_training_is_its_record_and_of_one_that_was_refused_is_not(job, tmp_path):
    out = tmp_path / "a"
    diverging = ["--set", "optimizer={name: sgd, lr: 1e38}", "--set", "checkpoint.every=1", "--set", "seed=1"]
    done = train_json(job, "--out", out, *diverging)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    record = RunRecord.from_json(line)
    assert (record.name, record.status) == ("a", "failed")
    assert done.stderr == f"error: {record.message}\n"
    assert failure_of(train_json(job, "--out", out))["error"] == "OutputError"  # the record belongs to another command
    refused = failure_of(train_json("--resume", "--out", out, "--set", "seed=2"))
    assert (refused["error"], "seed was 1, is 2" in refused["message"]) == ("CheckpointError", True)


def test_a_small_run_ends_with_one_record_on_standard_output(job, tmp_path):
    out, cache = tmp_path / "a", tmp_path / "cache"
    RunDirectory.create(out, force=False)
    arguments = ["--out", out, "--force", "--budget", "1GiB", "--set", "steps=2", "--set", "seed=7", "--cache", cache]
    arguments.append("--no-plan")
    done = train_json(job, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    record = RunRecord.from_json(line)
    assert json.loads(line)["record"] == "run"
    assert (record.status, len(record.steps), record.limit_bytes) == ("finished", 2, 1 << 30)
    assert (record.job["seed"], record.job["batch_size"]) == (7, 4)
    assert 0 < record.peak_bytes < 1 << 30
    kept = (out / "job.yaml").read_bytes()
    fewer = failure_of(train_json("--resume", "--out", out, "--set", "steps=1"))
    assert fewer["message"] == "steps is 1, but 2 steps are done: give at least that many, or choose with --from-step"
    other = failure_of(train_json("--resume", "--out", out, "--set", f"data.train={job}"))
    assert "cannot be made again: the texts" in other["message"]
    with RunDirectory(out).claimed():
        busy = failure_of(train_json("--resume", "--out", out, "--set", "steps=9"))
    assert "another process is training in" in busy["message"]
    assert (out / "job.yaml").read_bytes() == kept
    assert not (out / "old.txt").exists()
    assert not (out / "data").exists()
    assert any(cache.iterdir())
