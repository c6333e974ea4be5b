"""The supervisor: its reaction to the end of a process, and a real run that is killed and resumes."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from plimsoll.device.cpu.cgroup import OomKills, oom_kill_count
from plimsoll.errors import FragmentedHeapError, Interrupted, OutOfMemoryError, RankLostError, TornStepError
from plimsoll.records.device import Device, MemoryUse
from plimsoll.records.plan import Choice, Configuration, Plan, micro_batch_choice
from plimsoll.records.run import CheckpointLine, DeathLine, RunHead, RunRecord, StartLine
from plimsoll.step.failpoints import armed
from plimsoll.training import supervise as module
from plimsoll.training.supervise import (
    End,
    _Cause,
    _Death,
    _death,
    _host_budget_bytes,
    _note,
    _Retries,
    _what_happened,
    make_plan,
    prepare_data,
    supervise,
)
from processes import LONGEST_SECONDS, environment
from small_runs import train_here

BUDGET = 4 << 30
OURS, MACHINE = partial(OomKills, is_whole_machine=False), partial(OomKills, is_whole_machine=True)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP])
def test_a_process_that_ended_by_itself_or_was_asked_to_is_not_dead(code):
    assert _death(End(code, None), OURS(0), host_budget_bytes=BUDGET) is None


@pytest.mark.parametrize("code", [TornStepError.exit_code, FragmentedHeapError.exit_code, -signal.SIGKILL])
def test_after_a_signal_that_asked_it_to_stop_nothing_is_started_again(code):
    end = End(code, asked_by=signal.SIGINT)
    assert _death(end, OURS(0), host_budget_bytes=BUDGET) is None
    assert end.exit_code == 130


@pytest.mark.parametrize(
    ("code", "asked_by", "exit_code"),
    [
        (0, None, 0),
        (3, None, 3),
        (-signal.SIGTERM, None, 143),
        (-signal.SIGINT, None, 130),
        (143, signal.SIGINT, 130),
        (-signal.SIGTERM, signal.SIGINT, 130),
        (0, signal.SIGINT, 0),
        (2, signal.SIGINT, 2),
    ],
)
def test_the_exit_code_is_what_a_shell_would_say(code, asked_by, exit_code):
    assert End(code, asked_by).exit_code == exit_code


@pytest.mark.parametrize(
    ("before", "after", "evidence", "cause"),
    [
        (OURS(4), OURS(5), "the memory cgroup counts 1 OOM kill(s) more than before: the kernel's", "KERNEL"),
        (OURS(4), OURS(9), "the memory cgroup counts 5 OOM kill(s) more than before: the kernel's", "KERNEL"),
        (OURS(4), OURS(4), "the memory cgroup counts no OOM kill: another program sent the signal", "OUTSIDE"),
        (OURS(9), OURS(4), "the memory cgroup counts no OOM kill: another program sent the signal", "OUTSIDE"),
        (MACHINE(4), MACHINE(5), "the whole machine counts 1 OOM kill(s) more than before (no memory", "KERNEL"),
        (MACHINE(4), MACHINE(9), "the whole machine counts 5 OOM kill(s) more than before (no memory", "KERNEL"),
        (MACHINE(4), MACHINE(4), "the whole machine counts no OOM kill: another program sent the signal", "OUTSIDE"),
        (None, None, "unknown sender of SIGKILL", "GUESS"),
        (None, OURS(3), "unknown sender of SIGKILL", "GUESS"),
        (OURS(3), None, "unknown sender of SIGKILL", "GUESS"),
        (MACHINE(2), OURS(3), "unknown sender of SIGKILL", "GUESS"),
        (OURS(2), MACHINE(3), "unknown sender of SIGKILL", "GUESS"),
    ],
)
def test_who_sent_sigkill_is_what_the_machine_says(monkeypatch, before, after, evidence, cause):
    # Calling the OOM killer of the kernel would end more than this test.
    monkeypatch.setattr(module, "oom_kill_count", lambda: after)
    death = _death(End(-signal.SIGKILL, None), before, host_budget_bytes=None)
    assert (death.signal_name, death.cause.name) == ("SIGKILL", cause)
    assert death.evidence.startswith(evidence)


@pytest.mark.parametrize(
    ("code", "host_budget_bytes", "name", "evidence", "cause"),
    [
        (-signal.SIGBUS, None, "SIGBUS", "a guess: a page of a mapped file", "GUESS"),
        (-signal.SIGABRT, BUDGET, "SIGABRT", "a guess: native code (Rust, as in tokenizers, or C++) ends", "GUESS"),
        (-signal.SIGSEGV, BUDGET, "SIGSEGV", "a guess: native code (Rust, as in tokenizers, or C++) ends", "GUESS"),
        (-signal.SIGSEGV, None, "SIGSEGV", "no budget was enforced", "CRASH"),
        (-signal.SIGABRT, None, "SIGABRT", "no budget was enforced", "CRASH"),
        (-signal.SIGILL, BUDGET, "SIGILL", "a lack of memory does not cause this signal", "CRASH"),
        (-signal.SIGFPE, BUDGET, "SIGFPE", "a lack of memory does not cause this signal", "CRASH"),
        (TornStepError.exit_code, None, "torn step", "memory ran out inside optimizer.step()", "TOLD"),
        (FragmentedHeapError.exit_code, BUDGET, "fragmented heap", "memory ran out with every fallback", "TOLD"),
        (RankLostError.exit_code, None, "rank lost", "a rank ended, or did not answer in time", "OUTSIDE"),
    ],
)
def test_a_crash_is_perhaps_memory_only_where_memory_was_limited(code, host_budget_bytes, name, evidence, cause):
    death = _death(End(code, None), OURS(4), host_budget_bytes)
    assert (death.signal_name, death.cause.name) == (name, cause)
    assert death.signal_number == max(-code, 0)  # None if the process ended with a code
    assert death.evidence.startswith(evidence)


def test_native_code_that_is_refused_memory_is_named_with_the_budget():
    fault = """Fatal Python error: Aborted

