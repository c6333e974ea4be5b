"""What `plimsoll plan` is asked for, and its answer: a plan of a training, a comparison, or a plan of applying a model.

    request = PlanRequest(input_path=Path("job.yaml"), limit_bytes=6 << 30)
    found, sentence = plan_as_asked(request, progress, say, load_training)

What takes long to import is imported in the functions: a command shows a sign of life before.
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
    """What a plan is asked for.

    Args:
        input_path: a job file; with ``inference`` also a model folder or a run directory.
        device: where it is to run; ``None``: the job's.
        limit_bytes: that it may use; ``None``: the job's budget, or what there is.
        changes: ``a.b=c`` of fields of the job.
        pins: choices that the plan must have, as `plimsoll.records.plan.parse_pin` reads them.
        forbids: techniques that it must not have.
        compare: compare the strategies of training instead.
        calibration: a record made from measured runs; ``None``: the one of this machine.
        train: a plan of the training is asked for by name.
        inference: a plan of applying the model is asked for.
        task: of the model; ``None``: what it is for.
        max_length: tokens of the longest text; ``None``: 256.
        max_new_tokens: that ``generate`` makes of each text.
        dtype: of the weights; ``None``: as they are stored.
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
        """Refuse options that are not for one kind of plan.

        Raises:
            InputError: it names them.
        """
        if self.train and self.inference:
            raise InputError(
                f"--train and --inference were given both, and a plan of {self.input_path} is for one of them: leave "
                "one out"
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
        """The pins, read.

        Raises:
            InputError: if one cannot be read, or they contradict each other or what is forbidden.
        """
        try:
            pins = tuple(map(parse_pin, self.pins))
        except InputError as error:
            raise InputError(f"--pin: {error}") from None
        check_pins(pins, self.forbids)
        return pins

    def known(self) -> Calibration:
        """Return what was learned from measured runs.

        Raises:
            RecordError: if a file is given that has no such record.
        """
        from plimsoll.planning.calibration import known_calibration
        from plimsoll.records.comparison import Calibration

        return known_calibration() if self.calibration is None else Calibration.load(self.calibration)


def plan_as_asked(
    request: PlanRequest, progress: Say, say: Say, load_training: LoadTraining
) -> tuple[Plan | Strategies | InferencePlan, str]:
    """Make the plan that is asked for, and a sentence that sums it up.

    Args:
        request: what is asked for, checked.
        progress: told what is being done.
        say: told what a person should know, a sentence each.
        load_training: see `plimsoll.planning.baseline.baseline_for`.

    Raises:
        InputError: if the job, the model or what is asked of the plan cannot be used.
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
        raise InputError(f"--compare plans each way with pins of its own, not with {given}: leave one of them out")
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
    """The folder of the weights: itself, that of a run directory, or the one that a job trains."""
    from plimsoll.inference.model import model_folder

    if not input_path.is_file():
        return model_folder(input_path).path
    model = Job.from_yaml(input_path).model
    if isinstance(model, str) and Path(model).is_dir():
        return Path(model)
    raise InputError(
        f"the job {input_path} trains new weights ({model!r}), which cannot be applied yet: train it, and give the run "
        "directory"
    )
