"""Output of commands: results, error messages, warnings, and failures as JSON.

A subprocess reports its failure to the command through a file that an environment variable names, because its
standard error has messages for users. Not handled: the help and usage that typer prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plimsoll.errors import Interrupted, OutputError, PlimsollError, PlimsollWarning
from plimsoll.files.temporary import own_folder
from plimsoll.processes.children import is_rank

_VARIABLE = "PLIMSOLL_FAILURE_FILE"


def show(text: str) -> None:
    """Print the result of a command. If the reader closed the pipe (``| true``), exit silently with 128 + SIGPIPE."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise the interpreter flushes its buffer at exit, and prints an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(
            f"cannot write the result to standard output: {error.strerror}; write it to another file"
        ) from None


def complain(text: str) -> None:
    """Print a message to standard error. Ignore a closed pipe (``2>&1 | tee``, after Ctrl-C)."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_failure(error: PlimsollError) -> None:
    """Print the error to standard error. If this process is one of several ranks, the message names the rank."""
    is_asked_for, rank = isinstance(error, Interrupted), os.environ["RANK"] if is_rank() else None
    if is_asked_for and rank not in {None, "0"}:
        return  # all ranks stop after the same step; rank 0 prints the message
    which = "" if rank is None else f"rank {rank}: "
    complain(f"{which}{'' if is_asked_for else 'error: '}{error}")


def note_unless(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints to standard error. If ``quiet``, it does nothing."""
    return (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr))


_usual_format = warnings.formatwarning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a `PlimsollWarning` without its source location, and any other warning as usual."""
    if issubclass(category, PlimsollWarning):
        return f"warning: {message}\n"
    return _usual_format(message, category, filename, lineno, line)


def failure(name: str, message: str, exit_code: int) -> str:
    """Return a failure as the text of a JSON object: its name, message and exit code."""
    return json.dumps({"error": name, "message": message, "exit_code": exit_code}, ensure_ascii=False)


def failure_of(error: PlimsollError) -> str:
    """Return an error as the text of a JSON object (see `failure`)."""
    return failure(type(error).__name__, str(error), error.exit_code)


@contextmanager
def failures_shown() -> Iterator[None]:
    """Print one JSON object that describes the error if the block raises a `PlimsollError`, and raise it again."""
    try:
        yield
    except PlimsollError as error:
        show(failure_of(error))
        raise


def tell(error: PlimsollError) -> None:
    """Write the error to the failure file, if an environment variable names one (see `told`)."""
    if _VARIABLE in os.environ:
        with contextlib.suppress(OSError):  # the message is on standard error too
            Path(os.environ[_VARIABLE]).write_text(failure_of(error), "utf-8")


@contextmanager
def told() -> Iterator[Path]:
    """Yield the path of a file to which processes started in the block write their failure.

    If several processes fail, the file contains the last failure.
    """
    with own_folder() as folder:
        file = folder / "failure.json"
        os.environ[_VARIABLE] = str(file)
        try:
            yield file
        finally:
            del os.environ[_VARIABLE]


def told_by(file: Path, exit_code: int) -> str:
    """Return the failure that a process wrote to the file of `told`, or a generic failure if it wrote nothing."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        message = f"a process of this command ended with exit code {exit_code}; see standard error for the reason"
        return failure("ProcessError", message, exit_code)
    return failure(fields["error"], fields["message"], exit_code)
