"""The exit code that represents all ranks; tests/end_to_end/test_rank_jobs.py tests the launching itself."""

import logging
import os
import signal

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from plimsoll.distributed.launch import exit_code_of, launch
from plimsoll.processes.children import LAUNCHER
from processes import run_program


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([77, -signal.SIGKILL, 77], 137),  # the others ended because one was killed
        ([-signal.SIGSEGV], 139),
        ([77, 3], 3),
        ([3, -signal.SIGKILL], 137),  # the kill may have caused the error of the other rank
        ([75, 77, 77], 75),
        ([2, -signal.SIGTERM], 2),  # a rank that was asked to end after another one ended is not the cause
        ([77, -signal.SIGTERM], 77),
        ([75, -signal.SIGTERM], 75),
        ([-signal.SIGTERM], 143),
        ([77, 77], 77),
        ([1], 1),
    ],
)
def test_the_rank_that_is_the_cause_counts(codes, expected):
    assert exit_code_of(codes) == expected


@pytest.mark.parametrize(
    ("num_ranks", "given", "threads"), [(2, None, "2"), (3, None, "1"), (9, None, "1"), (2, "5", "5")]
)
def test_ranks_share_the_processors_unless_the_environment_says_otherwise(monkeypatch, num_ranks, given, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")  # restores the variable that the launcher sets
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv(LAUNCHER, "")
    seen = []
    monkeypatch.setattr(
        "plimsoll.distributed.launch.elastic_launch", lambda *_: lambda *_: seen.append(os.environ["OMP_NUM_THREADS"])
    )
    try:
        assert launch(num_ranks, []) == 0
    finally:
        logging.disable(logging.NOTSET)
    assert seen == [threads]


def test_an_agent_that_is_asked_to_end_ends_as_one_that_a_signal_has_ended(monkeypatch):
    def asked(*arguments):
        raise SignalException("asked", signal.SIGTERM)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(LAUNCHER, "")
    monkeypatch.setattr("plimsoll.distributed.launch.elastic_launch", lambda *_: asked)
    try:
        assert launch(2, []) == 128 + signal.SIGTERM
    finally:
        logging.disable(logging.NOTSET)


def test_every_rank_is_started_once_and_the_cause_is_returned():
    """Every rank is started once, and the exit code is the cause's.

    This runs in a subprocess because torch's launcher leaves its signal handlers installed.
    """
    program = "import sys; from plimsoll.distributed.launch import launch; sys.exit(launch(2, ['no-such-command']))"
    done = run_program(program, OMP_NUM_THREADS="1")
    assert done.returncode == 2, done.stderr
    assert 1 <= done.stderr.count("no-such-command") <= 2  # the first rank to end may end the other
