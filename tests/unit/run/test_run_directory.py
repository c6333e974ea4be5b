"""The run directory: made, opened, appended to, cut back; and what a kill in the middle of a line may damage."""

from __future__ import annotations

import os

import pytest

from plimsoll.errors import OutputError, RecordError
from plimsoll.records.job import Job
from plimsoll.records.run import (
    CheckpointLine,
    DeathLine,
    EndLine,
    EvaluationLine,
    Line,
    OomEvent,
    StartLine,
    StepLine,
)
from plimsoll.run.directory import RunDirectory


def step(number: int, micro_batch: int = 8) -> StepLine:
    return StepLine(
        time_seconds=float(number),
        step=number,
        epoch=0,
        first_sample=8 * (number - 1),
        num_samples=8,
        num_units=80,
        loss=float("nan") if number == 2 else 1.5,
        learning_rate=1e-3,
        step_seconds=1.0,
        micro_batch=micro_batch,
    )


def start(number: int, micro_batch: int = 8) -> StartLine:
    return StartLine(
        time_seconds=0.0, step=number, micro_batch=micro_batch, baseline_bytes=1, wall_time="2026-01-01T00:00:00+00:00"
    )


def saved(number: int) -> CheckpointLine:
    return CheckpointLine(time_seconds=float(number), step=number, num_bytes=1)


def evaluated(number: int) -> EvaluationLine:
    return EvaluationLine(time_seconds=float(number), step=number, loss=1.0, num_samples=1, num_units=1)


def end(number: int) -> EndLine:
    return EndLine(time_seconds=float(number), step=number, status="interrupted", message="stopped – é")


def oom(micro_batch: int, next_micro_batch: int | None) -> OomEvent:
    return OomEvent(family="cpu-allocator", micro_batch=micro_batch, next_micro_batch=next_micro_batch)


def died(next_micro_batch: int | None) -> DeathLine:
    return DeathLine(time_seconds=0.0, signal="SIGKILL", evidence="none", next_micro_batch=next_micro_batch)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "runs" / "a", force=False)


def filled(directory: RunDirectory, *lines: Line) -> RunDirectory:
    for line in lines:
        directory.append(line)
    return directory


def texts(directory: RunDirectory) -> list[str]:
    """The lines as they are written: a NaN is equal to itself there."""
    return [line.model_dump_json() for line in directory.lines()]


def test_a_new_directory_has_no_lines(directory):
    assert directory.lines() == []
    assert [path.name for path in directory.path.iterdir()] == ["metrics.jsonl"]


def test_an_empty_folder_is_taken_as_it_is(tmp_path):
    assert RunDirectory.create(tmp_path, force=False).lines() == []


@pytest.mark.parametrize("name", ["a/file", "a"])
def test_what_is_there_is_removed_only_by_force(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match=r"a exists already and is not overwritten: give another --out, go on with"):
        RunDirectory.create(tmp_path / "a", force=False)
    assert (tmp_path / name).read_text() == "mine"
    RunDirectory.create(tmp_path / "a", force=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["metrics.jsonl"]


def test_a_directory_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot make the run directory .*file/a: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "a", force=False)


def test_only_a_directory_with_a_job_is_opened(directory):
    with pytest.raises(OutputError, match=r"a is not a run directory \(it has no job.yaml\)"):
        RunDirectory.open(directory.path)
    job = Job.from_fields({"model": "lstm", "data": "é.txt", "budget": "2GiB", "optimizer": {"momentum": 0.9}})
    directory.write_job(job)
    assert Job.from_yaml(RunDirectory.open(directory.path).job).model_dump() == job.model_dump() | {
        "data": job.data.model_copy(update={"train": str(directory.path / "é.txt")}).model_dump()
    }


def test_lines_are_read_back_as_they_were_appended(directory):
    lines = [start(0), step(1), step(2), oom(8, 4), evaluated(2), saved(2), died(4), end(2)]
    assert texts(filled(directory, *lines)) == [line.model_dump_json() for line in lines]


def test_a_line_torn_anywhere_costs_itself_and_no_other(directory):
    """The processes that append can be killed at any byte, also inside the two of an é."""
    whole, torn = step(1).model_dump_json().encode() + b"\n", end(1).model_dump_json().encode()
    for cut in range(1, len(torn)):
        directory.metrics.write_bytes(whole + torn[:cut])
        assert texts(directory) == [step(1).model_dump_json()]
        directory.append(died(4))
        assert texts(directory) == [step(1).model_dump_json(), died(4).model_dump_json()]


def test_the_first_line_may_be_the_torn_one(directory):
    directory.metrics.write_bytes(b'{"event": "st')
    assert texts(filled(directory, step(1))) == [step(1).model_dump_json()]


def test_a_torn_line_is_gone_after_a_cut_back_too(directory):
    filled(directory, step(1), step(2))
    with directory.metrics.open("ab") as file:
        file.write(b'{"event": "st')
    directory.keep_until(1)
    assert texts(filled(directory, step(2))) == [step(1).model_dump_json(), step(2).model_dump_json()]


def test_a_damaged_line_in_the_middle_is_an_error_and_not_skipped(directory):
    directory.metrics.write_bytes(b'{"event": "st\n' + step(1).model_dump_json().encode() + b"\n")
    with pytest.raises(RecordError, match="line 1 of .* is not a metrics line"):
        directory.lines()


def test_what_happens_again_is_cut_and_what_cost_time_stays(directory):
    filled(directory, start(0), step(1), saved(1), step(2), evaluated(2), saved(2), step(3), oom(8, 4), died(4), end(3))
    directory.keep_until(2)
    kept = [start(0), step(1), saved(1), step(2), evaluated(2), saved(2), oom(8, 4), died(4)]
    assert texts(directory) == [line.model_dump_json() for line in kept]
    directory.keep_until(0)
    assert texts(directory) == [line.model_dump_json() for line in (start(0), oom(8, 4), died(4))]


@pytest.mark.parametrize(
    ("lines", "micro_batch"),
    [
        ([], None),
        ([saved(1), end(1)], None),
        ([start(0, 16)], 16),
        ([start(0, 16), step(1, 8), saved(1)], 8),
        ([start(0, 16), oom(16, 8)], 8),
        ([start(0, 16), step(1, 8), oom(8, None)], 8),  # nothing was made smaller
        ([step(1, 8), died(4)], 4),
        ([step(1, 8), died(None), end(1)], 8),
    ],
)
def test_the_micro_batch_in_force_is_the_last_one_said(lines, micro_batch, directory):
    assert filled(directory, *lines).micro_batch_in_force() == micro_batch


def test_metrics_that_cannot_be_written_say_what_to_do(directory):
    os.remove(directory.metrics)
    directory.metrics.mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*metrics.jsonl: Is a directory; free some space and go on"):
        directory.append(step(1))
