"""``plimsoll shrink``: the best smaller model under a target size, or measurements of every method."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Changes, NoHeader, Quiet, Restart, Timings

_SEARCH = "Search"
_RECOVERY = "Training afterwards (with --recover)"


# long: one line per option
def shrink(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Run directory, job file or, with --data, a model folder."),
    ],
    *,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Largest size of the weight files, e.g. 200MiB.",
            show_default="none: only measure",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="CHOICE",
            help="Apply exactly this method, e.g. int8; repeat for several.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    forbids: Annotated[
        list[str] | None,
        typer.Option("--forbid", metavar="METHOD", help="Exclude a method; repeatable.", rich_help_panel=_SEARCH),
    ] = None,
    tries: Annotated[
        int,
        typer.Option(metavar="N", help="With --target: number of models to try.", rich_help_panel=_SEARCH),
    ] = 4,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Texts (language model: windows) to evaluate on.",
            show_default="all",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    keep_all: Annotated[
        bool,
        typer.Option("--keep-all", help="Keep all models, for another --target.", rich_help_panel=_SEARCH),
    ] = False,
    recover: Annotated[
        int,
        typer.Option(
            metavar="STEPS", help="Retrain each model whose weight shapes changed.", rich_help_panel=_RECOVERY
        ),
    ] = 0,
    no_distill: Annotated[
        bool,
        typer.Option("--no-distill", help="Learn only from labels, not from the original.", rich_help_panel=_RECOVERY),
    ] = False,
    budget: Annotated[str | None, options.budget("the job's", _RECOVERY)] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With a model folder: texts (jsonl, csv, ...).",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="NAME", help="With --data: text column; repeatable.", rich_help_panel=options.DATA
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --data: label column of a classifier.", rich_help_panel=options.DATA),
    ] = None,
    no_header: NoHeader = False,
    changes: Changes = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder for the model and shrink.json.", rich_help_panel=options.OUTPUT
        ),
    ],
    force: Restart = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJson = False,
) -> None:
    """Make a model smaller, and measure its size, speed and quality.

    Without --target and --method, every method is measured and no model is
    kept. To continue after an interruption, run the same command again.

    \b
    Examples:
      plimsoll shrink runs/a --target 5MiB --recover 200 --out small
      plimsoll shrink runs/a --out survey
      plimsoll shrink runs/a --method int8 --out small
      plimsoll shrink all-MiniLM-L6-v2 --data texts.csv --out small
    """
    from plimsoll.cli.answer import limit_bytes_of, show_record
    from plimsoll.cli.output import failures_shown, note_unless, show, told, told_by
    from plimsoll.compression.options import require_consistent, target_bytes_of
    from plimsoll.errors import Interrupted
    from plimsoll.records.plan import parse_pin
    from plimsoll.records.shrink import chain_of
    from plimsoll.report.progress import spinner, stages

    with failures_shown() if as_json else nullcontext():
        require_consistent(target, methods, forbids, recover, budget, tries, samples)
        with spinner(quiet or as_json):
            from plimsoll.compression.folder import found_until_now
            from plimsoll.compression.request import ShrinkOptions, find_source
            from plimsoll.compression.search import RefusedError
            from plimsoll.compression.search import shrink as make_smaller

            chosen = ShrinkOptions(
                target_bytes=target_bytes_of(target),
                budget_bytes=limit_bytes_of(budget),
                methods=chain_of([parse_pin(method) for method in methods or ()]),
                forbids=tuple(forbids or ()),
                recover_steps=recover,
                distills=not no_distill,
                most_tries=tries,
                most_samples=samples,
            )
            source = find_source(
                model,
                data,
                tuple(columns) if columns else None,
                label,
                False if no_header else None,
                tuple(changes or ()),
            )
        with told() as file:
            try:
                with stages(quiet or as_json) as progress:
                    record = make_smaller(
                        source,
                        out,
                        chosen,
                        force=force,
                        keep_all=keep_all,
                        quiet=quiet or as_json,
                        progress=progress,
                        say=note_unless(quiet or as_json),
                    )
            except RefusedError as refused:
                if as_json:
                    show(told_by(file, refused.exit_code))
                sys.exit(refused.exit_code)
            except KeyboardInterrupt:
                if (found := found_until_now(out)) is not None and not as_json:  # JSON has only the failure
                    show_record(found, as_json)
                message = f"stopped: the results so far for {out} are kept; run the same command again to continue"
                raise Interrupted(message, signal.SIGINT) from None
    show_record(record, as_json)
