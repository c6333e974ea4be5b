"""What a command says on standard output, also when nobody reads it any more, and what ``--json`` says of a failure.

A process that a command starts tells it of its failure through a file, named in the environment: its standard error
belongs to people. Does NOT cover what typer prints itself (help, usage).
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
    """Print the result of a command. Without a reader (``| true``) it ends as Unix tools do: silent, 128 + SIGPIPE."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is still buffered would be written, and fail loudly, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"cannot write the result to standard output: {error.strerror}; give another place") from None


def complain(text: str) -> None:
    """Say on standard error why a command failed; without a reader (``2>&1 | tee``, at Ctrl-C) in silence."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_failure(error: PlimsollError) -> None:
    """Say on standard error why a command failed, and in which rank."""
    is_asked_for, rank = isinstance(error, Interrupted), os.environ["RANK"] if is_rank() else None
    if is_asked_for and rank not in {None, "0"}:
        return  # all ranks stop after the same step, and the first says so
    which = "" if rank is None else f"rank {rank}: "
    complain(f"{which}{'' if is_asked_for else 'error: '}{error}")


def note_unless(quiet: bool) -> Callable[[str], None]:
    """Return what says a sentence to people on standard error, or nothing where that is asked for."""
    return (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr))


_usual_format = warnings.formatwarning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning of ours as a line for people, who need no place in the source; any other as ever."""
    if issubclass(category, PlimsollWarning):
        return f"warning: {message}\n"
    return _usual_format(message, category, filename, lineno, line)


def failure(name: str, message: str, exit_code: int) -> str:
    """One JSON object that says why a command failed."""
    return json.dumps({"error": name, "message": message, "exit_code": exit_code}, ensure_ascii=False)


def failure_of(error: PlimsollError) -> str:
    """The same for an error of ours."""
    return failure(type(error).__name__, str(error), error.exit_code)


@contextmanager
def failures_shown() -> Iterator[None]:
    """Print one JSON record if the block ends in an error."""
    try:
        yield
    except PlimsollError as error:
        show(failure_of(error))
        raise


def tell(error: PlimsollError) -> None:
    """Tell the command that started this process, if it asked, why this process fails."""
    if _VARIABLE in os.environ:
        with contextlib.suppress(OSError):  # the message on standard error is there anyway
            Path(os.environ[_VARIABLE]).write_text(failure_of(error), "utf-8")


@contextmanager
def told() -> Iterator[Path]:
    """Ask the processes that are started in the block to tell; what the last of them told is in the file, if any."""
    with own_folder() as folder:
        file = folder / "failure.json"
        os.environ[_VARIABLE] = str(file)
        try:
            yield file
        finally:
            del os.environ[_VARIABLE]


def told_by(file: Path, exit_code: int) -> str:
    """Return the record of a failure, as a process told it in the file of `told`, or one that says that it did not."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        reason = "standard error has the reason, if any"
        return failure(
            "ProcessError", f"the process that was started ended with exit code {exit_code}; {reason}", exit_code
        )
    return failure(fields["error"], fields["message"], exit_code)
