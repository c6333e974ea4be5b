"""A server process with all libraries loaded, from which the processes of a run are forked.

    with ForkServer([sys.executable, "-m", "plimsoll", "fork-server", "job.yaml"]) as server:   # in the supervisor
        process = server.fork(["train-worker", "runs/a"], {"PLIMSOLL_SUPERVISOR": "17"})

    sys.argv[1:] = serve()    # in the server, after its imports: returns in each forked process

Importing torch, transformers and the model code takes seconds, and happens once instead of in each process. A fork
differs from a fresh process in one respect: libraries have read the environment variables of the supervisor. A fork has
as much private memory as a fresh process: the kernel counts a heap page (RssAnon, VmData) in every process that maps
it. Forked processes survive the server. The server exits when its client closes the socket.
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
_MOST_BYTES = 1 << 17  # largest size of a request
_NOT_FORKED, _GO = b"0", b"go"
_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_SOCKET = "PLIMSOLL_SOCKET"
_MOST_FILES = 4  # sent with a request: the pipe that starts the fork, and three standard streams
ARGUMENT_SPACE = "-" * 4096
"""The last argument of the server's command line: space that forks overwrite with their own command lines."""


@dataclass(slots=True)
class ForkedProcess:
    """A process that the server forked, which is a child of this process. Its interface is like `subprocess.Popen`."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Wait for the process to end. Return its exit code, or -n if signal n ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """A client of a fork server. The ``with`` block starts the server and ends it.

    Args:
        command: the command line of the server, which calls `serve` after its imports.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command, ARGUMENT_SPACE]

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,  # user code that reads it gets end-of-file
                pass_fds=[number],
                env=ending_with_this() | {_SOCKET: str(number)},
                process_group=0,  # Ctrl-C is handled by this process
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def fork(self, arguments: Sequence[str], variables: Mapping[str, str]) -> ForkedProcess | None:
        """Wait until the server has finished its imports, and return a forked process.

        Return ``None`` if the server cannot fork, as on all systems except Linux. The caller must then start a fresh
        process.

        Args:
            arguments: the command line of the new process, without the program.
            variables: environment variables to set, in addition to the environment variables of the server.
        """
        request = {"parent": os.getpid(), "arguments": [*arguments], "variables": dict(variables)}
        pid = ask(self._socket, request)
        return None if pid is None else ForkedProcess(pid)

    def terminate(self) -> None:
        """End the server, even during its imports. A pending `fork` then returns ``None``."""
        self._process.terminate()


def ask(server: socket.socket, request: Mapping[str, Any], files: Sequence[int] = ()) -> int | None:
    """Send a request to a fork server. Return the process ID of the fork, or ``None`` if the server cannot fork.

    Args:
        server: a socket that preserves message boundaries.
        request: the request, with at least the ID of this process as ``parent``.
        files: file descriptors to send with the request.
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
        with suppress(BrokenPipeError):  # the fork may have been killed
            saying.write(_GO)  # this process knows its ID now; without the message it would exit
    return int(answer)


@contextmanager
def _adopting() -> Iterator[bool]:
    """Make this process adopt its orphaned descendants during the block. Yield whether the system supports this."""
    is_possible = sys.platform.startswith("linux") and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    try:
        yield is_possible
    finally:
        if is_possible:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def serve() -> list[str]:
    """Fork a process for each request. In the fork, return the command-line arguments of the request.

    The call never returns in the server, which exits if it cannot fork or its client has closed the socket.
    """
    make_light()
    if not can_fork():
        sys.exit(0)
    show_arguments([sys.executable, "-m", "plimsoll", *sys.argv[1:-1]])
    with socket.socket(fileno=int(os.environ.pop(_SOCKET))) as asking:
        request, _ = next_fork(asking)
    os.setpgid(0, 0)
    if (
        "numpy" in sys.modules
    ):  # as in fresh processes, where numpy and random are seeded from entropy; torch has a fixed seed
        sys.modules["numpy"].random.seed()
    os.environ.update(request["variables"])
    arguments: list[str] = request["arguments"]
    show_arguments([sys.executable, "-m", "plimsoll", *arguments])
    return arguments


def make_light() -> None:
    """Free unused heap memory, and keep the garbage collector from writing to pages that forks share."""
    gc.collect()
    gc.freeze()  # a collection writes to every heap page, which would copy it in each fork
    trim()


def next_fork(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. In the fork, return the request and its file descriptors.

    Requests arrive on the socket ``asking``. The call never returns in this process, which exits when its client closes
    the socket.
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
    """Fork a child of process ``parent``. Return ``None`` in the child, and the child's process ID in the server.

    ``go`` is a pipe on which ``parent`` confirms that it knows this ID. Without the confirmation, the child exits.
    """
    # Double fork: the process in between exits, so ``parent`` adopts the child (prctl(2), PR_SET_CHILD_SUBREAPER). It
    # can then wait for the child and kill it, and the child gets a signal when ``parent`` dies.
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
    os.waitpid(between, 0)  # now the child has been adopted
    number = os.read(told, _MOST_BYTES)
    os.close(told)
    return number or _NOT_FORKED


def can_fork() -> bool:
    """Return whether a fork of this process would work: it has no other threads and has not initialized CUDA."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with uninterrupted():
            probe = os.fork()  # OpenBLAS ends its threads at a fork, and restarts them on demand
            if probe == 0:
                os._exit(0)
    except OSError:  # no more processes are allowed
        return False
    os.waitpid(probe, 0)
    return len(os.listdir("/proc/self/task")) == 1 and not _has_begun_cuda()


def _has_begun_cuda() -> bool:
    """Return whether the CUDA driver is initialized in this process; a fork could then not use CUDA.

    The function asks the driver instead of torch, because a query for GPUs initializes the driver without torch's
    knowledge.
    """
    if "libcuda.so" not in Path("/proc/self/maps").read_text():
        return False
    number = ctypes.c_int()
    return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(number)) != _CUDA_NOT_INITIALIZED)


def show_arguments(words: list[str]) -> None:
    """Set the command line that ``ps`` shows for this process, see proc(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, behind = int(fields[45]), int(fields[46])  # fields 48 and 49 of stat, from 1; two precede the parenthesis
    line = "\0".join(words).encode()[: behind - first - 1]
    ctypes.memmove(first, line.ljust(behind - first, b"\0"), behind - first)
