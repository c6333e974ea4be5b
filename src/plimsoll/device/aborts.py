"""Explanations for processes that native code ends when it is refused memory, with the Python line that called it.

Rust's standard library (and so ``tokenizers``, ``safetensors`` and ``polars``) prints "memory allocation of N bytes
failed" and aborts. Some C and C++ libraries do the same. No exception is raised and the step cannot be undone, so such
code needs a larger limit. `faulthandler` records the call stack from inside the signal handler, without allocating.

A fault handler that is already enabled (by the user, ``python -X faulthandler`` or pytest) stays enabled, and no
explanation is printed. The output of the native code is not read, so a lack of memory is only the likely cause, even
inside a limit. Needs no torch.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from plimsoll.device.oom_errors import is_users
from plimsoll.records.units import format_bytes

SUPERVISORS_FILE = "PLIMSOLL_FAULTS"
"""The environment variable with the path of the file to which a supervised process writes its call stack at a crash."""

_BEGIN = re.compile(r"^Fatal Python error: (Aborted|Segmentation fault)", re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .{0,80}\(most recent call first\)")
_FRAME = re.compile(r'^  File "([^"]{1,4096})", line (\d+) in (.*)')
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](\w+)")
# A shell runs this at the other end of the pipe that `faulthandler` writes to. It prints the dump and runs this module
# to explain it. The shell takes 1 ms to start (10 ms on a busy machine) and 1 MiB.
_WAIT = """
while IFS= read -r line; do dump="$dump$line
"; done
[ -z "$dump" ] && exit
printf %s "$dump" >&2
printf %s "$dump" | "$@" 3>&2 2>/dev/null >&3
"""  # if the explanation fails, its traceback is discarded


@dataclass
class Dump:
    """Parser for the call stacks that `faulthandler` writes at a crash, line by line.

    The attributes describe the current thread. If native code failed in a thread without Python code, no thread is
    current. The attributes then describe the last listed thread, which is the main thread. In the input, the innermost
    call of each thread comes first.

    Attributes:
        place: the innermost line of user code in that thread, ``file.py:12``.
        function: the name of the function that contains this line.
        own: the innermost line of Plimsoll's code in that thread, if no line of user code is deeper.
        library: the installed package that one of these two lines called.
    """

    place: str = ""
    function: str = ""
    own: str = ""
    library: str = ""
    _counts: bool = False
    _has_current: bool = False

    def takes(self, line: str) -> bool:
        """Parse one line. Return whether it belongs to a call stack of `faulthandler`."""
        if (thread := _THREAD.match(line)) is not None:
            is_current = thread[1] == "Current thread"
            self._counts = is_current or not self._has_current
            self._has_current |= is_current
            if self._counts:
                self.place = self.function = self.own = self.library = ""
            return True
        if (frame := _FRAME.match(line)) is None:
            return False
        if self._counts and not self.place:
            self._note(frame)
        return True

    def _note(self, frame: re.Match[str]) -> None:
        if frame[1].startswith(_OWN_FOLDER):
            self.own = self.own or f"{frame[1]}:{frame[2]} (`{frame[3]}`)"
        elif is_users(frame[1]):
            self.place, self.function = f"{frame[1]}:{frame[2]}", frame[3]
        elif not self.own and (package := _PACKAGE.search(frame[1])) is not None:
            self.library = package[1]


def called_by(text: str) -> str:
    """Return the Python line that called the native code, as a phrase; "" if the call stack does not show it."""
    dump = Dump()
    for line in text.splitlines():
        dump.takes(line)
    function = f" (`{dump.function}`)" if dump.function not in {"", "<module>"} else ""
    library = f"through {dump.library}" if dump.library else ""
    return ", ".join(filter(None, (f"{dump.place}{function}" if dump.place else dump.own, library)))


def explanation(text: str, limit_bytes: int | None = None) -> str:
    """Return an explanation of a process that native code ended, with a remedy; "" if native code did not end it.

    Args:
        text: the call stacks that `faulthandler` wrote.
        limit_bytes: the memory limit that was in force; ``None`` if Plimsoll had set no limit.
    """
    if (begin := _BEGIN.search(text)) is None:
        return ""
    is_abort = begin[1] == "Aborted"
    limit = "" if limit_bytes is None else f" inside a limit of {format_bytes(limit_bytes)}"
    likely = "most likely" if is_abort and limit else "perhaps"
    who = "the limit" if limit else "the system, or a limit that was set outside (`ulimit -a`),"
    how = "Code in C or C++ may not check for this and then crashes"
    if is_abort:
        how = 'Code in Rust or C++ prints a line such as "memory allocation of 4096 bytes failed" and then aborts'
    place = called_by(text)
    more = "a larger limit" if limit else "it more memory"
    outside = "; or run this code before `plimsoll.limited(...)`" if limit else ""
    return (
        f"plimsoll: native code ended this process{limit} ({'SIGABRT' if is_abort else 'SIGSEGV'}), {likely} because "
        f"{who} refused it memory. {how}; Python cannot catch this.\n"
        + (f"  Called by: {place}\n" if place else "")
        + f"  To do: give {more}; or use fewer rows at once (`batch_size=` of `map`, fewer texts per call){outside}."
    )


@contextmanager
def told_where(limit_bytes: int | None = None) -> Iterator[None]:
    """Print the calling line and the likely reason if native code aborts in the block.

    A fault handler that the user has enabled stays enabled, and nothing is printed.

    Args:
        limit_bytes: the memory limit that the explanation names; ``None`` if Plimsoll sets no limit. Without a limit, a
            block inside another block has no effect.
    """
    stderr = sys.__stderr__
    is_anothers = faulthandler.is_enabled() and not _FILES
    if stderr is None or stderr.closed or is_anothers or (_FILES and limit_bytes is None):
        yield
        return
    with _explained(stderr, limit_bytes) as file:
        _FILES.append(file)
        faulthandler.enable(file)
        try:
            yield
        finally:
            if file in _FILES:  # not in a forked child
                _FILES.remove(file)
            if _FILES:
                faulthandler.enable(_FILES[-1])
            else:
                faulthandler.disable()


def tell_supervisor() -> None:
    """Make `faulthandler` write the call stack at a crash to the file that the supervisor reads.

    Do nothing without a supervisor, or if a fault handler is already enabled.
    """
    path = os.environ.get(SUPERVISORS_FILE)
    if path and not faulthandler.is_enabled():
        faulthandler.enable(Path(path).open("ab", buffering=0))  # noqa: SIM115 -- as long as the process lives


def watcher_pids() -> set[int]:
    """Return the ids of the helper processes that wait for a crash of this process in order to explain it."""
    return {process.pid for process in _WATCHERS}


_FILES: list[IO[Any]] = []  # targets of `faulthandler`; the last one is in use
_WATCHERS: list[subprocess.Popen[bytes]] = []


@contextmanager
def _explained(stderr: IO[str], limit_bytes: int | None) -> Iterator[IO[Any]]:
    """Yield a pipe to a helper process, to which `faulthandler` can write.

    After this process has ended, the helper prints the call stack from the pipe with an explanation. If it cannot be
    started, ``stderr`` is yielded.
    """
    # If this is process 1 of a container, the watcher would end with it and could not explain anything.
    watcher = _started(limit_bytes, stderr) if os.name == "posix" and os.getpid() != 1 else None
    if watcher is None or watcher.stdin is None:
        yield stderr  # without the explanation
        return
    _leave_in_children()
    _WATCHERS.append(watcher)
    try:
        yield watcher.stdin
    finally:
        watcher.stdin.close()
        if watcher in _WATCHERS:  # not in a forked child: the watcher belongs to the parent
            _WATCHERS.remove(watcher)
            watcher.wait()


def _started(limit_bytes: int | None, stderr: IO[str]) -> subprocess.Popen[bytes] | None:
    sources = str(Path(__file__).parents[2])
    program = [sys.executable, "-m", __name__, *([] if limit_bytes is None else [str(limit_bytes)])]
    path = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
    with suppress(OSError):
        return subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, "sh", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            bufsize=0,
            process_group=0,  # so that Ctrl-C does not end the watcher
            env=os.environ | {"PYTHONPATH": path},
        )
    return None


@functools.cache
def _leave_in_children() -> None:
    os.register_at_fork(after_in_child=_leave_in_child)


def _leave_in_child() -> None:
    """Close the pipe to the helper in a forked child, so that the child's `faulthandler` writes to standard error."""
    if _FILES and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    for watcher in _WATCHERS:
        if watcher.stdin is not None:
            watcher.stdin.close()
    _FILES.clear()
    _WATCHERS.clear()


def main() -> None:
    """Print an explanation of the call stacks on standard input."""
    print(explanation(sys.stdin.read(), int(sys.argv[1]) if len(sys.argv) > 1 else None))


if __name__ == "__main__":
    main()
