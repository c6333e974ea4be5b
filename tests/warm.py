"""Processes that start warm: forked from a process that has already loaded Plimsoll's libraries.

Loading torch and transformers takes two seconds of a processor, and one `plimsoll train` does it three times. When a
test starts ``python -m plimsoll``, ``python -c`` or ``python script.py``, a server forks a process for it. The server
has loaded the libraries and done nothing else. The processes that this one starts are forked from it in turn. The new
process is a child of the process that asked for it, with separate limits, process group, signals, environment, folder
and exit code: a test sees no difference.

Two things differ: the modules that exist before the first line, and their memory. (That memory includes no free part of
the heap, so growth is measured correctly.) Tests that depend on these have the marker ``cold``. Some processes are
always started anew:

- programs with ``sys.modules`` or ``RLIMIT_`` in their text;
- processes with settings that libraries read while they are loaded;
- children of a process with several threads;
- children of other programs (``prlimit``, a shell).

Linux only. The protocol is that in `plimsoll.processes.fork_server`, whose processes are only commands of Plimsoll.
This module adds the other programs that tests start, and all properties of a new process.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from plimsoll.processes.fork_server import ARGUMENT_SPACE, ask, make_light, next_fork, show_arguments

# Variables that are read when they are needed. Others may be read once, while a library is loaded, or in /proc, which
# shows the server's variables (TORCHELASTIC_RUN_ID).
_READ_LATER = (
    *("PLIMSOLL_", "PYTEST_", "PYTHONPATH", "TOKENIZERS_PARALLELISM"),
    *("CUDA_VISIBLE_DEVICES", "COLUMNS", "LINES", "TERM", "FORCE_COLOR", "NO_COLOR"),
    *("ONEDNN_", "DNNL_", "LRU_CACHE_CAPACITY", "TORCHINDUCTOR_CACHE_DIR"),
    "GOMP_SPINCOUNT",  # how threads wait; tests have one thread: see `plimsoll.device.cpu.threads`
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "GLOO_"),  # of ranks
)
_MEASURED = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")  # `make coverage` has a hook at Python's start
_LONGEST_SECONDS = 120  # to load everything on a busy machine

_LOADED = (
    "torch._dynamo",
    "torch.onnx.ops",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "plimsoll.cli.main",
    "plimsoll.cli.answer",
    "plimsoll.report.render",
    "plimsoll.training.loop",
    "plimsoll.planning.plan",
    "plimsoll.planning.predict_step",
    "plimsoll.inference.apply",
)

_start_anew = subprocess._fork_exec  # type: ignore[attr-defined]
_NOTHING = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
_PYTHON = sys.executable  # a test may replace it by a script


@dataclass(frozen=True)
class _Request:
    """The properties of a process to start, except for its three streams."""

    parent: int
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    has_own_session: bool
    process_group: int  # less than 0: the group of its parent


class _Server:
    """The process that has loaded everything, from the view of a process that starts others."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.asking = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), ARGUMENT_SPACE]
        with theirs, cold():
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **_NOTHING)
        self._socket.settimeout(_LONGEST_SECONDS)
        atexit.register(self._end)

    def start(self, request: _Request, streams: list[int]) -> int:
        """Let the server fork a process, which becomes a child of this one, and return its id."""
        with self._lock:
            number = ask(self._socket, asdict(request), streams)
        assert number is not None, "the server has ended"
        return number

    def _end(self) -> None:
        if os.getpid() == self.asking:
            self._process.kill()
            self._process.wait()


_servers: list[_Server] = []  # of this process: at most one, started on demand


@contextmanager
def warm() -> Iterator[None]:
    """Start Plimsoll's commands and Python programs warm inside the block, if that makes no difference."""
    with _starting_by(_start_warm if not any(name in os.environ for name in _MEASURED) else _start_anew):
        yield


@contextmanager
def cold() -> Iterator[None]:
    """Start every process anew inside the block."""
    with _starting_by(_start_anew):
        yield


@contextmanager
def _starting_by(way: Any) -> Iterator[None]:
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = way  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


def _start_warm(*given: Any) -> int:
    """Replace ``_posixsubprocess.fork_exec`` for `subprocess`: the same arguments, the same result."""
    (arguments, _, closes, kept, folder, environment, stdin, _, _, stdout, _, stderr, _, failure) = given[:14]
    _restores, has_own_session, process_group, *identity, before = given[14:22]
    variables = dict(os.environ) if environment is None else dict(map(_variable, environment))
    is_plain = closes and tuple(kept) == (failure,) and before is None and identity == [None, None, None, -1]
    words = [os.fsdecode(word) for word in arguments]
    if not (is_plain and _is_python(words) and _suits(variables)):
        return int(_start_anew(*given))
    request = _Request(
        os.getpid(), words[1:], variables, os.fspath(folder or os.getcwd()), has_own_session, process_group
    )
    streams = [number if given_one < 0 else given_one for number, given_one in enumerate((stdin, stdout, stderr))]
    return _servers[0].start(request, streams) if _servers else _fork_here(request, streams)


