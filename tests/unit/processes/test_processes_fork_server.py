"""Processes forked from a server that has loaded everything: children of the requester, isolated from each other."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from plimsoll.processes import fork_server
from plimsoll.processes.fork_server import ForkServer, can_fork
from processes import LONGEST_SECONDS, environment, run_program

SERVER = """
import json, os, random, signal, sys, time
import numpy
{}
from plimsoll.processes.fork_server import serve

what = serve()
if what[0] == "tell":
    found = {{
        "parent": os.getppid(), "group": os.getpgid(0), "pid": os.getpid(), "variable": os.environ["OF_TEST"],
        "arguments": what[1:], "numbers": [random.random(), numpy.random.random()],
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{name}}")),
        "input": sys.stdin.read(), "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[1:],
    }}
    open(what[1], "w").write(json.dumps(found))
    sys.exit(7)
time.sleep(600)
"""


def server_of(setup: str = "") -> ForkServer:
    return ForkServer([sys.executable, "-c", SERVER.format(setup)])


def test_a_fork_is_a_child_of_who_asks_and_has_nothing_of_the_servers(tmp_path: Path):
    found = []
    with server_of() as server:
        for name in ("a", "b"):
            process = server.fork(["tell", str(tmp_path / name), "x y"], {"OF_TEST": name})
            assert process is not None
            assert (process.wait(), process.wait()) == (7, 7)
            found.append(json.loads((tmp_path / name).read_text()))
            assert found[-1]["pid"] == found[-1]["group"] == process.pid
            process.terminate()  # has no effect on a process that has ended
    for name, one in zip("ab", found, strict=True):
        assert (one["parent"], one["variable"], one["input"]) == (os.getpid(), name, "")
        assert one["arguments"] == [str(tmp_path / name), "x y"]
        assert one["files"] == [0, 1, 2]
        assert one["command"] == ["-m", "plimsoll", "tell", *one["arguments"]]
    assert all(mine != other for mine, other in zip(*(one["numbers"] for one in found), strict=True))


def test_a_signal_ends_a_fork_and_is_its_return_code():
    with server_of() as server:
        process = server.fork(["sleep"], {})
        assert process is not None
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_a_server_that_is_killed_takes_no_process_with_it_and_forks_no_more():
    with server_of() as server:
        process = server.fork(["sleep"], {})
        assert process is not None
        server.terminate()
        server._process.wait()
        assert psutil.Process(process.pid).is_running()
        assert server.fork(["sleep"], {}) is None
        process.terminate()
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    "setup",
    [
        "import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "import plimsoll.processes.fork_server as module; module._has_begun_cuda = lambda: True",
        "sys.exit('it cannot be loaded')",
    ],
    ids=["thread", "cuda", "fault"],
)
def test_what_does_not_survive_a_fork_is_not_forked(setup: str):
    with server_of(setup) as server:
        assert server.fork(["sleep"], {}) is None


ASK = f"""
import sys
from plimsoll.processes.fork_server import ForkServer
with ForkServer([sys.executable, "-c", {SERVER.format("")!r}]) as server:
    process = server.fork(["sleep"], {{}})
    print(server._process.pid, process.pid, flush=True)
    process.wait()
"""


def test_a_server_ends_when_who_asks_is_killed():
    asking = subprocess.Popen([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True, env=environment())
    assert asking.stdout is not None
    server, process = map(psutil.Process, map(int, asking.stdout.readline().split()))
    asking.kill()
    asking.wait()
    server.wait(LONGEST_SECONDS)
    process.kill()  # a process of a run would ask the kernel to end it with its supervisor (`processes.children`)
    asking.stdout.close()


UNKNOWN = """
import os, sys
from plimsoll.processes.fork_server import _fork_for
go, say_go = os.pipe()
if sys.argv[1] == "other parent":
    os.write(say_go, b"go")
os.close(say_go)  # which a server does not have
if (number := _fork_for(-1 if sys.argv[1] == "other parent" else os.getppid(), go)) is None:
    print("went on")
"""


@pytest.mark.parametrize("case", ["no go", "other parent"])
def test_a_fork_that_nobody_knows_of_ends(case: str):
    """A fork that nobody knows of ends, for example if the server or the requester is killed before the answer."""
    done = run_program(UNKNOWN, case)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Driver:
    """A stand-in for the CUDA driver in `ctypes`."""

    def __init__(self, status: int) -> None:
        self.cuDeviceGetCount = lambda number: status


@pytest.mark.parametrize(("status", "has_begun"), [(3, False), (0, True), (100, True)])
def test_cuda_has_begun_where_the_driver_no_longer_says_that_it_has_not(
    monkeypatch: pytest.MonkeyPatch, status: int, has_begun: bool
):
    monkeypatch.setattr(fork_server.Path, "read_text", lambda path: "7f00-7f01 r-xp /usr/lib/libcuda.so.1\n")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(status))
    assert fork_server._has_begun_cuda() is has_begun


def test_other_systems_than_linux_fork_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_fork()
    with fork_server._adopting() as is_adopting:
        assert not is_adopting


def test_where_no_more_processes_are_allowed_nothing_is_forked(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refuse)
    assert not can_fork()


SKETCHED = """
import sys
from plimsoll.data.quick_facts import sketch_texts
from plimsoll.records.job import Job
from plimsoll.processes.fork_server import can_fork
job = Job.from_fields({"model": "lstm", "data": sys.argv[1], "tokenizer": {"vocab_size": 300}})
sketched = sketch_texts(job)
print(sketched.guessed, can_fork())
"""


@pytest.mark.cold
def test_a_command_that_has_trained_a_small_tokenizer_can_be_forked(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, the dog did not\n" * 5000)
    done = run_program(SKETCHED, text)
    assert done.stdout == "frozenset() True\n", done.stderr
