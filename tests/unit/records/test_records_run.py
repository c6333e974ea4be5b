"""A run directory is read up to its last complete line: finished, running, killed in mid-line or damaged."""

from pathlib import Path

import pytest

from plimsoll.errors import RecordError
from plimsoll.records.run import GraphLine, Line, OomEvent, RetainedGraph, RunRecord, StepLine, Timeline, read_lines


def test_every_kind_of_line_comes_back_as_it_was(run_directory: Path, lines: tuple[Line, ...]):
    assert tuple(read_lines(run_directory / "metrics.jsonl")) == lines


def test_a_finished_run(run_record: RunRecord):
    assert (run_record.name, run_record.status, run_record.message) == ("run-1", "finished", "done")
    assert [step.step for step in run_record.steps] == [1, 2, 3]
    assert [event.requested_bytes for event in run_record.oom_events] == [99]
    assert [death.signal for death in run_record.deaths] == ["SIGKILL"]
    assert [len(part) for part in (run_record.starts, run_record.checkpoints, run_record.evaluations)] == [1, 1, 1]
    assert run_record.timeline.time_seconds == (9.0, 9.5, 29.0)
    assert run_record.timeline.used_bytes == (700, 900, 3_500)


def test_graphs_that_were_alive_are_in_the_record(run_directory: Path):
    held = RetainedGraph(holder="model.h", num_tensors=1, num_bytes=4, marked_steps=(1, 2), alive_steps=(1,))
    line = GraphLine(time_seconds=29.0, step=3, retained=(held,))
    with (run_directory / "metrics.jsonl").open("a") as metrics:
        metrics.write(line.model_dump_json() + "\n")
    assert RunRecord.from_directory(run_directory).graphs == (line,)


def test_the_figures_of_a_run(run_record: RunRecord):
    assert run_record.limit_bytes == 4_000
    assert run_record.peak_bytes == 3_500  # this peak lies between steps; the steps themselves reached 3000
    assert run_record.units_per_second == 8.0  # (20 + 20) units in 2 + 3 seconds: the first step is warm-up


def test_the_figures_of_a_run_without_steps_are_unknown(run_record: RunRecord):
    nothing = run_record.model_copy(update={"steps": (), "timeline": Timeline(source="measured")})
    assert (nothing.peak_bytes, nothing.units_per_second) == (None, None)


def test_a_run_of_one_step_counts_it(run_record: RunRecord):
    assert run_record.model_copy(update={"steps": run_record.steps[:1]}).units_per_second == 2.5  # 10 units in 4 s


def keep(directory: Path, num_lines: int, tail: bytes = b"") -> None:
    """Keep the first `num_lines` lines of the metrics and append ``tail``."""
    metrics = directory / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:num_lines]) + tail)


def test_a_run_that_goes_on(run_directory: Path):
    keep(run_directory, 2)
    run = RunRecord.from_directory(run_directory)
    assert (run.status, run.message, len(run.steps)) == ("running", "", 1)


def test_a_run_before_its_first_line(run_directory: Path):
    (run_directory / "metrics.jsonl").unlink()
    assert RunRecord.from_directory(run_directory).status == "running"


def test_a_run_that_was_resumed_after_its_end_is_running(run_directory: Path, lines: tuple[Line, ...]):
    with (run_directory / "metrics.jsonl").open("a") as metrics:
        metrics.write(lines[0].model_dump_json() + "\n")
    run = RunRecord.from_directory(run_directory)
    assert (run.status, run.message, len(run.starts)) == ("running", "", 2)


@pytest.mark.parametrize(
    "tail", [b'{"event":"st', '{"event":"oom","raw_text":"d\u00e9'.encode()[:-1]], ids=["text", "character"]
)
def test_a_last_line_torn_by_a_kill_is_left_out(run_directory: Path, tail: bytes):
    keep(run_directory, 2, tail)
    assert len(RunRecord.from_directory(run_directory).steps) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"event":"st\n', "Invalid JSON"),
        (b'{"event":"party"}\n', "Input tag 'party' found"),
        (b'{"event":"checkpoint","time_seconds":1,"step":2}\n', "Field required"),
        (b"\xff\n", "Invalid JSON"),
    ],
    ids=["torn", "unknown", "missing", "binary"],
)
def test_a_damaged_line_in_the_middle_is_named(run_directory: Path, line: bytes, why: str):
    keep(run_directory, 2, line + b'{"event":"st')
    with pytest.raises(RecordError) as caught:
        RunRecord.from_directory(run_directory)
    metrics = run_directory / "metrics.jsonl"
    assert str(caught.value).startswith(f"line 3 of {metrics} is not a metrics line ({why}")
    assert str(caught.value).endswith("): remove it or make the run again")


def test_a_folder_that_is_no_run(tmp_path: Path):
    with pytest.raises(RecordError) as caught:
        RunRecord.from_directory(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is not a run directory (it has no plan.json): give the --out of `plimsoll train`"
    )


def test_a_run_without_its_head(run_directory: Path):
    (run_directory / "run.json").unlink()
    with pytest.raises(RecordError, match="run-1 has not begun to train, so there is nothing to report: wait until"):
        RunRecord.from_directory(run_directory)


def test_the_current_folder_has_a_name_too(run_directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run_directory)
    assert RunRecord.from_directory(Path()).name == "run-1"


def test_a_loss_that_is_not_a_number_can_be_written_down(run_record: RunRecord, tmp_path: Path):
    step = run_record.steps[0].model_copy(update={"loss": float("nan"), "updated": False})
    (tmp_path / "metrics.jsonl").write_text(step.model_dump_json() + "\n")
    (read,) = read_lines(tmp_path / "metrics.jsonl")
    assert isinstance(read, StepLine)
    assert read.loss != read.loss


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"live_bytes": 3 << 20}, "3.0 MiB in use"),
        ({"live_bytes": 3 << 20, "capacity_bytes": 4 << 20}, "3.0 MiB in use of 4.0 MiB"),
        ({"requested_bytes": 1024, "live_bytes": 3 << 20}, "asked for 1.0 KiB with 3.0 MiB in use"),
    ],
)
def test_a_shortage_says_what_is_known(known, text):
    assert OomEvent(family="cpu", **known).shortage == text
