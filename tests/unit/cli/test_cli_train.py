"""`plimsoll train`: what it prints, what it refuses, and what it leaves on the disk when it does.

Stops, kills and resumes are in `tests/end_to_end`.
"""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from plimsoll.cli.main import app
from plimsoll.errors import InputError
from plimsoll.records.plan import Plan
from plimsoll.records.run import RunRecord, StepLine
from plimsoll.run.directory import RunDirectory


def test_the_json_is_one_run_record_and_nothing_else(finished):
    assert finished.done.stderr == ""
    assert finished.done.stdout.count("\n") == 1
    record = RunRecord.from_json(finished.done.stdout)
    assert record == RunRecord.from_directory(finished.path) == RunRecord.load(finished.path / "record.json")
    assert (record.status, [step.step for step in record.steps]) == ("finished", [1, 2])


def test_the_run_directory_has_the_job_with_its_budget_and_the_plan(finished):
    job = yaml.safe_load((finished.path / "job.yaml").read_text())
    assert job["budget"] == {"device_bytes": 2 << 30}
    assert (job["steps"], job["optimizer"]["name"], job["seed"]) == (2, "adamw", 0)
    assert Plan.load(finished.path / "plan.json").micro_batches == (16, 8, 4, 2, 1)


def test_the_cache_is_where_it_was_asked_for(finished):
    assert any(finished.cache.iterdir())
    assert not (finished.path / "data").exists()


def test_a_run_goes_on_with_a_changed_job_and_shows_it(call, run_copy):
    code, out, err = call("train", "--resume", "--out", run_copy, "--set", "steps=3", "--budget", "1GiB")
    assert code == 0, err
    assert "finished" in out
    assert "step 3/3" in err
    job = yaml.safe_load((run_copy / "job.yaml").read_text())
    assert (job["steps"], job["budget"]["device_bytes"]) == (3, 1 << 30)
    lines = RunDirectory(run_copy).lines()
    assert [line.step for line in lines if isinstance(line, StepLine)] == [1, 2, 3]


def test_force_removes_the_earlier_run_before_anything_else(call, finished, run_copy):
    """The budget is below what the interpreter needs, so that the new run ends before its first step."""
    code, out, err = call("train", finished.job, "--out", run_copy, "--cache", finished.cache, "--force", "--json",
                          "--budget", "10MiB")  # fmt: skip
    assert (code, out) == (2, "")
    assert err.startswith("error: a budget of 10.0 MiB cannot hold this training: before the first activation ")
    assert err.count("\n") == 1
    directory = RunDirectory(run_copy)
    assert directory.lines() == []
    assert not directory.checkpoints.exists()


def test_an_earlier_run_is_not_touched(refused, finished, run_copy):
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}
    message = refused("train", finished.job, "--out", run_copy)
    assert f"{run_copy} exists already and is not overwritten" in message
    assert f"`plimsoll train --resume --out {run_copy}`" in message
    assert "--force" in message
    assert {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no job file was given for {out}: write `plimsoll train job.yaml --out {out}`, or add --resume"),
        (("{out}/job.yaml",), "there is no job file at {out}/job.yaml: check the path"),
        (("--resume",), "{out} is not a run directory (it has no job.yaml)"),
        (("--resume", "{job}"), "so {job} would be ignored: leave it out, or drop --resume"),
        (("{job}", "--set", "steps"), "--set 'steps' is not of the form field=value"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_made(arguments, message, refused, finished, tmp_path):
    names = {"out": tmp_path / "out", "job": finished.job}
    given = [word.format(**names) for word in arguments]
    assert message.format(**names) in refused("train", *given, "--out", names["out"])
    assert not names["out"].exists()


def test_wrong_fields_are_listed_one_per_line(call, finished, tmp_path):
    code, out, err = call("train", finished.job, "--out", tmp_path / "out", "--set", "step=5", "--budget", "lots")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: {finished.job} cannot be used:",
        "  budget.device: cannot read 'lots' as a size in bytes: write a number and a unit, for example 2GiB or 800MiB "
        "(got 'lots')",
        "  step: unknown field; did you mean `steps`?",
    ]
    assert not (tmp_path / "out").exists()


def test_data_that_is_not_there_ends_the_command_with_one_line(refused, finished, tmp_path):
    message = refused("train", finished.job, "--out", tmp_path / "out", "--set", "data.train=none.txt", "--json")
    assert "none.txt" in message


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--from-step", "2", "--out", "runs/a", "job.yaml"), "add --resume"),
        (("--resume", "--force", "--out", "runs/a"), "leave out --force and --cache"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(arguments, text):
    found = CliRunner().invoke(app, ["train", *arguments])
    assert isinstance(found.exception, InputError)
    assert text in str(found.exception)
