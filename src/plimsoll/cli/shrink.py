"""``plimsoll shrink``: the best smaller model under a size, or what every way to make one costs."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli.options import AsJsonAlone, Changes, ForceAnew, Quiet, Timings


# long: one call with one line for each option
def shrink(  # noqa: PLR0917 -- typer calls it by name
    model: Annotated[
        Path, typer.Argument(help="A run directory, a job file whose model is a folder, or with --data a model folder.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the smaller model, and shrink.json.")],
    target: Annotated[
        str | None,
        typer.Option(help="The most its files of weights may have, e.g. 200MiB. Default: try all, choose none."),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", metavar="CHOICE", help="Use exactly these, in order: 'heads(share=0.5)', int8."),
    ] = None,
    forbids: Annotated[
        list[str] | None, typer.Option("--forbid", metavar="METHOD", help="Do not use this one.")
    ] = None,
    recover: Annotated[int, typer.Option(help="Steps of training behind what changed shapes.")] = 0,
    no_distill: Annotated[
        bool, typer.Option("--no-distill", help="With --recover: learn from the labels alone, not from the original.")
    ] = False,
    budget: Annotated[str | None, typer.Option(help="With --recover: memory a training may use, e.g. 2GiB.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="With a model folder: its texts, jsonl, csv, parquet or text.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="With --data: the column with the text; may be repeated.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="With --data and a classifier: the column of the labels.")] = None,
    no_header: Annotated[
        bool, typer.Option("--no-header", help="The first row of the csv is a row; its columns are 1, 2, ...")
    ] = False,
    changes: Changes = None,
    tries: Annotated[int, typer.Option(help="With --target: chains of methods that are made and measured.")] = 4,
    samples: Annotated[
        int | None, typer.Option(help="Evaluation texts, or windows of a language model. Default: all.")
    ] = None,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Keep every model in OUT/.shrink, for another --target.")
    ] = False,
    force: ForceAnew = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJsonAlone = False,
) -> None:
    """Make a model smaller, and say what each way saves and costs; when it was stopped, the same command goes on.

    \b
    Examples:
      plimsoll shrink runs/a --target 5MiB --recover 200 --out small
      plimsoll shrink runs/a --out survey
      plimsoll shrink runs/a --method 'layers(keep=3)' --method int8 --recover 100 --out small
      plimsoll shrink all-MiniLM-L6-v2 --data texts.csv --column body --method vocabulary --out small
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

            options = ShrinkOptions(
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
                        options,
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
                if (found := found_until_now(out)) is not None and not as_json:  # where it is the failure alone
                    show_record(found, as_json)
                message = f"stopped: what was tried for {out} is kept; give the same command again to go on"
                raise Interrupted(message, signal.SIGINT) from None
    show_record(record, as_json)
