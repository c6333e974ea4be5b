"""The request of `plimsoll plan` and its answer: a training plan, a comparison of strategies, or an inference plan.

    request = PlanRequest(input_path=Path("job.yaml"), limit_bytes=6 << 30)
    found, sentence = plan_as_asked(request, progress, print, load_training)

Slow imports are inside the functions, so that a command can show progress before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from plimsoll.errors import InputError
from plimsoll.records.job import Job
from plimsoll.records.plan import Pin, Plan, check_pins, parse_pin

if TYPE_CHECKING:
    from plimsoll.planning.baseline import LoadTraining
    from plimsoll.records.apply import Dtype
    from plimsoll.records.comparison import Calibration
    from plimsoll.records.placement import InferencePlan
    from plimsoll.records.strategies import Strategies

Say = Callable[[str], None]

_USUAL_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of `plimsoll plan`.

    Args:
        input_path: a job file; with ``inference`` also a model folder or a run directory.
        device: device to plan for; ``None`` uses the job's device.
        limit_bytes: budget in bytes; ``None`` uses the job's budget, or the whole device.
        changes: overrides of job fields, such as ``a.b=c``.
        pins: choices that the plan must use, in the syntax of `plimsoll.records.plan.parse_pin`.
        forbids: names of techniques that the plan must not use.
        compare: whether to compare fine-tuning strategies instead.
        calibration: a file with a calibration record; ``None`` uses this machine's calibration.
        train: whether a training plan is requested explicitly.
        inference: whether an inference plan is requested.
        task: task of the model; ``None`` uses the task that the model was trained for.
        max_length: number of tokens in the longest text; ``None`` means 256.
        max_new_tokens: number of tokens that ``generate`` adds to each text.
        dtype: data type of the weights; ``None`` keeps the stored type.
    """

    input_path: Path
    device: str | None = None
    limit_bytes: int | None = None
    changes: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    compare: bool = False
    calibration: Path | None = None
    train: bool = False
    inference: bool = False
    task: str | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    dtype: str | None = None

    def check(self) -> None:
        """Check that all options belong to the same kind of plan.

        Raises:
            InputError: if they do not; the message names the options.
        """
        if self.train and self.inference:
            raise InputError(
                f"--train and --inference cannot be combined in a plan of {self.input_path}: leave one of them out"
            )
        of_training = {
            "set": self.changes, "pin": self.pins, "forbid": self.forbids, "compare": self.compare,
            "calibration": self.calibration,
        }  # fmt: skip
        of_inference = {
            "task": self.task, "max-length": self.max_length, "max-new-tokens": self.max_new_tokens,
            "dtype": self.dtype,
        }  # fmt: skip
        options, other = (of_training, "--train") if self.inference else (of_inference, "--inference")
        if wrong := [f"--{name}" for name, value in options.items() if value]:
            raise InputError(f"{', '.join(wrong)} belongs to a plan with {other}: leave it out, or give {other}")

    @cached_property
    def pinned(self) -> tuple[Pin, ...]:
        """The parsed pins.

        Raises:
            InputError: if a pin cannot be parsed, or pins contradict each other or a forbidden technique.
        """
        try:
            pins = tuple(map(parse_pin, self.pins))
        except InputError as error:
            raise InputError(f"--pin: {error}") from None
        check_pins(pins, self.forbids)
        return pins

    def known(self) -> Calibration:
        """Return the calibration to use.

        Raises:
            RecordError: if the given file has no calibration record.
        """
        from plimsoll.planning.calibration import known_calibration
        from plimsoll.records.comparison import Calibration

        return known_calibration() if self.calibration is None else Calibration.load(self.calibration)


def plan_as_asked(
    request: PlanRequest, progress: Say, say: Say, load_training: LoadTraining
) -> tuple[Plan | Strategies | InferencePlan, str]:
    """Return the requested plan, and a sentence that sums it up.

    Args:
        request: the checked request.
        progress: called with a message for each stage of the work.
        say: called with sentences for the user.
        load_training: see `plimsoll.planning.baseline.baseline_for`.

    Raises:
        InputError: if the job, the model or an option cannot be used.
        DeviceError: if there is no such device.
        BudgetError: if the device has less than the budget.
    """
    if request.inference:
        return _plan_inference(request, progress)
    from plimsoll.planning.job_checks import require_sound

    job = Job.from_yaml(request.input_path, request.changes)
    require_sound(job, request.device, request.limit_bytes, request.pinned, request.forbids)
    return (_compare if request.compare else _plan_training)(request, job, progress, say, load_training)


def _plan_training(
    request: PlanRequest, job: Job, progress: Say, say: Say, load_training: LoadTraining
) -> tuple[Plan, str]:
    from plimsoll.planning.lean_imports import leave_out_unused
    from plimsoll.report.plan_sheets import headline

    calibration = request.known()
    leave_out_unused(job)
    from plimsoll.planning.cached_answers import KEPT_SENTENCE, plan_of

    found, is_kept = plan_of(
        job,
        device=request.device,
        limit_bytes=request.limit_bytes,
        pins=request.pinned,
        forbids=request.forbids,
        calibration=calibration,
        progress=progress,
        load_training=load_training,
    )
    if is_kept:
        say(KEPT_SENTENCE)
    return found, headline(found)


def _compare(
    request: PlanRequest, job: Job, progress: Say, say: Say, load_training: LoadTraining
) -> tuple[Strategies, str]:
    from plimsoll.planning.baseline import baseline_for
    from plimsoll.report.strategy_sheets import done_line, headline

    if request.pins or request.forbids:
        given = ", ".join([*map(str, request.pinned), *request.forbids])
        raise InputError(f"--compare sets the pins of each strategy, and cannot use {given}: leave one of them out")
    calibration = request.known()
    with baseline_for(job, request.device, load_training) as started:
        from plimsoll.planning.strategies import compare_strategies

        found = compare_strategies(
            job,
            device=request.device,
            limit_bytes=request.limit_bytes,
            calibration=calibration,
            progress=progress,
            on_strategy=lambda strategy: say(done_line(strategy)),
            started=started,
        )
    return found, headline(found)


def _plan_inference(request: PlanRequest, progress: Say) -> tuple[InferencePlan, str]:
    from plimsoll.inference.model import DTYPES
    from plimsoll.report.placement_sheets import headline

    if request.dtype is not None and request.dtype not in DTYPES:
        raise InputError(f"--dtype {request.dtype} is not supported for weights: give one of {', '.join(DTYPES)}")
    folder = _model_folder(request.input_path)
    from plimsoll.models.inference import default_task
    from plimsoll.planning.plan_inference import plan_inference

    found = plan_inference(
        folder,
        request.task or default_task(folder),
        longest_tokens=request.max_length or _USUAL_TOKENS,
        new_tokens=request.max_new_tokens or 0,
        limit_bytes=request.limit_bytes,
        device=request.device,
        dtype=DTYPES[cast("Dtype", request.dtype or "stored")],
        progress=progress,
    )
    return found, headline(found)


def _model_folder(input_path: Path) -> Path:
    """Return the folder of the weights: the input itself, or the model folder of a run directory or job."""
    from plimsoll.inference.model import model_folder

    if not input_path.is_file():
        return model_folder(input_path).path
    model = Job.from_yaml(input_path).model
    if isinstance(model, str) and Path(model).is_dir():
        return Path(model)
    raise InputError(
        f"the job {input_path} trains new weights ({model!r}), which inference cannot use yet: train it, and give the "
        "run directory"
    )
