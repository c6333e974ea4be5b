"""The run directory: creation, refusals, appended lines and removed files."""

import os
import shutil
import threading

import pytest

import plimsoll.training.run_directory
from plimsoll.errors import OutputError
from plimsoll.records.job import Job
from plimsoll.records.run import (
    CheckpointLine,
    DeathLine,
    EndLine,
    EvaluationLine,
    GraphLine,
    OomEvent,
    StartLine,
    StepLine,
)
from plimsoll.training.run_directory import RunDirectory
from processes import run_program


def start(step=0, fallback=0):
    return StartLine(
        time_seconds=0, step=step, micro_batch=8, fallback=fallback, baseline_bytes=1, wall_time="2026-01-31"
    )


def step(number, fallback=0):
    return StepLine(
        time_seconds=number,
        step=number,
        epoch=0,
        first_sample=0,
        num_samples=8,
        num_units=8,
        loss=1.0,
        learning_rate=0.1,
        step_seconds=1.0,
        micro_batch=8,
        fallback=fallback,
    )


def oom(next_fallback, phase="forward"):
    return OomEvent(step=1, phase=phase, family="cpu-allocator", next_fallback=next_fallback)


def death(next_fallback):
    return DeathLine(time_seconds=1, signal="SIGKILL", evidence="", next_fallback=next_fallback)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "runs" / "a", force=False)


def test_a_new_directory_is_made_with_its_parents(directory):
    assert directory.path.is_dir()
    assert directory.lines() == []


def test_an_empty_folder_may_be_used(tmp_path):
    assert RunDirectory.create(tmp_path, force=False).metrics.is_file()


def test_nothing_is_overwritten_without_force(directory):
    (directory.path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"exists already .*`plimsoll train --resume --out .*with --force"):
        RunDirectory.create(directory.path, force=False)
    assert (directory.path / "notes.txt").read_text() == "mine"
    (directory.checkpoints / "step-00000001").mkdir(parents=True)
    RunDirectory.create(directory.path, force=True)
    assert not directory.checkpoints.exists()
    assert (directory.path / "notes.txt").read_text() == "mine"  # no run wrote this file


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [(start(), False), (step(1), True), (CheckpointLine(time_seconds=1, step=1, num_bytes=1), True)],
    ids=["start", "step", "checkpoint"],
)
def test_a_run_in_which_no_step_was_done_is_begun_again_with_what_is_there(directory, line, is_refused):
    directory.append(line)
    with pytest.raises(OutputError, match="exists already"):  # it contains no job
        RunDirectory.create(directory.path, force=False)
    directory.job.write_text("of before")
    if is_refused:
        with pytest.raises(OutputError, match="exists already"):
            RunDirectory.create(directory.path, force=False)
        assert directory.lines() == [line]
    else:
        assert RunDirectory.create(directory.path, force=False).lines() == []
        assert directory.job.read_text() == "of before"


def test_all_that_a_run_writes_is_removed_with_force_and_links_are_not_followed(directory, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "tokens").write_text("theirs")
    directory.cache.symlink_to(kept)
    for folder in (directory.checkpoints, directory.model):
        folder.mkdir()
        (folder / "weights").write_text("x")
    for file in (directory.job, directory.plan, directory.prepared, directory.head, directory.record):
        file.write_text("x")
    directory.append(step(1))
    assert RunDirectory.create(directory.path, force=True).lines() == []
    assert {path.name for path in directory.path.iterdir()} == {".plimsoll", ".lock", "metrics.jsonl"}
    assert (kept / "tokens").read_text() == "theirs"


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_run_is_neither_used_nor_removed(tmp_path, force):
    (tmp_path / "job.yaml").write_text("mine")
    with pytest.raises(OutputError, match="is not empty and not a run, so nothing is written there or removed"):
        RunDirectory.create(tmp_path, force)
    with pytest.raises(OutputError, match="is a file, but a run needs a directory: give another --out"):
        RunDirectory.create(tmp_path / "job.yaml", force)
    assert (tmp_path / "job.yaml").read_text() == "mine"


def test_a_run_that_is_training_is_not_removed(directory, monkeypatch):
    monkeypatch.setattr(plimsoll.training.run_directory, "_LONGEST_LAST_STEP_SECONDS", 0.05)
    directory.job.write_text("theirs")
    with directory.locked(), pytest.raises(OutputError, match="another process is training in"):
        RunDirectory.create(directory.path, force=True)
    assert directory.job.read_text() == "theirs"


@pytest.mark.parametrize("how", ["claimed", "locked"])
def test_a_training_process_that_finishes_its_last_step_is_waited_for(directory, how, capsys):
    lock = directory.locked()
    lock.__enter__()
    ends = threading.Timer(0.1, lock.__exit__, (None, None, None))
    ends.start()
    with getattr(directory, how)():
        assert not ends.is_alive() or ends.finished.is_set()
    said = capsys.readouterr().err
    assert said.startswith(
        f"a training process of an earlier command (process {os.getpid()}) is finishing its last step"
    )
    assert said.count("\n") == 1
    with getattr(directory, how)():
        pass
    assert capsys.readouterr().err == ""


