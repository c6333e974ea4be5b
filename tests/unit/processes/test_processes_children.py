"""Forked or watched processes end with their parent."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

import plimsoll
from plimsoll.device.process_exit import start_ticks
from plimsoll.processes.children import forked_pool, parent_that_watches, uninterrupted
from processes import LONGEST_SECONDS, environment

KEPT: dict[str, object] = {}
FORK = re.compile(r"os\.fork\(\)|get_context\(\"fork\"\)")


def begin(value: object) -> None:
    KEPT["value"] = value


def kept() -> tuple[object, int]:
    value = KEPT["value"]
    return (value() if callable(value) else value, os.getpid())


def test_what_a_process_begins_with_is_inherited_and_need_not_be_sent():
    secret = object()
    with ExitStack() as stack:
        pool = forked_pool(stack, 2, begin, lambda: repr(secret))  # this lambda cannot be pickled
        assert pool is not None
        value, process = pool.submit(kept).result()
        assert (value, process != os.getpid()) == (repr(secret), True)
    with pytest.raises(RuntimeError):
        pool.submit(kept)
    assert not KEPT


def in_a_daemon(connection) -> None:
    with ExitStack() as stack:
        connection.send(forked_pool(stack, 2, begin, 1) is None)


def test_a_process_that_may_have_no_children_has_none():
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=in_a_daemon, args=(theirs,), daemon=True)
    process.start()
    assert ours.recv()
    process.join()


PARENT = """
import os, sys, time
from contextlib import ExitStack
from plimsoll.processes.children import forked_pool, uninterrupted

with ExitStack() as stack:
    pool = forked_pool(stack, 2, print)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(100)
"""


def test_the_processes_end_with_the_one_that_forked_them_however_it_ends():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment(), stdout=subprocess.PIPE, text=True)
    child = next(int(line) for line in parent.stdout if line.strip())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + LONGEST_SECONDS
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


STARTED = """
import os, subprocess, sys, time
from plimsoll.processes.children import end_as_asked, ending_with_this
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], env=ending_with_this())
    print(child.pid, flush=True)
    child.wait()
end_as_asked()
assert "PLIMSOLL_PARENT" not in os.environ, "those that this one starts do not end with that one"
print("ready", flush=True)
time.sleep(60)
"""


def test_a_command_that_was_started_so_ends_with_the_one_that_did(tmp_path):
    script = tmp_path / "started.py"
    script.write_text(STARTED)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment())
    number, said = sorted(parent.stdout.readline() for _ in range(2))  # their lines come in any order
    child = psutil.Process(int(number))
    assert said == "ready\n"
    parent.kill()
    parent.communicate()
    child.wait(LONGEST_SECONDS)


def test_ctrl_c_waits_for_a_fork_and_is_not_lost():
    """Ctrl-C waits for a fork and is not lost.

    Python ignores exceptions in functions that are called at a fork.
    """
    reached = []

    def fork():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)  # sent to this thread, the only one of a command at this time
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        fork()
    assert reached


def test_every_fork_of_a_command_has_ctrl_c_wait():
    """Every fork of a command delays Ctrl-C: a signal that arrives during the fork is raised afterwards."""
    source = Path(plimsoll.__file__).parent
    forks = {str(path.relative_to(source)) for path in source.rglob("*.py") if FORK.search(path.read_text("utf-8"))}
    assert forks == {
        "processes/children.py",
        "planning/baseline.py",
        "processes/fork_server.py",
        "planning/dry_run/processes.py",
    }
    for name in forks:
        assert "uninterrupted()" in (source / name).read_text("utf-8")


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
        os.kill(launcher, signal.SIGSTOP)  # before it has requested a signal at its parent's death
        supervisor.kill()
    os.kill(launcher, signal.SIGCONT)
    until = time.monotonic() + LONGEST_SECONDS
    while start_ticks(launcher) is not None:
        assert time.monotonic() < until
        time.sleep(0.05)
