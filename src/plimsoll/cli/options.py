"""Options that several commands have, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
"""Every command that shows progress has it; ``--json`` shows none either."""

Changes = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job.")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where it is kept. Default: your cache folder.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output.")]
ForceAnew = Annotated[bool, typer.Option("--force", help="Begin again, and overwrite --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")]
AsJsonAlone = Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables; no progress.")]


def _begin_timings(is_wanted: bool) -> bool:
    if is_wanted:
        from plimsoll.files.temporary import own_prefix
        from plimsoll.processes.timings import begin

        begin(own_prefix())
    return is_wanted


Timings = Annotated[
    bool,
    typer.Option("--timings", callback=_begin_timings, help="Say at the end, on standard error, where the time went."),
]
"""Every command that takes long has it; what it asks for is done by `plimsoll.cli.main.main`."""