Thread 0x00007f01 (most recent call first):
  File "/env/lib/python3.11/site-packages/tokenizers/models.py", line 9 in train
  File "/home/a/model.py", line 12 in build
"""
    death = _death(End(-signal.SIGABRT, None, fault), OURS(4), BUDGET)
    assert "the budget of 4.0 GiB refuses it memory" in death.evidence
    assert death.evidence.endswith("it was called by /home/a/model.py:12 (`build`), through tokenizers")


def test_only_host_memory_that_is_limited_counts_as_a_budget(new_run):
    free, budgeted = new_run("free", steps=1), new_run("budgeted", steps=1, budget={"device": "4GiB"})
    on_host = new_run("on host", steps=1, budget={"host": "4GiB"})

    def limit_of(directory):
        return _host_budget_bytes(directory, Plan.load(directory.plan).budget)

    assert limit_of(on_host) == BUDGET
    assert limit_of(budgeted) is None  # no process has started there
    RunHead(job={}, device=device_of("cuda"), versions={}, fingerprint={}).save(budgeted.head)
    assert limit_of(budgeted) is None
    for directory in (free, budgeted):
        RunHead(job={}, device=device_of("cpu"), versions={}, fingerprint={}).save(directory.head)
    assert [limit_of(directory) for directory in (free, budgeted)] == [None, BUDGET]


def device_of(kind):
    use = MemoryUse(used_bytes=1, peak_bytes=1, reserved_bytes=1)
    return Device(name="d", kind=kind, capacity_bytes=1, free_bytes=1, hardware_bytes=1, use=use)


def retries():
    return _Retries(4, ("--resume", "--from-step", "2"))


def test_out_of_memory_takes_the_next_fallback_and_what_fitted_may_come_back_once():
    given = retries()
    assert given.note_death(_Cause.KERNEL, 0, has_fit=True) == 1
    assert given.arguments()[-4:] == ["--fallback", "1", "--restarts", "1"]
    given.note_begun()
    given.note_saved()
    assert given.arguments() == ["--resume-newest", "--restarts", "1"]  # the checkpoint contains the rest
    assert given.note_death(_Cause.KERNEL, 0, has_fit=True) == 1
    assert given.arguments()[1:] == ["--fallback", "1", "--too-large-fallback", "0", "--restarts", "2"]


def test_a_fallback_that_never_fitted_is_known_to_kill():
    given = retries()
    given.note_death(_Cause.KERNEL, 0, has_fit=False)
    given.note_death(_Cause.KERNEL, 1, has_fit=True)
    assert given.arguments()[3:] == ["--fallback", "2", "--too-large-fallback", "0", "--restarts", "2"]


def test_a_kill_from_outside_keeps_a_fallback_that_no_checkpoint_has_yet():
    given = retries()
    given.note_death(_Cause.KERNEL, 0, has_fit=True)
    assert given.note_death(_Cause.OUTSIDE, 0, has_fit=True) == 1  # the micro-batch had grown again
    assert given.arguments()[3:5] == ["--fallback", "1"]
    assert retries().note_death(_Cause.OUTSIDE, 2, has_fit=True) == 2


@pytest.mark.parametrize("cause", [_Cause.KERNEL, _Cause.OUTSIDE])
def test_deaths_count_until_a_checkpoint_is_written(cause):
    given = retries()
    counts = []
    for has_saved in (False, False, True, False, False, False):
        if has_saved:
            given.note_saved()
        given.note_death(cause, 3, has_fit=True)
        counts.append(given.num_fruitless)
    assert counts == [1, 2, 0, 1, 2, 3]


def test_a_later_fallback_counts_as_progress_but_only_once():
    """A model that cannot be split (BatchNorm) stays at the first fallback, for any given one."""
    given = retries()
    counts = []
    for in_force in (0, 1, 2, 3, 3, 0, 0):
        given.note_death(_Cause.KERNEL, in_force, has_fit=True)
        counts.append(given.num_fruitless)
    assert counts == [0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("cause", "error"), [("KERNEL", 3), ("TOLD", 3), ("GUESS", 137), ("OUTSIDE", 137)])
def test_memory_is_blamed_only_where_the_machine_does(cause, error):
    death = _Death("SIGKILL", signal.SIGKILL, "evidence", _Cause[cause])
    found = death.error("it was killed", "do that", " with --resume")
    assert (found.exit_code, str(found)) == (
        error,
        "it was killed; evidence: do that; start it again afterwards with --resume",
    )


def test_what_is_done_after_a_death_is_said_with_the_techniques(new_run, capsys):
    """The message names the techniques of the next fallback, and at the end the techniques of the last one."""
    choices = (
        Choice(technique="checkpointing", options={"blocks": "all"}),
        Choice(technique="optimizer_offload", options={"to": "disk"}),
    )
    bare, fallback = (
        Configuration(choices=(micro_batch_choice(8),)),
        Configuration(choices=(micro_batch_choice(4), *choices)),
    )
    death, directory = _Death("SIGKILL", signal.SIGKILL, "evidence", _Cause.KERNEL), new_run()
    _note(directory, death, 6, 1, bare)
    _note(directory, death, 6, 2, fallback)
    assert [line.partition("; ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "resuming from step 6 with micro-batch 8",
        "resuming from step 6 with micro-batch 4 and checkpointing=all and optimizer_offload=disk",
    ]
    assert [(line.next_micro_batch, line.time_seconds) for line in of_kind(directory, DeathLine)] == [(8, 0), (4, 0)]
    assert _what_happened(death, 3, 6, fallback).endswith(
        "past step 6, with micro-batch 4 and checkpointing=all and optimizer_offload=disk"
    )


@pytest.mark.long
def test_preparing_says_with_its_code_that_it_could_not(new_run, tmp_path, capfd):
    directory = new_run()
    directory.job.write_text(directory.job.read_text().replace("ship.txt", "other.txt"))
    assert prepare_data(directory, tmp_path / "cache", quiet=True) == 2
    assert "other.txt" in capfd.readouterr().err


SUPERVISE = """
import sys
from pathlib import Path
from plimsoll.errors import Interrupted
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.supervise import supervise
try:
    code = supervise(RunDirectory.open(Path(sys.argv[1])), quiet=True)
