"""``plimsoll plan``: the fastest way to train or to apply a model that stays inside a budget, before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from plimsoll.cli.options import Quiet, Timings
from plimsoll.errors import InputError

if TYPE_CHECKING:
    from plimsoll.planning.kept_answers import Progress
    from plimsoll.records.apply import Dtype
    from plimsoll.records.job import Job
    from plimsoll.records.placement import InferencePlan
    from plimsoll.records.plan import Pin, Plan
    from plimsoll.records.strategies import Strategies

_IMPOSSIBLE = 1
_USUAL_TOKENS = 256


# long: one call with one line for each option
def plan(  # noqa: PLR0917 -- typer calls it by name
    subject: Annotated[
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")] = False,
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
    from plimsoll.report.progress import spinner

    with answering("the planning", as_json):
        # Everything that can be refused is refused before the work.
        of_training = _given(
            {"set": changes, "pin": pins, "forbid": forbids, "compare": compare, "calibration": calibration}
        )
        of_inference = _given(
            {"task": task, "max-length": max_length, "max-new-tokens": max_new_tokens, "dtype": dtype}
        )
        _check_kind(subject, (train, inference), of_training, of_inference)
        limit_bytes = limit_bytes_of(budget)
        check_output(output, force)
        _check_export(export, inference or compare or as_json or output is not None)
        found: InferencePlan | Plan | Strategies
        with spinner(quiet or as_json) as progress:
            where = (device, limit_bytes)
            if inference:
                tokens = (max_length or _USUAL_TOKENS, max_new_tokens or 0)
                found, sentence = _plan_inference(subject, task, tokens, dtype, where, progress)
            else:
                from plimsoll.planning.job_checks import require_sound
                from plimsoll.records.job import Job

                job, constraints = Job.from_yaml(subject, tuple(changes or ())), _constraints(pins or (), forbids or ())
                require_sound(job, device, limit_bytes, *constraints)
                make = _compare if compare else _plan_training
                found, sentence = make(job, constraints, calibration, where, progress, quiet=quiet or as_json)
        if export is not None:
            _print_export(cast("Plan", found), export)
        else:
            hand_over(found, sentence, output, as_json)
    if not found.fits:
        sys.exit(_IMPOSSIBLE)


def _check_export(reader: str | None, has_other_output: bool) -> None:
    from plimsoll.integrations.exports import EXPORTS

    if reader is None:
        return
    if reader not in EXPORTS:
        raise InputError(f"--export {reader} is no configuration known here: give one of {', '.join(EXPORTS)}")
    if has_other_output:
        raise InputError(
            f"--export {reader} prints one configuration of a plan of a training: leave out --inference, --compare, "
            "--json and -o"
        )


def _print_export(found: Plan, reader: str) -> None:
    """Print the configuration, which can go into a file, and beside it what is not in it."""
    from plimsoll.integrations.exports import export

    exported = export(found, reader)
    typer.echo(exported.text, nl=False)
    for sentence in exported.not_mapped:
        typer.echo(f"not in it: {sentence}", err=True)


def _given(options: dict[str, object]) -> list[str]:
    return [f"--{name}" for name, value in options.items() if value]


def _check_kind(subject: Path, kinds: tuple[bool, bool], of_training: list[str], of_inference: list[str]) -> None:
    is_training, is_inference = kinds
    if is_training and is_inference:
        raise InputError(
            f"--train and --inference were given both, and a plan of {subject} is for one of them: leave one out"
        )
    wrong, other = (of_training, "--train") if is_inference else (of_inference, "--inference")
    if wrong:
        raise InputError(f"{', '.join(wrong)} belongs to a plan with {other}: leave it out, or give {other}")


def _plan_training(
    job: Job, constraints: tuple[tuple[Pin, ...], tuple[str, ...]], calibration: Path | None,
    where: tuple[str | None, int | None], progress: Progress, *, quiet: bool,
) -> tuple[Plan, str]:  # fmt: skip
    from plimsoll.planning.lean_imports import leave_out_unused
    from plimsoll.records.comparison import Calibration
    from plimsoll.report.plan_sheets import headline

    learned = None if calibration is None else Calibration.load(calibration)
    leave_out_unused(job)
    from plimsoll.planning.calibration import known_calibration
    from plimsoll.planning.kept_answers import KEPT_SENTENCE, plan_of

    (pins, forbids), (device, limit_bytes) = constraints, where
    found, is_kept = plan_of(
        job,
        device=device,
        limit_bytes=limit_bytes,
        pins=pins,
        forbids=forbids,
        calibration=learned or known_calibration(),
        progress=progress,
    )
    if is_kept and not quiet:
        typer.echo(KEPT_SENTENCE, err=True)
    return found, headline(found)


def _compare(
    job: Job, constraints: tuple[tuple[Pin, ...], tuple[str, ...]], calibration: Path | None,
    where: tuple[str | None, int | None], progress: Progress, *, quiet: bool,
) -> tuple[Strategies, str]:  # fmt: skip
    from plimsoll.records.comparison import Calibration
    from plimsoll.report.strategy_sheets import done_line, headline

    (pins, forbids), (device, limit_bytes) = constraints, where
    if pins or forbids:
        given = ", ".join([*map(str, pins), *forbids])
        raise InputError(f"--compare plans each way with pins of its own, not with {given}: leave one of them out")
    learned = None if calibration is None else Calibration.load(calibration)
    from plimsoll.planning.baseline import baseline_for

    with baseline_for(job, device) as started:
        from plimsoll.planning.calibration import known_calibration
        from plimsoll.planning.strategies import compare_strategies

        found = compare_strategies(
            job,
            device=device,
            limit_bytes=limit_bytes,
            calibration=learned or known_calibration(),
            progress=progress,
            on_strategy=lambda strategy: None if quiet else typer.echo(done_line(strategy), err=True),
            started=started,
        )
    return found, headline(found)


def _plan_inference(  # noqa: PLR0917 -- called once
    subject: Path, task: str | None, tokens: tuple[int, int], dtype: str | None, where: tuple[str | None, int | None],
    progress: Progress,
) -> tuple[InferencePlan, str]:  # fmt: skip
    from plimsoll.inference.model import DTYPES
    from plimsoll.report.placement_sheets import headline

    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} is none that weights can have here: give one of {', '.join(DTYPES)}")
    folder = _model_folder(subject)
    from plimsoll.models.inference import default_task
    from plimsoll.planning.plan_inference import plan_inference

    (longest_tokens, new_tokens), (device, limit_bytes) = tokens, where
    found = plan_inference(
        folder,
        task or default_task(folder),
        longest_tokens=longest_tokens,
        new_tokens=new_tokens,
        limit_bytes=limit_bytes,
        device=device,
        dtype=DTYPES[cast("Dtype", dtype or "stored")],
        progress=progress,
    )
    return found, headline(found)


def _model_folder(subject: Path) -> Path:
    """The folder of the weights: itself, that of a run directory, or the one that a job trains."""
    from plimsoll.inference.model import model_folder
    from plimsoll.records.job import Job

    if not subject.is_file():
        return model_folder(subject).path
    model = Job.from_yaml(subject).model
    if isinstance(model, str) and Path(model).is_dir():
        return Path(model)
    raise InputError(
        f"the job {subject} trains new weights ({model!r}), which cannot be applied yet: train it, and give the run "
        "directory"
    )


def _constraints(
    pins: list[str] | tuple[()], forbids: list[str] | tuple[()]
) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    from plimsoll.records.plan import check_pins, parse_pin

    try:
        pinned = tuple(parse_pin(text) for text in pins)
    except InputError as error:
        raise InputError(f"--pin: {error}") from None
    check_pins(pinned, forbids)
    return pinned, tuple(forbids)