def test_another_command_is_not_waited_for(directory):
    with directory.claimed(), pytest.raises(OutputError, match="another process is training in"), directory.claimed():
        pass


def test_a_directory_that_is_deleted_under_a_run_is_said_to_be_and_not_made_again(directory):
    directory.require_there()
    directory.append(step(1))
    shutil.rmtree(directory.path)
    for work in (directory.require_there, directory.sync_metrics, lambda: directory.append(step(2))):
        with pytest.raises(
            OutputError, match=r"the run directory .* is gone, or its files are: it was deleted or moved"
        ):
            work()
    assert not directory.path.exists()


def test_where_a_folder_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OutputError, match=r"cannot make the run directory .*file/a: Not a directory; give another --out"
    ):
        RunDirectory.create(tmp_path / "file" / "a", force=False)


def test_only_a_run_directory_is_opened(tmp_path):
    with pytest.raises(OutputError, match=r"is not a run directory \(it has no job.yaml\): give the --out"):
        RunDirectory.open(tmp_path)


def test_the_job_is_kept_whole(directory):
    job = Job.from_fields(
        {"model": {"architecture": "lstm"}, "data": {"train": "/data/ä.txt"}, "budget": {"device": "2GiB"}, "steps": 7}
    )
    directory.write_job(job)
    with pytest.raises(OutputError, match=r"is not a run directory \(it has no plan.json\): give the --out"):
        RunDirectory.open(directory.path)
    text = directory.job.read_text()
    assert text.startswith("model:")  # in the order of the fields, as a person would write them
    assert "/data/ä.txt" in text
    assert "null" not in text
    directory.plan.write_text("{}")
    assert Job.from_yaml(RunDirectory.open(directory.path).job) == job


def test_lines_come_back_in_order(directory):
    lines = [start(), step(1), oom(4), step(2, 4), death(2), EndLine(time_seconds=9, step=2, status="finished")]
    for line in lines:
        directory.append(line)
    assert directory.lines() == lines


def test_what_will_happen_again_is_taken_out_and_nothing_else(directory):
    kept = [start(), step(1), CheckpointLine(time_seconds=1, step=1, num_bytes=1), oom(4), death(4)]
    gone = [
        step(2),
        GraphLine(step=2, retained=()),
        EvaluationLine(time_seconds=2, step=2, loss=1, num_samples=1, num_units=1),
        CheckpointLine(time_seconds=2, step=2, num_bytes=1),
        EndLine(time_seconds=2, step=1, status="interrupted"),
    ]
    for line in [*kept, *gone]:
        directory.append(line)
    directory.keep_until(1)
    assert directory.lines() == kept


@pytest.mark.parametrize(
    ("lines", "fallback"),
    [
        ([], None),
        ([start(fallback=0)], 0),
        ([start(fallback=0), step(1, 1)], 1),
        ([start(fallback=2), step(1, 1)], 1),  # the micro-batch has grown
        ([start(fallback=2)], 2),
        ([step(1, 1)], 1),
        ([start(), step(1, 1), oom(2)], 2),  # the process died while it repeated the step
        ([start(), step(1, 1), oom(2), step(2, 2)], 2),
        ([start(), step(1, 1), death(2)], 2),
        ([start(), step(1, 1), death(0)], 0),
        ([start(), step(1, 1), oom(None, "checkpoint")], 1),
        ([start(), step(1, 1), oom(None, "evaluation")], 1),  # evaluations have their own fallbacks
    ],
)
def test_the_fallback_in_force_is_the_last_that_was_used_or_chosen(directory, lines, fallback):
    for line in lines:
        directory.append(line)
    assert directory.fallback_in_force() == fallback


def test_what_has_fit_needs_no_more_than_a_step_that_was_done(directory):
    for line in (start(), step(1, 2), oom(1)):
        directory.append(line)
    assert [directory.has_fit(fallback) for fallback in (1, 2, 3)] == [False, True, True]


def test_the_newest_step_and_the_newest_that_was_saved_are_known(directory):
    assert (directory.last_step(), directory.last_saved_step()) == (0, 0)
    for line in (start(), step(3), CheckpointLine(time_seconds=1, step=3, num_bytes=1), step(4), start(3), step(5)):
        directory.append(line)
    assert (directory.last_step(), directory.last_saved_step()) == (5, 3)


def test_of_processes_that_train_together_one_keeps_the_metrics(directory):
    directory.job.touch()
    directory.plan.touch()
    directory.append(step(1))
    other = RunDirectory.open(directory.path, writes=False)
    other.append(step(2))
    other.keep_until(0)
    assert other.lines() == [step(1)]
    directory.metrics.unlink()
    other.sync_metrics()  # the file does not exist
    assert other.lines() == []
    directory.metrics.touch()
    RunDirectory.open(directory.path).append(step(2))
    assert directory.lines() == [step(2)]


