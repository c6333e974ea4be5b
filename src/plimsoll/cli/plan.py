"""``plimsoll plan``: the fastest mix of techniques that stays inside a budget, before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.errors import InputError

if TYPE_CHECKING:
    from plimsoll.records.comparison import Calibration
    from plimsoll.records.job import Job
    from plimsoll.records.plan import Pin

_IMPOSSIBLE = 1


# long: one call with one line for each option
def plan(  # noqa: PLR0917 -- typer calls it by name
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    budget: Annotated[
        str | None, typer.Option(help="Memory the training may use, e.g. 6GiB. Default: the job's, or what there is.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where it is to train: local, cpu, cuda, or a device by name, e.g. rtx3060. Default: the job's."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job.")
    ] = None,
    pins: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="CHOICE", help="Have this in the plan, e.g. micro_batch=4 or heap."),
    ] = None,
    forbids: Annotated[
        list[str] | None, typer.Option("--forbid", metavar="TECHNIQUE", help="Do not have this in the plan.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare the ways to train: all of it, with streamed weights, with adapters."),
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="What measured runs have taught; by default what those of this machine have.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a page (.html) or the plan (.json) here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Find the fastest way to train that stays inside a budget; exit code 1 if there is none.

    \b
    Examples:
      plimsoll plan job.yaml --budget 6GiB
      plimsoll plan job.yaml --device rtx3060 -o plan.html
      plimsoll plan job.yaml --budget 6GiB --pin checkpointing=all --forbid activation_offload
      plimsoll plan job.yaml --budget 6GiB --set precision=auto
      plimsoll plan job.yaml --budget 6GiB -o plan.json
      plimsoll plan job.yaml --budget 6GiB --compare
    """
    from plimsoll.cli.answer import answering, check_output, limit_bytes_of
    from plimsoll.records.comparison import Calibration
    from plimsoll.records.job import Job

    with answering("the planning", as_json):
        # Everything that can be refused is refused before the work.
        job = Job.from_yaml(job_file, tuple(changes or ()))
        limit_bytes = limit_bytes_of(budget)
        pinned, forbidden = _wishes(pins or (), forbids or ())
        if compare and (pinned or forbidden):
            given = ", ".join([*map(str, pinned), *forbidden])
            raise InputError(f"--compare plans each way with pins of its own, not with {given}: leave one of them out")
        check_output(output, force)
        learned = None if calibration is None else Calibration.load(calibration)
        if compare:
            fits = _compare(job, device, limit_bytes, learned, output, as_json)
        else:
            fits = _plan(job, device, limit_bytes, pinned, forbidden, learned, output, as_json)
    if not fits:
        sys.exit(_IMPOSSIBLE)


def _plan(  # noqa: PLR0917 -- called once
    job: Job, device: str | None, limit_bytes: int | None, pins: tuple[Pin, ...], forbids: tuple[str, ...],
    learned: Calibration | None, output: Path | None, as_json: bool,
) -> bool:  # fmt: skip
    from plimsoll.cli.answer import hand_over
    from plimsoll.report.plan_sheets import headline
    from plimsoll.report.progress import spinner
    from plimsoll.run.learning import known_calibration
    from plimsoll.run.plan import plan_job

    with spinner(quiet=as_json) as progress:
        found = plan_job(
            job,
            device=device,
            limit_bytes=limit_bytes,
            pins=pins,
            forbids=forbids,
            calibration=learned or known_calibration(),
            progress=progress,
        )
    hand_over(found, headline(found), output, as_json)
    return found.fits


def _compare(  # noqa: PLR0917 -- called once
    job: Job, device: str | None, limit_bytes: int | None, learned: Calibration | None, output: Path | None,
    as_json: bool,
) -> bool:  # fmt: skip
    from plimsoll.cli.answer import hand_over
    from plimsoll.report.progress import spinner
    from plimsoll.report.ways_sheets import headline
    from plimsoll.run.learning import known_calibration
    from plimsoll.run.ways import compare_ways

    with spinner(quiet=as_json) as progress:
        found = compare_ways(
            job, device=device, limit_bytes=limit_bytes, calibration=learned or known_calibration(), progress=progress
        )
    hand_over(found, headline(found), output, as_json)
    return found.fits


def _wishes(pins: list[str] | tuple[()], forbids: list[str] | tuple[()]) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    from plimsoll.records.plan import check_pins, parse_pin

    try:
        pinned = tuple(parse_pin(text) for text in pins)
    except InputError as error:
        raise InputError(f"--pin: {error}") from None
    check_pins(pinned, forbids)
    return pinned, tuple(forbids)
