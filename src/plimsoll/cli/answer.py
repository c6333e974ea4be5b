"""What the commands that answer with one record have in common: the budget, where the answer goes, how it is given.

Everything that can be refused is refused before the work, which takes seconds to minutes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.records.base import Record
    from plimsoll.report.render import Format

_MIB = 1 << 20
_FORMATS: dict[str, Format] = {".html": "html", ".htm": "html", ".json": "json"}


@contextmanager
def answering(what: str, as_json: bool) -> Iterator[None]:
    """Be the work of a command: how it fails is one JSON record where that is asked for, and Ctrl-C says what it ended.

    Raises:
        Interrupted: after Ctrl-C.
    """
    from plimsoll.cli.output import failures_shown
    from plimsoll.errors import Interrupted

    with failures_shown() if as_json else nullcontext():
        try:
            yield
        except KeyboardInterrupt:
            message = f"{what} was stopped before there was an answer: give the same command to begin again"
            raise Interrupted(message, signal.SIGINT) from None


def limit_bytes_of(budget: str | None) -> int | None:
    """Read ``--budget`` in bytes.

    Raises:
        BudgetError: if the text is not a size, or has no unit.
    """
    from plimsoll.errors import BudgetError, InputError
    from plimsoll.records.units import parse_bytes

    if budget is None:
        return None
    try:
        num_bytes = parse_bytes(budget)
    except InputError as error:
        raise BudgetError(f"--budget: {error}") from None
    if budget.strip().isdecimal() and num_bytes < _MIB:
        raise BudgetError(f"--budget: {budget.strip()} is a number of bytes: write a unit, for example 2GiB")
    return num_bytes


def check_output(output: Path | None, force: bool) -> None:
    """Refuse an ``--output`` that cannot be written, or that is there.

    Raises:
        OutputError: it says why.
    """
    from plimsoll.errors import OutputError

    if output is None:
        return
    if output.suffix.lower() not in _FORMATS:
        raise OutputError(f"cannot tell from the name {output} what to write: give -o a name in .html or .json")
    if output.is_dir():
        raise OutputError(f"{output} is a folder: give -o the name of a file in it")
    if output.exists() and not force:
        raise OutputError(f"{output} exists already and is not overwritten: give another -o, or --force")
    if not output.parent.is_dir():
        raise OutputError(f"cannot write {output}, there is no folder {output.parent}: make it, or give another -o")


def hand_over(record: Record, sentence: str, output: Path | None, as_json: bool) -> None:
    """Write the output, if any, and print: the record, the path of the output, or the tables.

    Args:
        record: the answer.
        sentence: the answer for a person who is shown a path only; "" for nothing.
        output: a file that `check_output` has let pass.
        as_json: print the record.
    """
    from plimsoll.cli.output import show
    from plimsoll.records.base import write_atomically
    from plimsoll.report.render import render

    if output is not None:
        text = render(record, _FORMATS[output.suffix.lower()])
        write_atomically(output, text.rstrip("\n").encode() + b"\n", "-o/--output")
    if as_json or output is None:
        show_record(record, as_json)
        return
    if sentence:
        print(sentence, file=sys.stderr)
    show(str(output))


def show_record(record: Record, as_json: bool) -> None:
    """Print a record, as JSON or as tables."""
    from plimsoll.cli.output import show
    from plimsoll.report.render import render

    show(render(record, "json" if as_json else "text"))
