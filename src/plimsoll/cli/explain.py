"""``plimsoll explain``: what used memory, or why it ran out, and what to type instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plimsoll.records.diagnosis import Diagnosis

_STANDARD_INPUT = Path("-")
_LARGE_BYTES = 32 << 20  # read in about a second


def explain(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="[SOURCE]",
            help="A run directory, or a file with an error's text, a log or a memory snapshot; - reads a text.",
        ),
    ] = _STANDARD_INPUT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Say what kept memory in a run, or what an out-of-memory error says. Ends with 1 if it found one, else with 0.

    \b
    Examples:
      plimsoll explain runs/a
      plimsoll explain train.log
      plimsoll explain snapshot.pickle
      python train.py 2>&1 | plimsoll explain
      plimsoll explain runs/a --json
    """
    from plimsoll.cli.answer import answering
    from plimsoll.cli.output import show
    from plimsoll.report.render import render

    with answering("the explanation", as_json):
        diagnosis = _diagnosis(source, as_json)
        show(render(diagnosis, "json" if as_json else "text"))
    if diagnosis.has_answer:
        raise typer.Exit(1)


def _diagnosis(source: Path, quiet: bool) -> Diagnosis:
    from plimsoll.diagnose.explain import explain as diagnose
    from plimsoll.diagnose.of_text import diagnosis_of_text
    from plimsoll.diagnose.snapshot.read import is_snapshot
    from plimsoll.errors import InputError
    from plimsoll.report.progress import stages

    if source == _STANDARD_INPUT:
        if sys.stdin.isatty():
            raise InputError(f"{source} reads standard input, which is a terminal here: give a run directory or a file")
        return diagnosis_of_text(sys.stdin.buffer, "standard input")
    if source.is_file() and (num_bytes := source.stat().st_size) > _LARGE_BYTES and not is_snapshot(source):
        with stages(quiet) as report, source.open("rb") as file:
            return diagnosis_of_text(file, source.name, lambda done: report("reading", min(done, num_bytes), num_bytes))
    return diagnose(source)
