"""``plimsoll cache``: files cached between commands, their sizes, and their removal."""

from __future__ import annotations

from typing import Annotated

import typer

from plimsoll.cli.options import AsJson, Command

app = typer.Typer(help="List or clear cached answers, measured speeds and data.")


@app.callback(invoke_without_command=True)
def of_cache(context: typer.Context) -> None:
    """List the cache if no subcommand is given."""
    if context.invoked_subcommand is None:
        list_contents()


@app.command("list", cls=Command)
def list_contents(as_json: AsJson = False) -> None:
    """List the number, size and last use of cached files, by kind.

    \b
    Examples:
      plimsoll cache
      plimsoll cache list --json
    """
    from plimsoll.cli.answer import answering, hand_over
    from plimsoll.files.cached_answers import contents

    with answering("listing the cache", as_json):
        hand_over(contents(), "", None, as_json)


@app.command("clear", cls=Command)
def clear(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="KIND", help="Kinds to delete.", show_default="answers and speeds"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete cached files.

    Calibration, data and embeddings are deleted only if you name them. Make
    sure that no training run is using them.

    \b
    Examples:
      plimsoll cache clear
      plimsoll cache clear plans predictions
      plimsoll cache clear data embeddings
    """
    from plimsoll.cli.answer import answering, hand_over
    from plimsoll.errors import InputError
    from plimsoll.files.cached_answers import clear, contents

    with answering("clearing the cache", as_json):
        known = [one.name for one in contents().kinds]
        for kind in kinds or ():
            if kind not in known:
                raise InputError(f"the cache has no kind {kind!r}: give one of {', '.join(known)}")
        hand_over(clear(tuple(kinds or ())), "", None, as_json)
