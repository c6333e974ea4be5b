"""``plimsoll cache``: what is kept between commands, how much it is, and its removal."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="What is kept between commands: answers, measured speeds, prepared data. List it, or clear it.")

_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON record instead of a table.")]


@app.callback(invoke_without_command=True)
def of_cache(context: typer.Context) -> None:
    """List what the cache folder holds where no command is given."""
    if context.invoked_subcommand is None:
        list_contents()


@app.command("list")
def list_contents(as_json: _AsJson = False) -> None:
    """Show what the cache folder holds: of each kind how many files, their size, and when they were last used.

    \b
    Examples:
      plimsoll cache
      plimsoll cache list --json
    """
    from plimsoll.cli.answer import answering, hand_over
    from plimsoll.files.cached_answers import contents

    with answering("the listing", as_json):
        hand_over(contents(), "", None, as_json)


@app.command("clear")
def clear(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="KIND...", help="Of `plimsoll cache list`. Default: see above.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Remove what is kept: the kinds that are named, or all answers and measured speeds.

    Prepared data, word vectors and what runs have taught (calibration) are removed only if they are named: make sure
    that no training reads them.

    \b
    Examples:
      plimsoll cache clear
      plimsoll cache clear plans predictions
      plimsoll cache clear data embeddings
    """
    from plimsoll.cli.answer import answering, hand_over
    from plimsoll.errors import InputError
    from plimsoll.files.cached_answers import clear, contents

    with answering("the clearing", as_json):
        known = [one.name for one in contents().kinds]
        for kind in kinds or ():
            if kind not in known:
                raise InputError(f"the cache has no kind {kind!r}: give one of {', '.join(known)}")
        hand_over(clear(tuple(kinds or ())), "", None, as_json)
