"""``plimsoll plan``: the fastest way to train or to run inference inside a budget, planned before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Changes, Device, Forbids, Force, Output, Pins, Quiet, Timings

_IMPOSSIBLE = 1
_INFERENCE = "Inference (with --inference)"


# long: one line per option
def plan(  # noqa: PLR0917 -- typer calls it by name
    input_path: Annotated[
        Path,
        typer.Argument(
            metavar="JOB_OR_MODEL", help="Job file; with --inference also a run directory or a model folder."
        ),
    ],
    budget: Annotated[str | None, options.budget(options.OR_ALL_MEMORY)] = None,
    device: Device = None,
    calibration: Annotated[Path | None, options.calibration("this machine's")] = None,
    changes: Changes = None,
    pins: Pins = None,
    forbids: Forbids = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare full, streamed and adapter fine-tuning.", rich_help_panel=options.PLAN),
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Plan the training; this is the default.", rich_help_panel=options.PLAN)
    ] = False,
    inference: Annotated[
        bool, typer.Option("--inference", help="Plan how to run the model on texts.", rich_help_panel=_INFERENCE)
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help=options.TASK_HELP,
            show_default="the model's",
            rich_help_panel=_INFERENCE,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of the longest text.", show_default="256", rich_help_panel=_INFERENCE
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=options.NEW_TOKENS_HELP, rich_help_panel=_INFERENCE)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help=options.DTYPE_HELP, show_default="stored", rich_help_panel=_INFERENCE),
    ] = None,
    output: Output = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="Print a deepspeed or accelerate configuration.", rich_help_panel=options.OUTPUT
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest training or inference inside a budget.

    Exit code 1 if nothing fits.

    \b
    Examples:
      plimsoll plan job.yaml --budget 6GiB
      plimsoll plan job.yaml --device rtx3060 -o plan.html
      plimsoll plan job.yaml --budget 6GiB --pin checkpointing=all
      plimsoll plan job.yaml --budget 6GiB --compare
      plimsoll plan models/gpt --inference --task score --budget 1GiB
    """
    from plimsoll.cli.answer import answering, check_output, hand_over, limit_bytes_of
    from plimsoll.cli.output import note_unless
    from plimsoll.integrations.exports import export as exported_for
    from plimsoll.integrations.exports import require_exportable
    from plimsoll.planning.request import PlanRequest, plan_as_asked
    from plimsoll.records.plan import Plan
    from plimsoll.report.progress import spinner

    with answering("planning", as_json):
        # Check all arguments before the slow part.
        request = PlanRequest(
            input_path=input_path,
            device=device,
            limit_bytes=limit_bytes_of(budget),
            changes=tuple(changes or ()),
            pins=tuple(pins or ()),
            forbids=tuple(forbids or ()),
            compare=compare,
            calibration=calibration,
            train=train,
            inference=inference,
            task=task,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
        )
        request.check()
        check_output(output, force)
        if export is not None:
            require_exportable(export, inference or compare or as_json or output is not None)
        with spinner(quiet or as_json) as progress:
            from plimsoll.training.baseline import load_training  # imports numpy, so only after the spinner has started

            found, sentence = plan_as_asked(request, progress, note_unless(quiet or as_json), load_training)
        if isinstance(found, Plan) and export is not None:
            exported = exported_for(found, export)
            typer.echo(exported.text, nl=False)
            for missing in exported.not_mapped:
                typer.echo(f"not exported: {missing}", err=True)
        else:
            hand_over(found, sentence, output, as_json)
    if not found.fits:
        sys.exit(_IMPOSSIBLE)
