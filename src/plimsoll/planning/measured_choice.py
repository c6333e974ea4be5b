"""Trials of a plan: they time its candidates with real passes on the device, undo the passes, and keep the fastest.

    plan = try_plan(step, plan, batch)

Predicted step times have an error margin. The plans within this margin of the fastest (``plan.candidates``) are run
inside the memory limit on a real batch, if the target device is present. The batch is not consumed from the data
loader. When `try_plan` returns, the fastest plan is installed. Other candidates that need less memory become fallbacks.
A model with state that cannot be restored is not tried.

Does not cover several ranks, the time of data loading and evaluation, or memory that only later steps need.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plimsoll.data.batch import batch_size_of, pick_samples
from plimsoll.data.batches.loader import Loader
from plimsoll.errors import NonFiniteLossError, PlimsollError, TornStepError
from plimsoll.models.optimizers import is_separable
from plimsoll.planning.calibration import learn_from_trial
from plimsoll.planning.search.near_best import in_falling_order
from plimsoll.planning.search.reasons import told_of, untried
from plimsoll.planning.trial_copies import TrialCopies, copier_for, updated_by
from plimsoll.records.plan import MICRO_BATCH, Candidate, Configuration, Plan, Trial, Tried
from plimsoll.records.run import OomEvent
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.plan_sheets import trial_sentence
from plimsoll.report.progress import spinner
from plimsoll.step.fallbacks import ran_out_of
from plimsoll.step.micro_batches import Shape
from plimsoll.step.oom_boundary import attempt, attempt_twice, fitting, without_fail
from plimsoll.step.recovery import Size
from plimsoll.step.result import Outcome
from plimsoll.step.retry import scaler_as_now
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.scratch import Scratch
from plimsoll.step.update.undo import ChunkCopy, Learned, Memory, WholeCopy

_MOST_SECONDS = {"cpu": 10.0, "cuda": 5.0}
_MOST_STEPS = 2  # duration of a trial on a CPU, in steps of the plan, if that is longer
_LEAST_GAIN = 0.05  # share of a step: the median difference between plans of similar predicted speed, see docs/LOG.md
# Expected cost of one candidate: a maximum number of steps, and the seconds to find the state that its techniques
# change.
_STEPS_OF_A_TRIAL, _SECONDS_OF_A_TRIAL = 4, 0.5
_MOST_COPIED_BYTES = {"cpu": 2 << 30, "cuda": 8 << 30}  # copying and restoring this takes a second or two
_MOST_CHUNKS = 4  # in a timed part of a step, if the whole step is not timed
_MOST_REPEATS = 3
_SAME_SECONDS = 0.01  # share of a step: a smaller gain counts as no gain
_MOST_NOISE = 0.25  # upper bound for the differences between repeated passes, as a share of a step
_HOLDS_SHARE = 0.97  # of the limit: the measured peak of a plan that may exceed the limit in a long run must be below
_SHORT_OF_MEMORY = frozenset({"ran out", "struck", "too near"})

Progress = Callable[[str], None]


def _silent(_text: str) -> None:
    pass


def try_plan(
    step: TrainStep, plan: Plan, batch: Any, *, num_steps: int | None = None, progress: Progress = _silent
) -> Plan:
    """Time each candidate of a plan in a few passes, undo these passes, and continue with the fastest candidate.

        step = plimsoll.TrainStep(model, optimizer, units="next-tokens", fallbacks=plan.fallbacks)
        with plimsoll.limited("2GiB"):
            plan = plimsoll.try_plan(step, plan, batch)

    The time limit of a trial is 5 seconds on a GPU. On a CPU, it is 10 seconds or two steps, whichever is longer. It
    begins once the plan has warmed up. When it has passed, no further candidate starts.

    Args:
        step: the training step, made with ``plan.fallbacks``.
        plan: the plan with its candidates.
        batch: a real batch of the usual size. The training does not learn from it.
        num_steps: number of steps of the training. If these are too few to repay a trial, no candidate is tried. With
            ``None``, the candidates are always tried.
        progress: called with a message for each stage of the work.

    Returns:
        the plan that is now installed, with the measurements in ``trial``.

    Raises:
        InputError: if the fallbacks of the step change the training in a different way than the plan.
        TornStepError: if a pass could not be undone, because memory ran out twice or it changed state that cannot be
            restored.
    """
    step._fallbacks.refuse_others(plan.fallbacks)
    reason = _reason_against(step, plan, num_steps)
    if reason is not None:
        return plan.model_copy(update={"trial": Trial(left_out=reason), "candidates": ()})
    return _Tries(step, plan, batch, progress).settled()


def try_before_training(
    step: TrainStep, plan: Plan, loader: Loader, path: Path, *, num_steps: int, quiet: bool
) -> Plan:
    """Try the plan of a new run (see `try_plan`), if it has candidates.

    Prints the result, writes the plan to ``path``, and adds the measurements to the calibration.
    """
    if not plan.candidates:
        return plan
    with spinner(quiet) as progress:
        batch = fitting(loader.peek, step.backend, "reading the first batch").fields
        plan = try_plan(step, plan, batch, num_steps=num_steps, progress=progress)
    plan.save(path)
    learn_from_trial(plan)
    if not quiet:
        print(trial_sentence(plan), file=sys.stderr)
    return plan


def _reason_against(step: TrainStep, plan: Plan, num_steps: int | None) -> str | None:
    """Return the reason not to try the candidates, or ``None``."""
    time_of_step, kind = plan.fallbacks[0].step_time, step.backend.kind
    if not plan.candidates or time_of_step is None:
        return "no other plan is about as fast"
    if not step.ranks.is_alone:
        return f"{step.ranks.world_size} ranks train together"
    copied_bytes = _changed_bytes(step)
    if copied_bytes > _MOST_COPIED_BYTES[kind]:
        return f"copying and restoring {format_bytes(copied_bytes)} of parameters would take too long"
    if num_steps is not None:
        seconds, num_candidates = time_of_step.likely_seconds, 1 + len(plan.candidates)
        expected_seconds = num_candidates * (_SECONDS_OF_A_TRIAL + _STEPS_OF_A_TRIAL * seconds)
        trial_seconds = min(_most_seconds(plan, kind), expected_seconds)
        if trial_seconds > _LEAST_GAIN * num_steps * seconds:
            run = f"{num_steps:,} steps of about {format_seconds(seconds)}"
            return f"{run} would save less time than a trial takes, up to {format_seconds(trial_seconds)}"
    return None


def _most_seconds(plan: Plan, kind: str) -> float:
    time_of_step = plan.fallbacks[0].step_time
    steps_seconds = _MOST_STEPS * time_of_step.likely_seconds if kind == "cpu" and time_of_step else 0.0
    return max(_MOST_SECONDS[kind], steps_seconds)


def _changed_bytes(step: TrainStep) -> int:
    """Return the bytes of the parameters and states that an update changes."""
    return sum(one.nbytes for one in updated_by(step.workload.optimizer))


@dataclass
class _Found:
    """Result of trying one candidate. Without ``measured_seconds``, the candidate cannot be chosen.

    ``outcome`` and ``why`` are as in `Tried`.
    """

    candidate: Candidate
    outcome: str
    measured_seconds: float | None = None
    noise_seconds: float = 0.0
    peak_bytes: int | None = None
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.outcome not in {*_SHORT_OF_MEMORY, "failed"}

    def record(self) -> Tried:
        configuration = self.candidate.configuration
        predicted = (
            configuration.step_time.likely_seconds / self.candidate.time_factor if configuration.step_time else None
        )
        return Tried(
            choices=configuration.choices,
            outcome=self.outcome,  # type: ignore[arg-type]
            predicted_seconds=predicted,
            measured_seconds=self.measured_seconds,
            peak_bytes=self.peak_bytes,
            why=self.why,
        )


class _Tries:
    """The trial of the candidates of one plan, on the model and optimizer of one training run."""

    def __init__(self, step: TrainStep, plan: Plan, batch: Any, progress: Progress) -> None:
        self._step, self._plan, self._batch, self._progress = step, plan, batch, progress
        self._batch_size = batch_size_of(batch)
        self._copier = copier_for(step.backend.kind)
        self._began = time.perf_counter()
        # The deadline, set after the first pass: the training would need the same warm-up anyway.
        self._ends: float | None = None
        self._least_seconds = 0.0  # duration of the shortest trial of a candidate
        self._most_bytes = math.inf  # upper bound for the predicted need of a plan that fits
        self._doubt: str | None = None
        self._kept: TrialCopies | None = None  # copies of state that an update does not change
        self._updated: ChunkCopy | WholeCopy | None = None
        self._is_torn = False  # some state was not restored

    def settled(self) -> Plan:
        """Try all candidates, and install the fastest."""
        plan = self._plan
        first = Candidate(
            configuration=plan.fallbacks[0],
            prediction=plan.prediction,
            time_factor=plan.time_factor,
            off_device=plan.off_device,
        )
        candidates, found = [first, *plan.candidates], list[_Found]()
        settled: Plan | None = None
        try:
            with self._step._retry.unmarked():
                for number, candidate in enumerate(candidates):
                    choices = " ".join(map(str, candidate.configuration.choices))
                    self._progress(f"trying plans: {number + 1} of {len(candidates)}, {choices}")
                    found.append(self._found(candidate, len(candidates) - number))
                    if self._doubt is not None:
                        left_out = Trial(left_out=self._doubt, seconds=self._seconds())
                        return plan.model_copy(update={"trial": left_out, "candidates": ()})
            settled = self._chosen(found)
            return settled
        finally:
            if settled is None:
                self._go_on_with(plan.fallbacks)
            self._step._retry.undo.done()
            self._step.replays.reset()
            self._step.backend.release()
            self._step.backend.reset_peak()

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    # -- one candidate -------------------------------------------------------------------------------------------------

    def _found(self, candidate: Candidate, num_left: int) -> _Found:
        if _needed_bytes(candidate.configuration) > self._most_bytes:
            return _Found(candidate, "struck", why="it needs more memory than a candidate that ran out of memory")
        began = time.perf_counter()
        if self._ends is not None and began + self._least_seconds / 2 > self._ends:
            return _Found(candidate, "not tried", why="the time limit of the trial was reached")
        self._step.backend.release()
        self._step.backend.reset_peak()
        self._step.replays.reset()
        # An error of one candidate must not end a training that can continue without this candidate. An error of the
        # plan itself is raised again by the training.
        timed = without_fail(partial(self._timed_alone, candidate.configuration, num_left), TornStepError)
        if self._is_torn:
            raise TornStepError(
                f"the trial of a plan has changed state that was not restored ({timed}): reload the last checkpoint, "
                "and train without a trial (--no-trial)"
            )
        if isinstance(timed, str):
            return _Found(candidate, "failed", why=timed)
        if isinstance(timed, OomEvent):
            # Exclude other candidates that would not fit either if their predicted peaks are too low by the same share.
            if (ran_out := ran_out_of(timed)) is not None and candidate.configuration.peak is not None:
                self._most_bytes = min(self._most_bytes, ran_out.most_bytes(_needed_bytes(candidate.configuration)))
            return _Found(candidate, "ran out", why=f"memory ran out in the {timed.phase} phase ({timed.shortage})")
        seconds, noise_seconds = timed
        taken_seconds = time.perf_counter() - began
        self._least_seconds = min(self._least_seconds or taken_seconds, taken_seconds)
        why = self._step.replays.why_none
        found = _Found(
            candidate,
            "slower",
            seconds,
            noise_seconds,
            self._step.use().peak_bytes,
            why=f"micro-batches were not replayed as a CUDA graph, because {why}" if why else "",
        )
        return self._struck_if_near(found)

    def _timed_alone(self, configuration: Configuration, num_left: int) -> tuple[float, float] | OomEvent | str:
        """Install a candidate, time and undo it. Return seconds and noise, an out-of-memory event, or why it failed."""
        step = self._step

        def work() -> tuple[float, float] | OomEvent | str:
            self._go_on_with([configuration])
            if (event := self._put_to_work()) is not None:
                return event
            if self._doubt is not None:
                return self._doubt
            with self._undone():
                return self._refused(configuration) or self._timed(configuration, num_left)

        try:
            return attempt(work, step.backend, step.position)
        except TornStepError:
            raise
        except PlimsollError as error:
            return str(error)

    def _struck_if_near(self, found: _Found) -> _Found:
        """Reject a candidate that is predicted to exceed the limit, unless its measured peak is clearly below it."""
        limit_bytes, peak = self._plan.limit_bytes, found.candidate.configuration.peak
        if limit_bytes is None or peak is None or peak.high_bytes <= limit_bytes:
            return found
        if (found.peak_bytes or 0) <= _HOLDS_SHARE * limit_bytes:
            return found
        taken, limit = format_bytes(found.peak_bytes), format_bytes(limit_bytes)
        found.outcome, found.why = "too near", f"it took {taken} of {limit}, and a long run may take more"
        return found

    def _refused(self, configuration: Configuration) -> str | None:
        """Return the reason not to try a candidate whose techniques are installed, or ``None``."""
        if configuration.micro_batch >= self._batch_size:
            return None
        reason = self._step._whole.reason() or self._step.additivity.before_cut(self._batch)
        return None if reason is None else f"the batch must not be cut: {reason}"

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore all state that the passes in the block change.

        Random numbers, buffers and Python state are restored by `plimsoll.step.undo.step_state`. Parameters, optimizer
        states (`plimsoll.step.update.undo`) and all other tensors are restored from copies outside the device.
        """
        assert self._kept is not None
        self._updated = self._copies()
        self._kept.make(self._copier)
        try:
            yield
        finally:
            self._put_back()
            self._step._retry.undo.settle(all_of_it=True)

    def _put_back(self) -> None:
        """Restore all state that the passes of the trial have changed.

        Raises:
            TornStepError: if some state cannot be restored.
        """
        step, self._is_torn = self._step, True
        step.replays.drop()
        step._retry.put_back(step._put_back_own)
        event = attempt_twice(self._put_back_copies, step.backend, step.position)
        if event is not None:
            raise TornStepError(
                f"memory ran out while the trial of a plan was undone ({event.shortage}): reload the last checkpoint, "
                "and train without a trial (--no-trial)"
            )
        found = () if self._kept is None else dict.fromkeys(step._retry.undo.lost)
        if lost := [name for name in found if self._kept is not None and name not in self._kept.names]:
            raise TornStepError(
                f"the trial of a plan has changed {', '.join(lost)} for good: reload the last checkpoint, and train "
                "without a trial (--no-trial)"
            )
        self._is_torn = False

    def _put_back_copies(self) -> None:
        for one in (self._updated, self._kept):
            if one is not None:
                one.restore()

    def _timed(self, configuration: Configuration, num_left: int) -> tuple[float, float] | OomEvent:
        """Return the seconds of a whole step, extrapolated from a few passes, and their noise in seconds."""
        # The warm-up is one micro-batch with its update. One or a few more micro-batches are timed.
        num_micro_batches = -(-self._batch_size // configuration.micro_batch)
        warm = self._seconds_of(configuration, 1, is_first=True)
        for _ in range(_MOST_REPEATS):  # until the passes are replayed as a CUDA graph, if they will be
            if not isinstance(warm, OomEvent) and not self._step.replays.is_settled:
                warm = self._seconds_of(configuration, 1)
        now = time.perf_counter()
        self._ends = self._ends or now + _most_seconds(self._plan, self._step.backend.kind)
        ends = now + (self._ends - now) / num_left
        one = warm if isinstance(warm, OomEvent) else self._seconds_of(configuration, 1)
        if isinstance(one, OomEvent):
            return one
        num_in_time = (ends - time.perf_counter()) / one  # a micro-batch with an update is the slowest kind
        most = (
            num_micro_batches
            if num_in_time >= num_micro_batches
            else min(num_micro_batches, max(2, min(int(num_in_time / 2), _MOST_CHUNKS)))
        )
        times: dict[int, list[float]] = {1: [one], most: [one] if most == 1 else []}
        while len(times[most]) < _MOST_REPEATS and (not times[most] or time.perf_counter() + times[most][-1] < ends):
            for count in (1, most) if 1 < most < num_micro_batches and times[most] else (most,):
                seconds = self._seconds_of(configuration, count)
                if isinstance(seconds, OomEvent):
                    return seconds
                times[count].append(seconds)
        least, second, *_ = sorted([*times[most], (1 + _SAME_SECONDS) * max(times[most])])
        noise_share = min(second / least - 1, _MOST_NOISE)
        least = _of_all_chunks(num_micro_batches, most, least, min(times[1]))
        return least, noise_share * least

    def _put_to_work(self) -> OomEvent | None:
        """Install a candidate's techniques, and check before the first pass that all changed state can be restored."""
        step = self._step
        step.position.phase = "copy"
        self._kept = self._updated = None

        def work() -> None:
            step._use(0)
            loss_of = partial(step._loss_of, self._batch, step._fallbacks.sizes[0].samples)
            step._retry.remember(self._batch, loss_of, [*step._all_parameters()])
            self._kept = TrialCopies(step._retry.undo.remembered, updated_by(step.workload.optimizer))

        try:
            event = step._collectively(work)
            self._doubt = step._retry.doubt
        finally:
            self._put_back()
        if isinstance(event, OomEvent):
            return event
        assert self._kept is not None
        most_bytes = _MOST_COPIED_BYTES[step.backend.kind] - _changed_bytes(step)
        self._doubt = self._doubt or self._kept.reason_against(most_bytes)
        return None

    def _seconds_of(
        self, configuration: Configuration, num_micro_batches: int, is_first: bool = False
    ) -> float | OomEvent:
        """Run a step on the first ``num_micro_batches`` micro-batches, and return its seconds.

        With ``is_first``, record the state before the step, which the trial restores in the end. Later steps run on top
        of the first one.
        """
        step, backend = self._step, self._step.backend
        num_samples = min(num_micro_batches * configuration.micro_batch, self._batch_size)
        batch = pick_samples(self._batch, range(num_samples))  # copies, because a model may write to them
        shape = step._shape_of(batch)
        size = Size(min(configuration.micro_batch, num_samples), 0)
        step.position.micro_batch = size.samples
        backend.synchronize()
        began = time.perf_counter()
        try:
            outcome = step._run(batch, size, shape, shape) if is_first else self._again(batch, size.samples, shape)
        except NonFiniteLossError:  # training on the same batch again, as the training never does, may diverge
            if is_first:
                raise
            step._put_back_own()
            self._put_back_copies()
            began = time.perf_counter()
            outcome = self._again(batch, size.samples, shape)
        backend.synchronize()
        return outcome if isinstance(outcome, OomEvent) else time.perf_counter() - began

    def _again(self, batch: Any, micro_batch: int, shape: Shape) -> Outcome | OomEvent:
        """Run another step on top of the previous one, which is not undone, without recording state to restore."""
        step = self._step
        step._drop_gradients()
        step._gradient_release = None
        if step._scaler is not None:
            step._scaler = scaler_as_now(step._scaler)
        loss = step._collectively(lambda: step._gradients(batch, micro_batch, shape, shape))
        return loss if isinstance(loss, OomEvent) else step._finish(loss)

    def _copies(self) -> ChunkCopy | WholeCopy:
        optimizer = self._step.workload.optimizer
        memory = Memory(None, Scratch(0), self._copier)
        if not is_separable(optimizer):
            return WholeCopy(optimizer, Learned(optimizer), memory, self._step.backend, is_again=False)
        groups = enumerate(optimizer.param_groups)
        members = [(number, one) for number, group in groups for one in group["params"]]
        return ChunkCopy(optimizer, members, memory, changes_gradients=False)

    # -- what follows --------------------------------------------------------------------------------------------------

    def _chosen(self, found: list[_Found]) -> Plan:
        plan, fastest = self._plan, _fastest(found)
        if fastest is not None:
            fastest.outcome = "fastest"
        trial = Trial(seconds=self._seconds(), tried=tuple(one.record() for one in found))
        others = [one.candidate.configuration for one in found if one.fits and one is not fastest]
        short = [one.candidate.configuration for one in found if one.outcome in _SHORT_OF_MEMORY]
        left = [one for one in plan.fallbacks if one not in short and _needed_bytes(one) <= self._most_bytes]
        fallbacks = [one for one in left if one is not plan.fallbacks[0]] or [*plan.fallbacks[-1:]]
        in_order = (
            in_falling_order(fastest.candidate.configuration, fallbacks, others)
            if fastest
            else tuple(left or fallbacks)
        )
        self._go_on_with(in_order)
        tried = {one.candidate.configuration.choices for one in found}
        rejected = tuple(one for one in plan.rejected if one.choices not in tried)
        if in_order[0] is not plan.fallbacks[0]:
            rejected = tuple(map(untried, rejected))
        about, numerics = told_of([MICRO_BATCH], is_whole=in_order[0].micro_batch >= self._batch_size)
        changed: dict[str, Any] = {
            "fallbacks": in_order, "trial": trial, "candidates": (), "rejected": rejected, "about": plan.about | about,
            "numerics": plan.numerics | numerics,
        }  # fmt: skip
        if fastest is not None:
            changed |= {name: getattr(fastest.candidate, name) for name in ("prediction", "time_factor", "off_device")}
        elif in_order[0] != plan.fallbacks[0]:  # the predictions are for the plan's first configuration
            changed |= {"prediction": None, "time_factor": 1.0, "off_device": None}
        return plan.model_copy(update=changed)

    def _go_on_with(self, in_order: list[Configuration] | tuple[Configuration, ...]) -> None:
        step = self._step
        step._fallbacks.exchange(in_order)
        step.fallback_schedule = None
        step._evaluator.begin_at(step._fallbacks.sizes[0].samples)


def _of_all_chunks(num_micro_batches: int, most: int, seconds: float, one_seconds: float) -> float:
    """Return the seconds of a whole step, from the seconds of its first ``most`` micro-batches and of one micro-batch.

    Both measurements include an update.
    """
    if most == num_micro_batches:
        return seconds
    chunk_seconds = (seconds - one_seconds) / (most - 1)
    if chunk_seconds <= 0:  # another process used the CPU: assume time proportional to the micro-batches
        return seconds * num_micro_batches / most
    return seconds + (num_micro_batches - most) * chunk_seconds


def _fastest(found: Sequence[_Found]) -> _Found | None:
    """Return the first candidate that fits, unless a later candidate is faster by more than the measurement noise."""
    best: tuple[_Found, float] | None = None
    for one in found:
        seconds = one.measured_seconds
        if seconds is not None and one.fits:
            noise_seconds = max(one.noise_seconds, best[0].noise_seconds) if best else 0.0
            best = (one, seconds) if best is None or seconds + noise_seconds < best[1] else best
    return best[0] if best else None


def _needed_bytes(configuration: Configuration) -> int:
    return configuration.peak.likely_bytes if configuration.peak is not None else 0
