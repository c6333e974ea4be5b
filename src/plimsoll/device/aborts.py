"""Where native code ends the process because it is refused memory: said in words, with the Python line that called it.

Rust's standard library (and so ``tokenizers``, ``safetensors`` and ``polars``) prints "memory allocation of N bytes
failed" and aborts; so do some C and C++ libraries. No exception comes of it, and nothing can be undone: a limit cannot
be made safe for such code, only larger. What can be had is the place, which `faulthandler` writes from inside the
signal handler, without allocating.

A fault handler that is enabled already, by the user, ``python -X faulthandler`` or pytest, stays as it is, and nothing
is explained. What the native code itself printed is not read: that it was memory is likely inside a limit, and not
certain. Needs no torch.
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
"""The environment variable with the file that a process which is supervised writes its faults to."""

_BEGIN = re.compile(r"^Fatal Python error: (Aborted|Segmentation fault)", re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .{0,80}\(most recent call first\)")
_FRAME = re.compile(r'^  File "([^"]{1,4096})", line (\d+) in (.*)')
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](\w+)")
# Run by a shell at the other end of the pipe that `faulthandler` writes into: it prints what came, and has this module,
# run as a program, say what it means. The shell takes a millisecond to start (10 beside other work) and 1 MiB.
_WAIT = """
while IFS= read -r line; do dump="$dump$line
"; done
[ -z "$dump" ] && exit
printf %s "$dump" >&2
printf %s "$dump" | "$@" 3>&2 2>/dev/null >&3
"""  # what is in the way of the explanation is not worth a second traceback


@dataclass
class Dump:
    """The threads that `faulthandler` writes, line by line; of each the last call comes first.

    The thread that counts is the current one; where native code failed in a thread of its own, it is the last one,
    the main thread. ``place`` is its innermost line of the user's with the function it is in, ``own`` that of Plimsoll,
    and ``library`` the installed package that the inner one of these called.
    """

    place: str = ""
    function: str = ""
    own: str = ""
    library: str = ""
    _counts: bool = False
    _has_current: bool = False

    def takes(self, line: str) -> bool:
        """Whether a line is of a dump."""
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
    """Say which line called the native code that ended a process, from what `faulthandler` wrote; "" if not known."""
    dump = Dump()
    for line in text.splitlines():
        dump.takes(line)
    function = f" (`{dump.function}`)" if dump.function not in {"", "<module>"} else ""
    library = f"through {dump.library}" if dump.library else ""
    return ", ".join(filter(None, (f"{dump.place}{function}" if dump.place else dump.own, library)))


def explanation(text: str, limit_bytes: int | None = None) -> str:
    """Say what it means that native code ended a process, and what to type; "" where it did not.

    Args:
        text: what `faulthandler` wrote.
        limit_bytes: that was in force; ``None`` for none of Plimsoll's.
    """
    if (begin := _BEGIN.search(text)) is None:
        return ""
    is_abort = begin[1] == "Aborted"
    limit = "" if limit_bytes is None else f" inside a limit of {format_bytes(limit_bytes)}"
    likely = "most likely" if is_abort and limit else "perhaps"
    who = "the limit" if limit else "the system, or a limit that was set outside (`ulimit -a`),"
    how = "Code in C or C++ may not check for that, and crashes"
    if is_abort:
        how = 'Code in Rust or C++ says so above, as in "memory allocation of 4096 bytes failed", and ends the process'
    place = called_by(text)
    more = "a larger limit" if limit else "it more memory"
    outside = "; or do this before `plimsoll.limited(...)`, outside of it" if limit else ""
    return (
        f"plimsoll: native code ended this process{limit} ({'SIGABRT' if is_abort else 'SIGSEGV'}), {likely} because "
        f"{who} refused it memory. {how}; no exception can be caught.\n"
        + (f"  Called by: {place}\n" if place else "")
        + f"  To do: give {more}; or do fewer rows at once (`batch_size=` of `map`, fewer texts in a call){outside}."
    )


@contextmanager
def told_where(limit_bytes: int | None = None) -> Iterator[None]:
    """Have an abort print where it happened while the block runs, and why; a fault handler of the user's own stays.

    Args:
        limit_bytes: what the explanation says was in force; within another such block, one without is nothing new.
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
    """Write faults of this process from now on to where its supervisor reads them; do nothing without one."""
    path = os.environ.get(SUPERVISORS_FILE)
    if path and not faulthandler.is_enabled():
        faulthandler.enable(Path(path).open("ab", buffering=0))  # noqa: SIM115 -- as long as the process lives


def watcher_pids() -> set[int]:
    """Return the processes of this module that wait now."""
    return {process.pid for process in _WATCHERS}


_FILES: list[IO[Any]] = []  # what `faulthandler` writes to, the last now
_WATCHERS: list[subprocess.Popen[bytes]] = []


@contextmanager
def _explained(stderr: IO[str], limit_bytes: int | None) -> Iterator[IO[Any]]:
    """A file whose content is printed with its explanation, once this process has ended."""
    # Where this is process 1 of a container, all others end with it, and nothing could be explained.
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
        if watcher in _WATCHERS:  # not in a forked child, whose it is not
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
            process_group=0,  # what ends the others from the keyboard leaves it
            env=os.environ | {"PYTHONPATH": path},
        )
    return None


@functools.cache
def _leave_in_children() -> None:
    os.register_at_fork(after_in_child=_leave_in_child)


def _leave_in_child() -> None:
    """A forked child does not keep the pipe open, and writes to standard error."""
    if _FILES and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    for watcher in _WATCHERS:
        if watcher.stdin is not None:
            watcher.stdin.close()
    _FILES.clear()
    _WATCHERS.clear()


def main() -> None:
    """Explain what comes on standard input."""
    print(explanation(sys.stdin.read(), int(sys.argv[1]) if len(sys.argv) > 1 else None))


if __name__ == "__main__":
    main()
