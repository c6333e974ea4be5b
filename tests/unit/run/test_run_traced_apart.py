"""Traces made in forked processes are those made here; without processes, or where one fails, all is made here."""

import os
import signal

import pytest

from plimsoll.data.sketch import TextSketch
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.run import traced_apart as module
from plimsoll.run.rehearse import rehearse_job
from plimsoll.run.traced_apart import Tracers

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
    """Programs fork nothing."""
    monkeypatch.setattr(module, "is_a_command", lambda: True)


@pytest.fixture
def tracers(monkeypatch):
    """Two processes, whatever this machine has; none are forked from one whose earlier tests have begun threads."""
    if not module.can_fork():
        pytest.skip("this process has begun threads")
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1})
    with Tracers.started(JOB, TEXTS) as started:
        yield started


@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=lambda one: one.name)
def test_they_are_the_same_event_by_event(tracers, lowering):
    mixes = [(micro_batch_choice(size),) for size in (2, 4)]
    for choices in mixes:
        tracers.expect(lowering, choices, is_short=True)
        tracers.expect(lowering, choices, is_short=True)  # once more changes nothing
    for choices in reversed(mixes):
        here = rehearse_job(JOB, TEXTS, lowering, choices, is_short=True)
        assert tracers.take(lowering, choices, is_short=True) == (here, False)
    assert tracers.take(lowering, mixes[0], is_short=True) is None


def test_what_fails_or_was_not_expected_is_made_here(tracers):
    choices = (UNKNOWN, micro_batch_choice(2))
    tracers.expect(CpuLowering(), choices, is_short=True)
    assert tracers.take(CpuLowering(), choices, is_short=True) is None
    assert tracers.take(CpuLowering(), (micro_batch_choice(2),), is_short=False) is None


def test_a_process_that_is_killed_is_no_fault(tracers):
    for number in tuple(tracers._pool._processes):
        os.kill(number, signal.SIGKILL)
    for size in (1, 2, 4):
        tracers.expect(CpuLowering(), (micro_batch_choice(size),), is_short=True)
    assert [tracers.take(CpuLowering(), (micro_batch_choice(size),), is_short=True) for size in (1, 2, 4)] == [None] * 3


def test_a_process_that_has_begun_threads_is_not_forked(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1})
    monkeypatch.setattr(module, "can_fork", lambda: False)
    with Tracers.started(JOB, TEXTS) as started:
        started.expect(CpuLowering(), (micro_batch_choice(2),), is_short=True)
        assert started.take(CpuLowering(), (micro_batch_choice(2),), is_short=True) is None


def test_a_program_is_not_forked(monkeypatch):
    monkeypatch.setattr(module, "is_a_command", lambda: False)
    monkeypatch.setattr(module, "can_fork", None)
    with Tracers.started(JOB, TEXTS) as started:
        assert started.take(CpuLowering(), (micro_batch_choice(2),), is_short=True) is None


def test_ctrl_c_while_processes_are_forked_is_raised_afterwards(monkeypatch):
    """What Python calls at a fork would ignore it."""

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        return False

    monkeypatch.setattr(module, "can_fork", interrupted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1})
    with pytest.raises(KeyboardInterrupt), Tracers.started(JOB, TEXTS):
        pass
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
