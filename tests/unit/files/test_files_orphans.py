"""Who watches a process, and that it ends with it: real processes whose parents are killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from plimsoll.device.ending import start_ticks
from plimsoll.files.orphans import parent_that_watches
from processes import LONGEST_SECONDS, environment

NAMES = ("PLIMSOLL_SUPERVISOR", "PLIMSOLL_LAUNCHER", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


@pytest.mark.parametrize(
    ("variables", "parent"),
    [
        ({}, None),
        ({"PLIMSOLL_SUPERVISOR": "7"}, 7),
        ({"RANK": "1", "WORLD_SIZE": "2", "PLIMSOLL_SUPERVISOR": "7", "PLIMSOLL_LAUNCHER": "8"}, 8),
        ({"RANK": "1", "WORLD_SIZE": "2"}, os.getppid()),
    ],
)
def test_a_rank_is_watched_by_what_has_started_it_and_others_by_their_supervisor(variables, parent, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parent_that_watches() == parent


LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "plimsoll", "launch-worker", "1", "--", "train-worker", sys.argv[1]],
    env=os.environ | {"PLIMSOLL_SUPERVISOR": str(os.getpid())}, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells of the death of a parent")
def test_what_starts_the_ranks_ends_with_the_supervisor(tmp_path):
    fifo = tmp_path / "run"
    fifo.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(fifo)], env=environment(), stdout=subprocess.PIPE, text=True
    ) as supervisor:
        launcher = int(supervisor.stdout.readline())
        os.kill(launcher, signal.SIGSTOP)  # before it has asked to be told
        supervisor.kill()
    os.kill(launcher, signal.SIGCONT)
    until = time.monotonic() + LONGEST_SECONDS
    while start_ticks(launcher) is not None:
        assert time.monotonic() < until
        time.sleep(0.05)
