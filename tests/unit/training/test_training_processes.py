"""The processes of a run: forked from a process that has loaded their imports, or started anew."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from plimsoll.records.run import CheckpointLine, DeathLine, StartLine
from plimsoll.training.processes import _SERVERS, End, loading_once, run_worker
from processes import LONGEST_SECONDS, environment

SUPERVISE = """
import sys
from pathlib import Path
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.processes import loading_once
from plimsoll.training.supervise import supervise
directory = RunDirectory.open(Path(sys.argv[1]))
with loading_once(directory):
    sys.exit(supervise(directory, quiet=True))
"""


@pytest.fixture
def supervisor(new_run):
    """Yield the process of a run that trains until it is stopped, and kill all its children after the test."""
    directory = new_run(steps=100_000, checkpoint={"every": 20})
    command = [sys.executable, "-c", SUPERVISE, str(directory.path)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        process.directory = directory
        yield process
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in (process, *left):
            one.kill()


def below(process, name):
    """Wait for the descendant of a process that runs this command, and return it."""
    while process.poll() is None:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if name in child.cmdline():
                    return child
    raise AssertionError(process.communicate())


def caught_by(process):
    """Return the signals that a process has handlers for, see proc(5)."""
    (line,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return int(line.split()[1], 16)


def wait_for(process, kind, number=1):
    while len([line for line in process.directory.lines() if isinstance(line, kind)]) < number:
        assert process.poll() is None, process.communicate()


def test_kills_of_server_and_worker_lose_nothing(supervisor):
    wait_for(supervisor, CheckpointLine)
    server, first = below(supervisor, "fork-server"), below(supervisor, "train-worker")
    first.kill()
    wait_for(supervisor, StartLine, 2)
    second = below(supervisor, "train-worker")
    assert server.is_running()
    server.kill()
    wait_for(supervisor, CheckpointLine, 1 + len(supervisor.directory.lines()) // 100)
    assert second.is_running()
    second.kill()
    wait_for(supervisor, StartLine, 3)  # started anew, because no process can fork it
    third = below(supervisor, "train-worker")
    supervisor.send_signal(signal.SIGINT)
    _, errors = supervisor.communicate(timeout=LONGEST_SECONDS)
    assert supervisor.returncode == 130, errors
    lines = supervisor.directory.lines()
    assert [line.signal for line in lines if isinstance(line, DeathLine)] == ["SIGKILL", "SIGKILL"]
    steps = [line.step for line in lines if line.event == "step"]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
    psutil.wait_procs([server, first, second, third], timeout=LONGEST_SECONDS)
    assert not any(one.is_running() for one in (server, first, second, third))


def test_a_supervisor_that_is_killed_leaves_no_process(supervisor):
    wait_for(supervisor, StartLine)
    left = [below(supervisor, name) for name in ("fork-server", "train-worker")]
    supervisor.kill()
    gone, alive = psutil.wait_procs(left, timeout=LONGEST_SECONDS)
    assert (len(gone), alive) == (2, [])


def test_a_signal_ends_a_server_that_still_loads(supervisor):
    below(supervisor, "fork-server")
    while not caught_by(supervisor) & 1 << (signal.SIGTERM - 1):
        assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGTERM)
    _, errors = supervisor.communicate(timeout=LONGEST_SECONDS)
    assert "Interrupted: stopped at once, and step 0 is the last one saved" in errors


def test_without_a_server_and_outside_of_the_block_a_process_is_started_anew(new_run, capfd):
    assert run_worker(["train-worker", "none"]) == End(2, None, "")
    with loading_once(new_run()):
        _SERVERS[0]._process.kill()
        assert run_worker(["train-worker", "none"]) == End(2, None, "")
    assert _SERVERS == []
    assert capfd.readouterr().err.count("none is not a run directory") == 2