except Interrupted as error:
    print(error, file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""


def wait_until(is_so, process):
    until = time.monotonic() + LONGEST_SECONDS
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def of_kind(directory, kind):
    return [line for line in directory.lines() if isinstance(line, kind)]


@pytest.fixture
def supervised():
    """Return a function that starts a supervisor of a run directory, and clean up after the test."""
    processes = []

    def start(directory, **variables):
        command = [sys.executable, "-c", SUPERVISE, str(directory.path)]
        processes.append(subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_record_that_the_training_process_had_no_room_for_is_written(new_run, monkeypatch):
    directory = new_run(steps=1)
    train_here(directory)
    directory.record.unlink()
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: End(0, None))
    assert supervise(directory) == 0
    assert RunRecord.load(directory.record) == RunRecord.from_directory(directory.path)


def test_a_record_that_cannot_be_written_does_not_change_what_the_training_came_to(new_run, monkeypatch, capsys):
    directory = new_run(steps=1)
    train_here(directory)
    directory.record.unlink()
    directory.record.mkdir()
    os.utime(directory.record, ns=(0, 0))
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: End(0, None))
    assert supervise(directory) == 0
    assert "the record of the run could not be written: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("return_code", [-signal.SIGTERM, 128 + signal.SIGTERM])
def test_a_plan_that_is_stopped_is_no_error_of_the_plan(new_run, monkeypatch, return_code):
    directory = new_run()
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: End(return_code, signal.SIGTERM))
    with pytest.raises(
        Interrupted, match=r"was stopped \(SIGTERM\) before anything was trained: give the same command"
    ):
        make_plan(directory, (), quiet=True)
    for code in (2, 255):  # an error of the process, which has printed it
        monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_, code=code: End(code, signal.SIGTERM))
        assert make_plan(directory, (), quiet=True) == code