def _variable(entry: bytes) -> tuple[str, str]:
    name, _, value = os.fsdecode(entry).partition("=")
    return name, value


def _is_python(words: list[str]) -> bool:
    """Return whether it is Plimsoll, a script, or a program that inspects neither its modules nor a memory limit."""
    executable, *what = words
    is_program = what[:1] == ["-c"] and not any(word in what[1] for word in ("sys.modules", "RLIMIT_"))
    is_script = bool(what) and what[0].endswith(".py")
    return executable == _PYTHON and (what[:2] == ["-m", "plimsoll"] or is_program or is_script)


def _suits(variables: dict[str, str]) -> bool:
    """Return whether libraries would be loaded with the same settings, in a process that can be forked from."""
    if _warm_environment is None and not _servers:
        _servers.append(_Server())
    loaded_with = _servers[0].environment if _servers else _warm_environment
    assert loaded_with is not None
    differing = {name for name, _ in variables.items() ^ loaded_with.items()}
    can_fork = os.getpid() == _servers[0].asking if _servers else len(os.listdir("/proc/self/task")) == 1
    return can_fork and all(name.startswith(_READ_LATER) for name in differing)


# ---- In the server, and in the processes forked from it.

_warm_environment: dict[str, str] | None = None  # in which this process has loaded everything
_set_by_libraries: dict[str, str] = {}
_libraries_path: list[str] = []


def _serve(number: int) -> None:
    """Fork a process for every request, until no client is left."""
    global _warm_environment, _set_by_libraries, _libraries_path
    _warm_environment = dict(os.environ)
    _libraries_path = sys.path[1 + len(_python_path(_warm_environment)) :]
    signal.signal(signal.SIGINT, lambda _number, _frame: None)  # the client is interrupted, too, and ends this process
    for module in _LOADED:
        importlib.import_module(module)
    _set_by_libraries = dict(os.environ.items() - _warm_environment.items())
    make_light()
    with socket.socket(fileno=number) as asking:
        request, streams = next_fork(asking)
    _become(_Request(**request), streams, lambda: None)


def _fork_here(request: _Request, streams: list[int]) -> int:
    """Fork from this warm process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        _become(request, streams, lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _become(request: _Request, streams: list[int], is_ready: Callable[[], object]) -> NoReturn:
    """Run as the requested process, from its first line to its end."""
    try:
        if request.has_own_session:
            os.setsid()
        if request.process_group >= 0:
            os.setpgid(0, request.process_group)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # exec() resets these, and keeps ignored signals
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        is_ready()
        _forget_parent()
        _open_streams(streams)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(_set_by_libraries | request.environment)
        show_arguments([sys.executable, *request.arguments])
        _end(_exit_code_of(request.arguments))
    except BaseException:  # noqa: BLE001 -- there is nobody else to tell
        traceback.print_exc()
    finally:
        os._exit(1)


def _forget_parent() -> None:
    """Leave the parent's objects, files and random numbers to the parent."""
    gc.freeze()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _open_streams(streams: list[int]) -> None:
    """Open the three streams as Python does, and close all other files of the parent."""
    copies = [fcntl.fcntl(stream, fcntl.F_DUPFD, 3) for stream in streams]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    text = {"encoding": sys.stdout.encoding, "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, errors=sys.stdin.errors, **text)  # noqa: SIM115 -- until the end
    is_terminal = os.isatty(1)
    sys.stdout = sys.__stdout__ = open(1, "w", 1 if is_terminal else -1, errors=sys.stdout.errors, **text)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", **text)  # noqa: SIM115


def _python_path(variables: dict[str, str]) -> list[str]:
    return [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _exit_code_of(arguments: list[str]) -> int:
    """Run a module, a program or a script as Python does, and return its exit code."""
    what = arguments[0]
    beside = {"-m": os.getcwd(), "-c": ""}.get(what, str(Path(what).resolve().parent))
    sys.path[:] = [beside, *_python_path(os.environ), *_libraries_path]
    sys.argv = [what, *arguments[2:]] if what in {"-m", "-c"} else arguments
    try:
        if what == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif what == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), vars(main))
        else:
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 -- as Python itself does
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    """End as Python does: wait for threads, run exit functions, flush the output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {sys.stdout}\n{error!r}", file=sys.stderr)
        code = code or 120  # as in Python
    with suppress(OSError):
        sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


if __name__ == "__main__":
    sys.modules["warm"] = sys.modules["__main__"]
    with warm():
        _serve(int(sys.argv[1]))
