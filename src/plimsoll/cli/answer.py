"""Helpers for commands that return one record: read the budget, check the output, and print or write the record.

Commands check all arguments before they compute the record, which takes seconds to minutes.
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
    """Turn Ctrl-C in the block into an `Interrupted` error. With ``as_json``, print all errors of the block as JSON.

    Args:
        what: a noun for the computation in the message after Ctrl-C, such as "planning".
        as_json: print errors as JSON.

    Raises:
        Interrupted: after Ctrl-C.
    """
    from plimsoll.cli.output import failures_shown
    from plimsoll.errors import Interrupted

    with failures_shown() if as_json else nullcontext():
        try:
            yield
        except KeyboardInterrupt:
            message = f"{what} was stopped before it had a result: run the same command again"
            raise Interrupted(message, signal.SIGINT) from None


def limit_bytes_of(budget: str | None) -> int | None:
    """Return ``--budget`` in bytes; ``None`` if the option is not given.

    Raises:
        BudgetError: if the text is not a size, or if a number below 1 MiB has no unit.
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
        raise BudgetError(f"--budget: {budget.strip()} means {budget.strip()} bytes: write a unit, for example 2GiB")
    return num_bytes


def check_output(output: Path | None, force: bool) -> None:
    """Check that ``--output`` can be written.

    Raises:
        OutputError: if the suffix is unknown, the folder is missing, or the file exists and ``force`` is false.
    """
    from plimsoll.errors import OutputError

    if output is None:
        return
    if output.suffix.lower() not in _FORMATS:
        raise OutputError(f"cannot write {output}: its suffix is not .html or .json: give -o a name with one of them")
    if output.is_dir():
        raise OutputError(f"{output} is a folder: give -o the name of a file in it")
    if output.exists() and not force:
        raise OutputError(f"{output} exists already and is not overwritten: give another -o, or --force")
    if not output.parent.is_dir():
        raise OutputError(
            f"cannot write {output}: the folder {output.parent} does not exist; create it, or give another -o"
        )


def hand_over(record: Record, sentence: str, output: Path | None, as_json: bool) -> None:
    """Write the record to ``output``, if given, and print the result.

    With ``as_json``, the record is printed as JSON. Otherwise, the path ``output`` is printed or, without it, tables.

    Args:
        record: the result.
        sentence: a summary, printed to standard error if the path of the output is printed; may be "".
        output: a file that `check_output` accepted.
        as_json: print the record as JSON.
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
