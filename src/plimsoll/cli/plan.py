"""``plimsoll plan``: the fastest way to train or to apply a model that stays inside a budget, before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli.options import AsJson, Changes, Force, Quiet, Timings

_IMPOSSIBLE = 1


# long: one call with one line for each option
def plan(  # noqa: PLR0917 -- typer calls it by name
    input_path: Annotated[
        Path,
        typer.Argument(
            metavar="JOB_OR_MODEL", help="The job file. With --inference: a model folder, a run directory, or a job."
        ),
    ],
    budget: Annotated[
        str | None, typer.Option(help="Memory it may use, e.g. 6GiB. Default: the job's, or what there is.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where it is to run: local, cpu, cuda, or a device by name, e.g. rtx3060. Default: the job's."
        ),
    ] = None,
    changes: Changes = None,
    pins: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="CHOICE", help="Have this in the plan, e.g. micro_batch=4 or heap."),
    ] = None,
    forbids: Annotated[
        list[str] | None, typer.Option("--forbid", metavar="TECHNIQUE", help="Do not have this in the plan.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare fine-tuning strategies: full, with streamed weights, with adapters."),
    ] = False,
    train: Annotated[bool, typer.Option("--train", help="Plan the training, which is the default.")] = False,
    inference: Annotated[bool, typer.Option("--inference", help="Plan how the model is applied to texts.")] = False,
    task: Annotated[
        str | None,
        typer.Option(help="With --inference: score, classify, embed or generate. Default: what the model is for."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="With --inference: tokens of the longest text. Default: 256.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --inference: the most tokens that generate makes of each text.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --inference: stored, fp32, bf16 or fp16. Default: stored.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What measured runs have taught; by default what those of this machine have.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a page (.html) or the plan (.json) here.")
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(help="Print the plan as a configuration: deepspeed or accelerate; what it cannot say on stderr."),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to train, or to apply a model, that stays inside a budget; exit code 1 if there is none.

    \b
    Examples:
      plimsoll plan job.yaml --budget 6GiB
      plimsoll plan job.yaml --device rtx3060 -o plan.html
      plimsoll plan job.yaml --budget 6GiB --pin checkpointing=all --forbid activation_offload
      plimsoll plan job.yaml --budget 6GiB --set precision=auto
      plimsoll plan job.yaml --budget 6GiB -o plan.json
      plimsoll plan job.yaml --budget 6GiB --export deepspeed > deepspeed.json
      plimsoll plan job.yaml --budget 6GiB --compare
      plimsoll plan models/gpt --inference --task score --max-length 256 --budget 1GiB
      plimsoll plan models/gpt --inference --task generate --max-new-tokens 64 --device rtx3060
    """
    from plimsoll.cli.answer import answering, check_output, hand_over, limit_bytes_of
    from plimsoll.cli.output import note_unless
    from plimsoll.integrations.exports import export as exported_for
    from plimsoll.integrations.exports import require_exportable
    from plimsoll.planning.request import PlanRequest, plan_as_asked
    from plimsoll.records.plan import Plan
    from plimsoll.report.progress import spinner

    with answering("the planning", as_json):
        # Everything that can be refused is refused before the work.
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
            from plimsoll.training.baseline import load_training  # takes numpy along, after the first sign of life

            found, sentence = plan_as_asked(request, progress, note_unless(quiet or as_json), load_training)
        if isinstance(found, Plan) and export is not None:
            exported = exported_for(found, export)  # which can go into a file; beside it what is not in it
            typer.echo(exported.text, nl=False)
            for missing in exported.not_mapped:
                typer.echo(f"not in it: {missing}", err=True)
        else:
            hand_over(found, sentence, output, as_json)
    if not found.fits:
        sys.exit(_IMPOSSIBLE)