FULL_DISK = """
import resource, sys
from pathlib import Path
from plimsoll.errors import OutputError
from plimsoll.records.run import EndLine
from plimsoll.training.run_directory import RunDirectory
directory = RunDirectory.create(Path(sys.argv[1]), force=False)
line = EndLine(time_seconds=1, step=1, status="failed", message="x" * 100)
directory.append(line)
num_bytes = directory.metrics.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes + 50, resource.RLIM_INFINITY))  # as if the disk were full
try:
    directory.append(line)
except OutputError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
directory.append(line)
print(directory.lines() == [line, line])
"""


def test_a_line_that_the_disk_has_no_room_for_leaves_no_part_behind(tmp_path):
    done = run_program(FULL_DISK, tmp_path / "a")
    message, is_whole = done.stdout.splitlines()
    assert "metrics.jsonl: File too large; free some space and continue with --resume" in message
    assert is_whole == "True", done.stderr


def test_a_line_torn_by_a_kill_is_left_out_and_does_not_spoil_the_next(directory):
    directory.append(step(1))
    with directory.metrics.open("ab") as file:
        file.write(b'{"event":"step","time_sec')
    assert directory.lines() == [step(1)]
    directory.append(death(4))
    assert directory.lines() == [step(1), death(4)]


@pytest.mark.parametrize("whole", [[], [step(1)]])
def test_a_line_may_be_torn_at_any_byte(whole, directory):
    """This includes the first line, and the middle of a character of two bytes."""
    torn = EndLine(time_seconds=1, step=1, status="failed", message="é").model_dump_json().encode()
    for num_bytes in range(1, len(torn)):
        directory.metrics.write_bytes(b"".join(line.model_dump_json().encode() + b"\n" for line in whole))
        with directory.metrics.open("ab") as file:
            file.write(torn[:num_bytes])
        directory.append(death(4))
        assert directory.lines() == [*whole, death(4)]


def test_a_metrics_file_that_cannot_be_synced_is_said(directory):
    directory.sync_metrics()
    directory.metrics.unlink()
    with pytest.raises(OutputError, match="is gone, or its files are"):
        directory.sync_metrics()


def test_a_run_says_which_process_works_on_it_while_it_lives(directory):
    assert (directory.command_pid(), directory.training_pid()) == (None, None)
    with directory.claimed():
        assert (directory.command_pid(), directory.training_pid()) == (os.getpid(), None)
        with directory.locked():
            assert directory.training_pid() == os.getpid()
    for _ in range(2):  # the name of the previous owner has been deleted
        with directory.claimed():
            assert directory.command_pid() == os.getpid()
    code = "import sys; from pathlib import Path; from plimsoll.training.run_directory import RunDirectory\n"
    code += "with RunDirectory(Path(sys.argv[1])).claimed(): pass"
    assert run_program(code, directory.path).returncode == 0
    assert directory.command_pid() is None
    for text in ("", "x y", "1", f"{os.getpid()} 0"):
        (directory.path / ".lock").write_text(text)
        assert directory.training_pid() is None


LONG_RUN = """
import resource, sys
from pathlib import Path
from plimsoll.device.process import data_bytes
from plimsoll.records.run import CheckpointLine, StepLine
from plimsoll.training.run_directory import RunDirectory

directory = RunDirectory(Path(sys.argv[1]))
fields = dict(time_seconds=0, epoch=0, first_sample=0, num_samples=8, num_units=8, loss=1.0, learning_rate=0.1)
memory = tuple((float(number), 1 << 30) for number in range(8))
with directory.metrics.open("wb") as file:
    for number in range(1, 10_001):
        line = StepLine(step=number, step_seconds=1.0, micro_batch=8, fallback=number % 3, memory=memory, **fields)
        file.write(line.model_dump_json().encode() + b"\\n")
    file.write(CheckpointLine(time_seconds=0, step=9_990, num_bytes=1).model_dump_json().encode() + b"\\n")
free_bytes = data_bytes() + (4 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (free_bytes, free_bytes))
print(directory.fallback_in_force(), directory.last_saved_step())
directory.keep_until(9_990)
print(sum(1 for _ in directory.each_line()))
"""


def test_a_run_of_many_steps_is_gone_on_with_inside_a_tight_budget(directory):
    """All lines together would take 30 MiB; reading them one by one takes a tenth of a mebibyte."""
    done = run_program(LONG_RUN, directory.path)
    assert done.stdout.split() == ["1", "9990", "9991"], done.stderr


def test_a_record_is_owed_until_it_is_newer_than_the_metrics(directory):
    assert directory.has_its_record()  # no process has started
    directory.head.touch()
    assert not directory.has_its_record()
    directory.record.touch()
    assert directory.has_its_record()
    same = directory.record.stat().st_mtime_ns
    os.utime(directory.metrics, ns=(same, same))
    assert directory.has_its_record()
    newer = directory.record.stat().st_mtime_ns + 1
    os.utime(directory.metrics, ns=(newer, newer))
    assert not directory.has_its_record()
    directory.metrics.unlink()
    assert directory.has_its_record()
