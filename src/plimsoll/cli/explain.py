"""``plimsoll explain``: what used memory in a run that need not have, and what to type instead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, also of a run still going or killed.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Say what kept memory in a run, where, and what to change. Ends with 1 if something was found, else with 0.

    \b
    Examples:
      plimsoll explain runs/a
      plimsoll explain runs/a --json
    """
    from plimsoll.cli.answer import answering
    from plimsoll.cli.output import show
    from plimsoll.diagnose.explain import explain as diagnose
    from plimsoll.report.render import render

    with answering("the explanation", as_json):
        diagnosis = diagnose(run)
        show(render(diagnosis, "json" if as_json else "text"))
    if diagnosis.findings:
        raise typer.Exit(1)
