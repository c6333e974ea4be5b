"""Dry runs in forked processes: they give the same traces, and a failed process is replaced by this one."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.planning.dry_run import processes as module
from plimsoll.planning.dry_run.processes import Asked, Tracers
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice

JOB = Job.from_fields(
    {
        "model": {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32}, "data": "nowhere.txt",
        "tokenizer": {"vocab_size": 1000}, "sequence_length": 32, "batch_size": 8,
    }
)  # fmt: skip
TEXTS = TextSketch(1000, None, 0)
UNKNOWN = Choice(technique="no such technique")


@pytest.fixture(autouse=True)
def _as_a_command(monkeypatch):
    """Behave like a command, which may fork, on a machine without other work."""
    monkeypatch.setattr(module, "is_a_command", lambda: True)
    monkeypatch.setattr(module, "_num_running", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


@pytest.fixture
def tracers(monkeypatch):
    """Yield tracers with one process, on any machine. Skip if earlier tests have started threads in this process."""
    if not module.can_fork():
        pytest.skip("this process has begun threads")
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1})
    with Tracers.started(JOB, TEXTS) as started:
        yield started


def asked(size, lowering=None, is_short=True):
    return Asked(lowering or CpuLowering(), (micro_batch_choice(size),), is_short)


def stopped(tracers):
    """Stop the process of the tracers with SIGSTOP and return it."""
    (worker,) = tracers._workers
    os.kill(worker.process.pid, signal.SIGSTOP)
    return worker.process


def has_begun(tracers, one):
    return eventually(lambda: one.key in tracers._begun)


def eventually(holds):
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=lambda one: one.name)
def test_they_are_the_same_event_by_event(tracers, lowering):
    one = asked(2, lowering)
    tracers.suppose([one])
    assert has_begun(tracers, one)
    tracers.expect([one])  # once more changes nothing
    assert tracers.take(one) == (dry_run_job(JOB, TEXTS, lowering, one.choices, is_short=True), False)
    assert tracers.take(one) is None


def test_what_no_process_has_begun_is_made_here(tracers):
    """The processes start with the last combination that was expected."""
    first, second, last = map(asked, (1, 2, 4))
    tracers.expect([first, second, last])
    assert has_begun(tracers, last)
    assert tracers.take(first) is tracers.take(second) is None
    assert tracers.take(last) is not None
    assert not tracers._begun


def test_what_is_expected_comes_before_what_is_supposed_and_that_goes_out_of_date(tracers):
    process = stopped(tracers)
    running, old, new, wanted = map(asked, (1, 2, 4, 8))
    tracers.suppose([running])
    assert has_begun(tracers, running)
    tracers.suppose([old])
    tracers.suppose([new])
    tracers.expect([wanted])
    os.kill(process.pid, signal.SIGCONT)
    assert has_begun(tracers, wanted)
    assert tracers.take(wanted) is not None
    assert tracers.take(old) is tracers.take(new) is None


def test_what_was_only_supposed_is_not_waited_for(monkeypatch):
    if not module.can_fork():
        pytest.skip("this process has begun threads")
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1})
    with Tracers.started(JOB, TEXTS) as tracers:
        process = stopped(tracers)
        tracers.suppose([asked(2), asked(4)])
        assert has_begun(tracers, asked(2))
    assert process.exitcode == -signal.SIGKILL
    assert not any(thread.is_alive() for thread in tracers._threads)


def test_nothing_is_supposed_where_other_programs_use_the_cores(tracers, monkeypatch):
    monkeypatch.setattr(module, "_num_running", lambda: 2)
    stopped(tracers)
    assert tracers.number == 0
    tracers.suppose([asked(2)])
    tracers.expect([asked(4)])  # this one is traced in any case
    assert has_begun(tracers, asked(4))
    assert tracers.number == 1  # the forked process that runs next to this one
    assert tracers.take(asked(2)) is None


def test_threads_that_run_are_counted(monkeypatch):
    monkeypatch.undo()
    assert module._num_running() >= 1


def test_what_fails_or_was_not_expected_is_made_here(tracers):
    unknown = Asked(CpuLowering(), (UNKNOWN, micro_batch_choice(2)), True)
    tracers.expect([unknown])
    assert has_begun(tracers, unknown)
    assert tracers.take(unknown) is None
    assert tracers.take(asked(2, is_short=False)) is None


def test_a_process_that_is_killed_is_no_fault(tracers):
    process = stopped(tracers)
    tracers.expect(list(map(asked, (1, 2, 4))))
    assert has_begun(tracers, asked(4))
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(tracers.take, asked(4))
        process.kill()
        assert taken.result() is None
    assert [tracers.take(asked(size)) for size in (1, 2)] == [None] * 2


def test_ctrl_c_while_a_trace_is_waited_for_is_raised_at_once(tracers):
    stopped(tracers)
    tracers.expect([asked(2)])
    assert has_begun(tracers, asked(2))
    before = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        tracers.take(asked(2))
    signal.signal(signal.SIGALRM, before)


def test_a_process_that_has_begun_threads_is_not_forked(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1})
    monkeypatch.setattr(module, "can_fork", lambda: False)
    with Tracers.started(JOB, TEXTS) as started:
        started.expect([asked(2)])
        assert (started.number, started.take(asked(2))) == (0, None)


def test_a_program_is_not_forked(monkeypatch):
    monkeypatch.setattr(module, "is_a_command", lambda: False)
    monkeypatch.setattr(module, "can_fork", None)
    with Tracers.started(JOB, TEXTS) as started:
        assert (started.number, started.take(asked(2))) == (0, None)


def test_one_core_has_no_process_beside_this_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0})
    with Tracers.started(JOB, TEXTS) as started:
        assert started.number == 0


def test_ctrl_c_while_processes_are_forked_is_raised_afterwards(monkeypatch):
    """Python ignores an exception that is raised inside a fork hook."""

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        return False

    monkeypatch.setattr(module, "can_fork", interrupted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1})
    with pytest.raises(KeyboardInterrupt), Tracers.started(JOB, TEXTS):
        pass
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
