"""``plimsoll predict``: the predicted peak memory of a training run, and the largest batch and sequence that fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Changes, Device, Force, Output, Quiet, Timings

_DOES_NOT_FIT = 1
_GROUP = "Prediction"


# long: one line per option
def predict(  # noqa: PLR0917 -- typer calls it by name
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")],
    budget: Annotated[str | None, options.budget(options.OR_ALL_MEMORY)] = None,
    device: Device = None,
    calibration: Annotated[Path | None, options.calibration("none")] = None,
    changes: Changes = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Samples per forward and backward pass.",
            show_default="the whole batch",
            rich_help_panel=_GROUP,
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Find the largest micro-batch, sequence and smallest GPU.",
            rich_help_panel=_GROUP,
        ),
    ] = False,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", help="Predict other micro-batches and lengths too.", rich_help_panel=_GROUP),
    ] = False,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the token count of each text, one per line.", rich_help_panel=_GROUP
        ),
    ] = None,
    output: Output = None,
    force: Force = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJson = False,
) -> None:
    """Predict the peak memory of a training without running it.

    Exit code 1 if it does not fit.

    \b
    Examples:
      plimsoll predict job.yaml --device rtx3060
      plimsoll predict job.yaml --device rtx3060 --search
      plimsoll predict job.yaml --budget 8GiB --micro-batch 4
      plimsoll predict job.yaml --set sequence_length=1024 --json
      plimsoll predict job.yaml --what-if -o prediction.html
    """
    from plimsoll.cli.answer import answering, check_output, hand_over, limit_bytes_of
    from plimsoll.report.progress import spinner

    with answering("predicting", as_json):
        with spinner(quiet=quiet or as_json) as progress:
            from plimsoll.planning.job_checks import require_micro_batch, require_sound
            from plimsoll.planning.lean_imports import leave_out_unused
            from plimsoll.records.comparison import Calibration
            from plimsoll.records.job import Job

            # Check all arguments before the slow part.
            job = Job.from_yaml(job_file, tuple(changes or ()))
            limit_bytes = limit_bytes_of(budget)
            require_micro_batch(micro_batch, job)
            check_output(output, force)
            num_tokens = _read_lengths(lengths)
            learned = None if calibration is None else Calibration.load(calibration)
            require_sound(job, device, limit_bytes)
            leave_out_unused(job)
            from plimsoll.planning.cached_answers import KEPT_SENTENCE, prediction_of
            from plimsoll.training.baseline import load_training

            prediction, is_kept = prediction_of(
                job,
                device=device,
                limit_bytes=limit_bytes,
                micro_batch=micro_batch,
                search=search,
                what_if=what_if,
                lengths=num_tokens,
                calibration=learned,
                progress=progress,
                load_training=load_training,
            )
        if is_kept and not quiet:
            typer.echo(KEPT_SENTENCE, err=True)
        from plimsoll.report.prediction_sheets import verdict_sentence

        hand_over(prediction, verdict_sentence(prediction), output, as_json)
    if not prediction.fits:
        sys.exit(_DOES_NOT_FIT)


def _read_lengths(path: Path | None) -> list[int] | None:
    from plimsoll.errors import InputError

    if path is None:
        return None
    try:
        return [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read lengths from {path} ({error}): give a file with one whole number per line"
        ) from None
