"""A process that has loaded what a job needs, and from which the processes of its run are forked.

    with ForkServer([sys.executable, "-m", "plimsoll", "fork-server", "job.yaml"]) as server:   # in the supervisor
        process = server.fork(["train-worker", "runs/a"], {"PLIMSOLL_SUPERVISOR": "17"})

    sys.argv[1:] = serve()    # in the server, once all is loaded: it goes on in each process that is forked

To load torch, transformers and a model's code takes seconds of a processor, and a run has three processes that need
them. The server loads them once and does nothing else, so that a fork of it is what a fresh process would be:

- Its private memory counts as in a fresh process: the kernel counts a page of the heap (RssAnon, VmData) in every
  process that has it mapped, also where several share it.
- It is a child of the process that asked for it, not of the server: it is waited for, killed and told of its parent's
  death as any other. The server forks twice, and the one in between ends (prctl(2), PR_SET_CHILD_SUBREAPER).
- It has no thread, no pool of them and no CUDA context of the server's, since those do not survive a fork: where
  loading has made any, the server ends and forks nothing. OpenBLAS has threads from the first, and ends them itself.
- What libraries read from the environment once, they read in the server, which has that of the supervisor.

`ForkServer.fork` returns ``None`` where nothing can be forked, also on other systems than Linux: who asks starts a
fresh process then. A server that is killed takes no process with it, and the server ends when nobody can ask any more.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plimsoll.device.heap import trim
from plimsoll.forked import ending_with_this

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_MOST_BYTES = 1 << 17  # of a request
_NOT_FORKED, _GO = b"0", b"go"
_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_ARGUMENT_BYTES = 1024  # of the server's command line, over which those of its forks are written


@dataclass(slots=True)
class ForkedProcess:
    """A process that was forked for this one, whose child it is; the names are those of `subprocess.Popen`."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end; returns its exit code, less than 0 if a signal ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """The server as the process sees it that asks; it is started with the block and ended with it.

    Args:
        command: starts it; it calls `serve` at last.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command, "-" * _ARGUMENT_BYTES]

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A group of its own: Ctrl-C is for the process that asks.
            self._process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), env=ending_with_this(), process_group=0
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def fork(self, arguments: Sequence[str], variables: Mapping[str, str]) -> ForkedProcess | None:
        """Have a process forked that goes on with the arguments, once the server has loaded all; ``None`` if it cannot.

        Args:
            arguments: of the command line, without the program.
            variables: of the environment, beside those with which the server was started.
        """
        request = {"parent": os.getpid(), "arguments": [*arguments], "variables": dict(variables)}
        with _adopting() as is_adopting:
            if not is_adopting:
                return None
            go, say_go = os.pipe()
            with open(say_go, "wb", buffering=0) as saying:
                try:
                    socket.send_fds(self._socket, [json.dumps(request).encode()], [go])
                    answer = self._socket.recv(_MOST_BYTES)
                except OSError:  # it has ended
                    answer = b""
                finally:
                    os.close(go)
                if answer in {b"", _NOT_FORKED}:
                    return None
                saying.write(_GO)  # now that it is known here; else it ends
        return ForkedProcess(int(answer))

    def terminate(self) -> None:
        """End the server, also while it loads: what waits for a fork goes on without."""
        self._process.terminate()


@contextmanager
def _adopting() -> Iterator[bool]:
    """Be the parent of processes below this one whose parent ends, while the block runs; whether that is possible."""
    is_possible = sys.platform.startswith("linux") and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    try:
        yield is_possible
    finally:
        if is_possible:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def serve() -> list[str]:
    """Fork a process for each request that comes on standard input, and return its arguments in it.

    In the server itself it does not return: the server ends where it cannot fork, or nobody can ask any more.
    """
    gc.collect()
    gc.freeze()  # collecting garbage would write to every page of the heap, which copies it
    trim()
    if not can_fork():
        sys.exit(0)
    _show_arguments([sys.executable, "-m", "plimsoll", *sys.argv[1:-1]])
    asking = socket.socket(fileno=sys.stdin.fileno())
    while True:
        text, received, _, _ = socket.recv_fds(asking, _MOST_BYTES, 1)
        if not text:
            sys.exit(0)
        (go,) = received
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            for number in (tell, told):
                os.close(number)
            return _become(json.loads(text), go, asking)
        for number in (go, tell):
            os.close(number)
        os.waitpid(between, 0)  # by now the child is the asking process's
        asking.send(os.read(told, _MOST_BYTES) or _NOT_FORKED)
        os.close(told)


def _become(request: Mapping[str, Any], go: int, asking: socket.socket) -> list[str]:
    """Be the process that was asked for; end where nobody knows of it, as the server or who asked has been killed."""
    is_known = os.read(go, len(_GO)) == _GO
    if not is_known or os.getppid() != request["parent"]:
        os._exit(1)
    os.close(go)
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, asking.detach())
    os.close(nothing)
    os.environ.update(request["variables"])
    if "numpy" in sys.modules:  # which draws in each process other numbers, as Python and not as torch
        sys.modules["numpy"].random.seed()
    _show_arguments([sys.executable, "-m", "plimsoll", *request["arguments"]])
    arguments: list[str] = request["arguments"]
    return arguments


def can_fork() -> bool:
    """Whether a fork has all that this process has: it has the thread that forks only, and no context of CUDA."""
    if not sys.platform.startswith("linux"):
        return False
    if (probe := os.fork()) == 0:  # at a fork OpenBLAS ends its threads, until they are needed
        os._exit(0)
    os.waitpid(probe, 0)
    return len(os.listdir("/proc/self/task")) == 1 and not _has_begun_cuda()


def _has_begun_cuda() -> bool:
    """Whether CUDA's driver was called, by which a fork cannot use it; asked of the driver itself, where it is loaded.

    That torch was asked for a GPU is enough, and torch does not know of it.
    """
    if "libcuda.so" not in Path("/proc/self/maps").read_text():
        return False
    number = ctypes.c_int()
    return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(number)) != _CUDA_NOT_INITIALIZED)


def _show_arguments(words: list[str]) -> None:
    """Write the command line of this process, as ``ps`` shows it, over that of the server, see proc(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, behind = int(fields[45]), int(fields[46])  # 48 and 49, less the two before the parenthesis and one
    line = "\0".join(words).encode()[: behind - first - 1]
    ctypes.memmove(first, line.ljust(behind - first, b"\0"), behind - first)
