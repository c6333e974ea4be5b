"""A process that has loaded what a job needs, and from which the processes of its run are forked.

    with ForkServer([sys.executable, "-m", "plimsoll", "fork-server", "job.yaml"]) as server:   # in the supervisor
        process = server.fork(["train-worker", "runs/a"], {"PLIMSOLL_SUPERVISOR": "17"})

    sys.argv[1:] = serve()    # in the server, once all is loaded: it goes on in each process that is forked

Torch, transformers and a model's code are loaded once for all, which takes seconds of a processor. A fork is what a
fresh process would be, but that libraries have read the supervisor's environment. Its private memory counts as there:
the kernel counts a page of the heap (RssAnon, VmData) in every process that has it mapped. A server that is killed
takes no process with it, and the server ends when nobody can ask any more.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plimsoll.device.cpu.heap import trim
from plimsoll.processes.children import ending_with_this, uninterrupted

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_MOST_BYTES = 1 << 17  # of a request
_NOT_FORKED, _GO = b"0", b"go"
_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_SOCKET = "PLIMSOLL_SOCKET"
_MOST_FILES = 4  # with a request: by which it is told to go on, and the three streams
ARGUMENT_SPACE = "-" * 4096
"""The last argument of a server's command line, over which those of its forks are written."""


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
        self._command = [*command, ARGUMENT_SPACE]

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,  # code of the user's that reads it finds its end
                pass_fds=[number],
                env=ending_with_this() | {_SOCKET: str(number)},
                process_group=0,  # Ctrl-C is for the process that asks
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

        That is so on other systems than Linux, too: who asks starts a fresh process then.

        Args:
            arguments: of the command line, without the program.
            variables: of the environment, beside those with which the server was started.
        """
        request = {"parent": os.getpid(), "arguments": [*arguments], "variables": dict(variables)}
        pid = ask(self._socket, request)
        return None if pid is None else ForkedProcess(pid)

    def terminate(self) -> None:
        """End the server, also while it loads: what waits for a fork goes on without."""
        self._process.terminate()


def ask(server: socket.socket, request: Mapping[str, Any], files: Sequence[int] = ()) -> int | None:
    """Have the server at the other end fork a process for this one; returns its number, or ``None`` if it cannot.

    Args:
        server: a socket that keeps messages apart.
        request: it has at least the number of this process, as ``parent``.
        files: handed over with it.
    """
    go, say_go = os.pipe()
    with open(say_go, "wb", buffering=0) as saying, _adopting() as is_adopting:
        try:
            if not is_adopting:
                return None
            socket.send_fds(server, [json.dumps(request).encode()], [go, *files])
            answer = server.recv(_MOST_BYTES)
        except OSError:  # the server has ended
            return None
        finally:
            os.close(go)
        if answer in {b"", _NOT_FORKED}:
            return None
        with suppress(BrokenPipeError):  # somebody may have killed it
            saying.write(_GO)  # it is known here; else it would end
    return int(answer)


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
    """Fork a process for each request of the one that started this server, and return its arguments in it.

    In the server itself it does not return: the server ends where it cannot fork, or nobody can ask any more.
    """
    make_light()
    if not can_fork():
        sys.exit(0)
    show_arguments([sys.executable, "-m", "plimsoll", *sys.argv[1:-1]])
    with socket.socket(fileno=int(os.environ.pop(_SOCKET))) as asking:
        request, _ = next_fork(asking)
    os.setpgid(0, 0)
    if "numpy" in sys.modules:  # seeded anew in each process, as Python does; torch has a fixed seed
        sys.modules["numpy"].random.seed()
    os.environ.update(request["variables"])
    arguments: list[str] = request["arguments"]
    show_arguments([sys.executable, "-m", "plimsoll", *arguments])
    return arguments


def make_light() -> None:
    """Have forks of this process share its memory with it, and count none that is free."""
    gc.collect()
    gc.freeze()  # collecting garbage would write to every page of the heap, which copies it
    trim()


def next_fork(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request, and return in it the request, and the files that came with it.

    In this process it does not return: it ends when nobody can ask any more.
    """
    while True:
        text, files, _, _ = socket.recv_fds(asking, _MOST_BYTES, _MOST_FILES)
        if not text:
            sys.exit(0)
        request, go = json.loads(text), files.pop(0)
        number = _fork_for(request["parent"], go)
        if number is None:
            return request, files
        asking.send(number)
        for file in (go, *files):
            os.close(file)


def _fork_for(parent: int, go: int) -> bytes | None:
    """Fork a process whose parent is the one that asked; ``None`` in it, here its number.

    It ends where nobody knows of it, as the server or who asked has been killed.
    """
    # Forked twice, and the one in between ends: so it is a child of the process that asked (prctl(2),
    # PR_SET_CHILD_SUBREAPER), which can wait for it and kill it as any other, and of whose death it is told.
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        if child := os.fork():
            os.write(tell, str(child).encode())
            os._exit(0)
        os.close(tell)
        os.close(told)
        if os.read(go, len(_GO)) != _GO or os.getppid() != parent:
            os._exit(1)
        os.close(go)
        return None
    os.close(tell)
    os.waitpid(between, 0)  # by now the child is the asking process's
    number = os.read(told, _MOST_BYTES)
    os.close(told)
    return number or _NOT_FORKED


def can_fork() -> bool:
    """Whether a fork has all that this process has: it has the thread that forks only, and no context of CUDA."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with uninterrupted():
            probe = os.fork()  # at which OpenBLAS ends its threads, until they are needed
            if probe == 0:
                os._exit(0)
    except OSError:  # no more processes are allowed
        return False
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


def show_arguments(words: list[str]) -> None:
    """Write the command line of this process, as ``ps`` shows it, over that of the server, see proc(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, behind = int(fields[45]), int(fields[46])  # 48 and 49, less the two before the parenthesis and one
    line = "\0".join(words).encode()[: behind - first - 1]
    ctypes.memmove(first, line.ljust(behind - first, b"\0"), behind - first)