def test_a_stop_that_finds_no_memory_to_save_in_does_not_say_that_all_is_saved(new_run, monkeypatch):
    directory = new_run(steps=3, checkpoint={"every": 2})
    with armed("checkpoint", 4, 5, 6), pytest.raises(OutOfMemoryError):
        train_here(directory)
    asked = End(FragmentedHeapError.exit_code, signal.SIGINT)
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: asked)
    with pytest.raises(OutOfMemoryError, match=r"stopped after step 3, .* step 2 is the last one saved") as caught:
        supervise(directory)
    assert caught.value.exit_code == 3
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: End(2, signal.SIGINT))
    assert supervise(directory) == 2  # an error of the process, which has printed it
    for code in (143, -signal.SIGTERM):  # with ranks, and without
        monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_, code=code: End(code, signal.SIGINT))
        with pytest.raises(Interrupted, match="stopped at once, and step 2 is the last one saved"):
            supervise(directory)
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: asked)
    train_here(directory, resume_newest=True)
    assert supervise(directory) == 130  # everything has been saved
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: End(143, signal.SIGINT))
    assert supervise(directory) == 130
    monkeypatch.setattr("plimsoll.training.supervise.run_worker", lambda *_: End(0, signal.SIGINT))
    assert supervise(directory) == 0  # it finished in the meantime


def kill_worker(process, number=signal.SIGKILL):
    """Kill the training process and wait for its end."""
    wait_until(psutil.Process(process.pid).children, process)
    (worker,) = psutil.Process(process.pid).children()
    worker.send_signal(number)
    psutil.wait_procs([worker], timeout=LONGEST_SECONDS)


@pytest.mark.skipif(oom_kill_count() is None, reason="nothing counts OOM kills here, so nobody knows who sent SIGKILL")
def test_kills_from_outside_without_progress_end_the_run_with_the_name_of_the_signal(new_run, supervised):
    directory = new_run(steps=100_000, checkpoint={"every": 100_000})
    process = supervised(directory)
    for number in range(1, 4):
        wait_until(lambda number=number: len(of_kind(directory, StartLine)) == number, process)
        kill_worker(process)
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert "KilledError: the training process was killed (SIGKILL) 3 times without getting past step 0" in errors
    assert (
        "another program sent the signal: stop the program that kills it; start it again afterwards with --force"
        in errors
    )
    deaths = of_kind(directory, DeathLine)
    assert [(death.restarted_from_step, death.next_micro_batch) for death in deaths] == [(0, 8), (0, 8), (None, 8)]


