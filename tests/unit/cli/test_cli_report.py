"""`plimsoll report`, with the directory of a run written by hand."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from plimsoll.cli.main import app
from plimsoll.errors import OutputError, RecordError
from plimsoll.records.device import Budget, Device, MemoryUse
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import EndLine, RunHead, RunRecord, StepLine
from plimsoll.training.run_directory import RunDirectory
from prediction_records import too_large
from processes import environment

GIBIBYTE = 1 << 30


@pytest.fixture
def run(tmp_path):
    """Create a finished run of two steps with 100 tokens each."""
    directory = RunDirectory.create(tmp_path / "ship", force=False)
    use = MemoryUse(used_bytes=GIBIBYTE // 2, peak_bytes=GIBIBYTE // 2, reserved_bytes=0)
    device = Device(
        name="a CPU", kind="cpu", capacity_bytes=GIBIBYTE, free_bytes=GIBIBYTE, hardware_bytes=GIBIBYTE, use=use
    )
    RunHead(job={"steps": 2, "batch_size": 4}, device=device, versions={}, fingerprint={}).save(directory.head)
    micro_batch_plan(Budget(device_bytes=GIBIBYTE), (4, 2, 1)).save(directory.plan)
    for number in (1, 2):
        step = StepLine(
            time_seconds=number,
            step=number,
            epoch=0,
            first_sample=0,
            num_samples=4,
            num_units=100,
            loss=3.25 - number,
            learning_rate=0.1,
            step_seconds=1.0,
            micro_batch=4,
            peak_bytes=GIBIBYTE // 2,
        )
        directory.append(step)
    directory.append(EndLine(time_seconds=2.0, step=2, status="finished"))
    return directory.path


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_text_says_how_it_ended(run):
    done = invoke(run)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "ship" in done.stdout
    assert "finished" in done.stdout
    assert "1.25" in done.stdout  # the last loss


def test_json_is_the_record_and_nothing_else(run):
    done = invoke(run, "--json")
    (line,) = done.stdout.splitlines()
    assert RunRecord.from_json(line) == RunRecord.from_directory(run)


def test_a_page_is_written_and_its_path_said(run, tmp_path):
    page = tmp_path / "ship.html"
    assert invoke(run, "-o", page).stdout == f"{page}\n"
    html = page.read_text(encoding="utf-8")
    assert html.lower().startswith("<!doctype html>")
    assert "ship" in html


def test_with_a_page_json_is_still_one_record_and_nothing_else(run, tmp_path):
    (line,) = invoke(run, "-o", tmp_path / "ship.html", "--json").stdout.splitlines()
    assert RunRecord.from_json(line).name == "ship"


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_saved_prediction_is_shown(tmp_path, flags):
    file = tmp_path / "prediction.json"
    too_large().save(file)
    done = invoke(file, *flags)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "largest micro-batch" in done.stdout
    assert invoke(file, "-o", tmp_path / "a.html").exit_code == 0
    assert "Does not fit" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_run_that_was_saved_as_json_is_shown_like_its_directory(run, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(invoke(run, "--json").stdout, encoding="utf-8")
    assert invoke(file).stdout == invoke(run).stdout


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "job.yaml").write_text("model: lstm")
    refused = invoke(tmp_path / "job.yaml")
    assert isinstance(refused.exception, RecordError)
    assert "give a JSON file that --json wrote" in str(refused.exception)


def test_a_page_is_not_overwritten_without_force(run, tmp_path):
    page = tmp_path / "ship.html"
    page.write_text("mine")
    refused = invoke(run, "-o", page)
    assert isinstance(refused.exception, OutputError)
    assert str(refused.exception) == f"{page} exists already and is not overwritten: give another -o, or --force"
    assert page.read_text() == "mine"
    assert invoke(run, "-o", page, "--force").exit_code == 0
    assert page.read_text(encoding="utf-8") != "mine"


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_reader_that_went_away_is_borne_in_silence(run, flags):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "plimsoll", "report", str(run), *flags]
    done = subprocess.run(command, env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_where_a_page_cannot_be_written_is_said(run, tmp_path):
    refused = invoke(run, "-o", tmp_path / "no-such-folder" / "ship.html")
    assert isinstance(refused.exception, OutputError)
    assert "does not exist" in str(refused.exception)


@pytest.mark.parametrize("name", [".", "missing"])
def test_what_is_no_run_is_refused(tmp_path, name):
    refused = invoke(tmp_path / name)
    assert isinstance(refused.exception, RecordError)
    assert "give the --out of `plimsoll train`" in str(refused.exception)


def test_a_record_that_is_not_there_is_not_taken_for_a_run(tmp_path):
    refused = invoke(tmp_path / "plan.json")
    assert isinstance(refused.exception, RecordError)
    assert "No such file or directory" in str(refused.exception)
    assert "give a JSON file that --json wrote" in str(refused.exception)


def test_json_says_what_went_wrong(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "plimsoll", "report", tmp_path / "none", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    failure = json.loads(done.stdout)
    assert (failure["error"], failure["exit_code"]) == ("RecordError", done.returncode)
    assert done.stderr == f"error: {failure['message']}\n"


def test_two_runs_are_compared(run, tmp_path):
    page = tmp_path / "two.html"
    assert "Both runs have the same job." in invoke(run, run).stdout
    assert json.loads(invoke(run, run, "--json").stdout)["record"] == "run-comparison"
    assert invoke(run, run, "-o", page).stdout == f"{page}\n"
    assert "ship (first) and ship (second)" in page.read_text(encoding="utf-8")


def test_only_runs_are_compared(run, tmp_path):
    too_large().save(tmp_path / "prediction.json")
    done = invoke(run, tmp_path / "prediction.json")
    assert isinstance(done.exception, RecordError)
    assert "prediction.json holds a record of kind 'prediction', but only runs can be compared: give" in str(
        done.exception
    )
    assert "no-such" in str(invoke(run, tmp_path / "no-such").exception)
