"""The supervisor: what it makes of a process that ended, and one real run that is killed and goes on."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from plimsoll.device.cgroup import oom_kill_count
from plimsoll.errors import TornStepError
from plimsoll.records.run import CheckpointLine, DeathLine, RunRecord, StartLine
from plimsoll.run import supervise as module
from plimsoll.run.supervise import _death, _exit_code, prepare_data
from processes import LONGEST_SECONDS, environment


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP])
def test_a_process_that_ended_by_itself_or_was_asked_to_is_not_dead(code):
    assert _death(code, kills_before=0) is None


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (3, 3), (-signal.SIGTERM, 143), (-signal.SIGINT, 130)])
def test_the_exit_code_is_what_a_shell_would_say(code, exit_code):
    assert _exit_code(code) == exit_code


@pytest.mark.parametrize(
    ("code", "kills_before", "kills_after", "signal_name", "evidence", "was_memory"),
    [
        (-signal.SIGKILL, 4, 5, "SIGKILL", "counts 1 OOM kill(s) more than before: the kernel's OOM killer", True),
        (-signal.SIGKILL, 4, 4, "SIGKILL", "counts no OOM kill: somebody sent the signal", False),
        (-signal.SIGKILL, None, None, "SIGKILL", "no memory cgroup can be read here", True),
        (-signal.SIGKILL, None, 3, "SIGKILL", "no memory cgroup can be read here", True),
        (-signal.SIGBUS, 4, 4, "SIGBUS", "a library stopped the process", True),
        (-signal.SIGABRT, 4, 4, "SIGABRT", "a library stopped the process", True),
        (-signal.SIGSEGV, 4, 4, "SIGSEGV", "a library stopped the process", True),
        (TornStepError.exit_code, 4, 4, "torn step", "only a checkpoint can undo that", True),
    ],
)
def test_the_cause_of_a_death_is_what_the_machine_says(
    monkeypatch, code, kills_before, kills_after, signal_name, evidence, was_memory
):
    # The kernel's OOM killer cannot be called here without ending more than this test.
    monkeypatch.setattr(module, "oom_kill_count", lambda: kills_after)
    death = _death(code, kills_before)
    assert (death.signal_name, death.was_memory) == (signal_name, was_memory)
    assert evidence in death.evidence


def test_preparing_says_with_its_code_that_it_could_not(new_run, tmp_path, capfd):
    directory = new_run()
    directory.job.write_text(directory.job.read_text().replace("ship.txt", "other.txt"))
    assert prepare_data(directory, tmp_path / "cache", quiet=True) == 2
    assert "other.txt" in capfd.readouterr().err


SUPERVISE = """
import sys
from pathlib import Path
from plimsoll.run.directory import RunDirectory
from plimsoll.run.supervise import supervise
sys.exit(supervise(RunDirectory.open(Path(sys.argv[1])), quiet=True))
"""


def wait_until(is_so, process):
    until = time.monotonic() + LONGEST_SECONDS
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def of_kind(directory, kind):
    return [line for line in directory.lines() if isinstance(line, kind)]


def test_a_killed_training_goes_on_from_its_checkpoint_and_a_signal_reaches_it(new_run):
    directory = new_run(steps=100_000, checkpoint={"every": 20})
    command = [sys.executable, "-c", SUPERVISE, str(directory.path)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: of_kind(directory, CheckpointLine), process)
        (worker,) = psutil.Process(process.pid).children()
        worker.send_signal(signal.SIGKILL)
        wait_until(lambda: len(of_kind(directory, StartLine)) == 2, process)
        first = of_kind(directory, StartLine)[1].step
        wait_until(lambda: directory.lines()[-1].event == "step" and directory.lines()[-1].step > first, process)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LONGEST_SECONDS)
    finally:
        process.kill()
    record = RunRecord.from_directory(directory.path)
    (death,) = of_kind(directory, DeathLine)
    was_counted = oom_kill_count() is not None
    assert (process.returncode, record.status) == (130, "interrupted")
    assert (death.signal, death.restarted_from_step) == ("SIGKILL", first)
    assert death.next_micro_batch == (8 if was_counted else 4)
    assert "training process killed (SIGKILL)" in errors
    assert [step.step for step in record.steps] == list(range(1, len(record.steps) + 1))
    assert [start.restarts for start in record.starts] == [0, 1]
    assert record.checkpoints[-1].step == record.steps[-1].step