def test_a_crash_without_a_budget_is_not_tried_again(new_run, supervised):
    directory = new_run(steps=100_000, checkpoint={"every": 1})
    process = supervised(directory)
    wait_until(lambda: of_kind(directory, CheckpointLine), process)
    kill_worker(process, signal.SIGSEGV)
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert "KilledError: the training process crashed with SIGSEGV after step" in errors
    assert "Fatal Python error: Segmentation fault" in errors
    assert re.search(
        r"no budget was enforced .* memory; it was called by \S+:\d+ \(`\w+`\).*: find the cause of the crash", errors
    )
    assert errors.endswith("start it again afterwards with --resume\n")
    assert len(of_kind(directory, StartLine)) == 1


@pytest.mark.slow
def test_a_crash_inside_a_budget_is_perhaps_memory_and_goes_on_smaller(new_run, supervised):
    directory = new_run(steps=100_000, checkpoint={"every": 1}, budget={"device": "4GiB"})
    process = supervised(directory)
    wait_until(lambda: of_kind(directory, CheckpointLine), process)
    kill_worker(process, signal.SIGSEGV)
    wait_until(lambda: len(of_kind(directory, StartLine)) == 2, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LONGEST_SECONDS)
    (death,) = of_kind(directory, DeathLine)
    assert (death.signal, death.next_micro_batch) == ("SIGSEGV", 4)
    assert death.evidence.startswith("a guess: ")
    assert of_kind(directory, StartLine)[1].micro_batch == 4


def test_a_training_that_is_killed_after_it_was_asked_to_stop_is_not_started_again(new_run, supervised):
    directory = new_run(steps=100_000)
    process = supervised(directory)
    wait_until(lambda: of_kind(directory, StartLine), process)
    (worker,) = psutil.Process(process.pid).children()
    worker.suspend()
    wait_until(lambda: all("State:\tT" in text for text in statuses_of_threads(worker.pid)), process)
    process.send_signal(signal.SIGINT)  # the signal could reach a thread that still runs
    wait_until(lambda: "SigPnd:\t0000000000000000\nShdPnd:\t0000000000000000" not in status_of(worker.pid), process)
    worker.kill()
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 130
    saved = directory.last_saved_step()
    resume = f"resume with `plimsoll train --resume --out {directory.path}`"
    again = resume if saved else "give the same command again, with --force"  # it may have a plan or a budget
    assert f"killed (SIGKILL), and step {saved} is the last one saved: {again}" in errors
    assert len(of_kind(directory, StartLine)) == 1


def statuses_of_threads(pid):
    return [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]


def status_of(pid):
    with open(f"/proc/{pid}/status") as file:
        return file.read()


def test_a_killed_training_goes_on_from_its_checkpoint_and_a_signal_reaches_it(new_run, supervised):
    directory = new_run(steps=100_000, checkpoint={"every": 20})
    process = supervised(directory)
    wait_until(lambda: of_kind(directory, CheckpointLine), process)
    kill_worker(process)
    wait_until(lambda: len(of_kind(directory, StartLine)) == 2, process)
    first = of_kind(directory, StartLine)[1].step
    wait_until(lambda: directory.lines()[-1].event == "step" and directory.lines()[-1].step > first, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
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


@pytest.mark.parametrize(
    ("exit_code", "return_code"),
    [(137, -signal.SIGKILL), (135, -signal.SIGBUS), (139, -signal.SIGSEGV), (9, 9), (130, 130), (3, 3), (1, 1)],
)
def test_a_rank_that_a_signal_killed_is_known_by_its_launchers_exit_code(exit_code, return_code):
    assert module._signalled(exit_code) == return_code
