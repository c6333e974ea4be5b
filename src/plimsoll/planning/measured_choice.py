"""The last choice among plans, measured: each candidate does a few real passes, and everything is put back.

    plan = try_plan(step, plan, batch)

The model of time has a spread, so the plans within it (``plan.candidates``) are run where the device is here, inside
the limit and on a real batch, which is not taken from its loader. The fastest is in force when `try_plan` returns; of
the others those that need less are among its fallbacks. A model with state that cannot be put back is not tried.

Does NOT cover several ranks, data loading, evaluation, and what only later steps take.
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
_MOST_STEPS = 2  # of the plan, on a CPU, where these take longer
_LEAST_GAIN = 0.05  # of a step: what plans about as fast differ by in the median, see docs/LOG.md
# What each candidate takes: so many steps at most, and so long to see what its techniques change.
_STEPS_OF_A_TRIAL, _SECONDS_OF_A_TRIAL = 4, 0.5
_MOST_COPIED_BYTES = {"cpu": 2 << 30, "cuda": 8 << 30}  # outside of the device and back takes a second or two
_MOST_CHUNKS = 4  # in a timed part of a step that is not timed whole ...
_MOST_REPEATS = 3
_SAME_SECONDS = 0.01  # of a step: no faster than what comes before it
_MOST_NOISE = 0.25  # of a step, by which repeated passes may differ
_HOLDS_SHARE = 0.97  # of the limit: what may need more than that in a long run must have been measured below
_SHORT_OF_MEMORY = frozenset({"ran out", "struck", "too near"})

Progress = Callable[[str], None]


def _silent(_text: str) -> None:
    pass


def try_plan(
    step: TrainStep, plan: Plan, batch: Any, *, num_steps: int | None = None, progress: Progress = _silent
) -> Plan:
    """Run the candidates of a plan for a few passes, put everything back, and go on with the fastest.

        step = plimsoll.TrainStep(model, optimizer, units="next-tokens", fallbacks=plan.fallbacks)
        with plimsoll.limited("2GiB"):
            plan = plimsoll.try_plan(step, plan, batch)

    Once the plan has warmed up, no other begins after 5 seconds on a GPU, after 10 or those of two steps on a CPU.

    Args:
        step: of the training, made with ``plan.fallbacks``.
        plan: the plan.
        batch: a real one of the usual size; it is not trained on.
        num_steps: of the training: too few to be worth it are not tried. ``None``: try anyway.
        progress: told what is being done.

    Returns:
        the plan that is in force, with what was measured in ``trial``.

    Raises:
        InputError: if the step was made with fallbacks that change the training otherwise.
        TornStepError: if a pass could not be undone: memory ran out in that twice, or it has changed what cannot be put
            back.
    """
    step._fallbacks.refuse_others(plan.fallbacks)
    reason = _reason_against(step, plan, num_steps)
    if reason is not None:
        return plan.model_copy(update={"trial": Trial(left_out=reason), "candidates": ()})
    return _Tries(step, plan, batch, progress).settled()


def try_before_training(
    step: TrainStep, plan: Plan, loader: Loader, path: Path, *, num_steps: int, quiet: bool
) -> Plan:
    """Try the plan of a run that begins (see `try_plan`), if there is anything to try.

    Say what came of it, write the plan to ``path``, and learn from it.
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
    """Why nothing is to be tried, if so."""
    time_of_step, kind = plan.fallbacks[0].step_time, step.backend.kind
    if not plan.candidates or time_of_step is None:
        return "no other plan is about as fast"
    if not step.ranks.is_alone:
        return f"{step.ranks.world_size} ranks train together"
    copied_bytes = _changed_bytes(step)
    if copied_bytes > _MOST_COPIED_BYTES[kind]:
        return f"to copy {format_bytes(copied_bytes)} of parameters and put them back would take longer"
    if num_steps is not None:
        seconds, num_candidates = time_of_step.likely_seconds, 1 + len(plan.candidates)
        expected_seconds = num_candidates * (_SECONDS_OF_A_TRIAL + _STEPS_OF_A_TRIAL * seconds)
        trial_seconds = min(_most_seconds(plan, kind), expected_seconds)
        if trial_seconds > _LEAST_GAIN * num_steps * seconds:
            run = f"{num_steps:,} steps of about {format_seconds(seconds)}"
            return f"in {run} it would hardly gain what it takes, up to {format_seconds(trial_seconds)}"
    return None


def _most_seconds(plan: Plan, kind: str) -> float:
    time_of_step = plan.fallbacks[0].step_time
    steps_seconds = _MOST_STEPS * time_of_step.likely_seconds if kind == "cpu" and time_of_step else 0.0
    return max(_MOST_SECONDS[kind], steps_seconds)


def _changed_bytes(step: TrainStep) -> int:
    """Bytes that an update changes."""
    return sum(one.nbytes for one in updated_by(step.workload.optimizer))


@dataclass
class _Found:
    """What was found of one candidate; without ``measured_seconds`` it cannot be taken."""

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
    """The trial of one plan on one live training."""

    def __init__(self, step: TrainStep, plan: Plan, batch: Any, progress: Progress) -> None:
        self._step, self._plan, self._batch, self._progress = step, plan, batch, progress
        self._batch_size = batch_size_of(batch)
        self._copier = copier_for(step.backend.kind)
        self._began = time.perf_counter()
        # Not known before the first pass, which loads and proves what the training would as well.
        self._ends: float | None = None
        self._least_seconds = 0.0  # that a candidate took
        self._most_bytes = math.inf  # that may be predicted for a plan that fits
        self._doubt: str | None = None
        self._kept: TrialCopies | None = None  # of what an update does not change
        self._updated: ChunkCopy | WholeCopy | None = None
        self._is_torn = False  # not everything was put back

    def settled(self) -> Plan:
        """Try them, and put the fastest to work."""
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
            return _Found(candidate, "struck", why="it would need more than another one ran out of memory with")
        began = time.perf_counter()
        if self._ends is not None and began + self._least_seconds / 2 > self._ends:
            return _Found(candidate, "not tried", why="the time for the trial was over")
        self._step.backend.release()
        self._step.backend.reset_peak()
        self._step.replays.reset()
        # What is wrong with it alone must not end a training that goes on without it; the plan's own says it again.
        timed = without_fail(partial(self._timed_alone, candidate.configuration, num_left), TornStepError)
        if self._is_torn:
            raise TornStepError(
                f"a plan was tried, and what it has changed is not put back ({timed}): reload the last checkpoint, and "
                "train without a trial (--no-trial)"
            )
        if isinstance(timed, str):
            return _Found(candidate, "failed", why=timed)
        if isinstance(timed, OomEvent):
            # Strike others that would not fit either, if their predictions are too low by the same share.
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
        """Put a candidate to work, time it and put everything back; or say why that cannot be."""
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
        """Strike what may need more than there is, by what was predicted, and was not measured to need clearly less."""
        limit_bytes, peak = self._plan.limit_bytes, found.candidate.configuration.peak
        if limit_bytes is None or peak is None or peak.high_bytes <= limit_bytes:
            return found
        if (found.peak_bytes or 0) <= _HOLDS_SHARE * limit_bytes:
            return found
        taken, limit = format_bytes(found.peak_bytes), format_bytes(limit_bytes)
        found.outcome, found.why = "too near", f"it took {taken} of {limit}, and a long run may take more"
        return found

    def _refused(self, configuration: Configuration) -> str | None:
        """Why it is not tried, with its techniques at work."""
        if configuration.micro_batch >= self._batch_size:
            return None
        reason = self._step._whole.reason() or self._step.additivity.before_cut(self._batch)
        return None if reason is None else f"the batch must not be cut: {reason}"

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Put everything back that the first pass of the block and those after it change.

        Random numbers, buffers and what Python keeps by `plimsoll.step.undo.step_state`; parameters, the optimizer's
        states (`plimsoll.step.update.undo`) and all other tensors from copies outside of the device.
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
        """Put everything back.

        Raises:
            TornStepError: if it cannot be.
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
        """Seconds of a whole step, as few passes let expect, and by how much these differ."""
        # One micro-batch with its update to warm up, and one or a few more that are timed.
        num_micro_batches = -(-self._batch_size // configuration.micro_batch)
        warm = self._seconds_of(configuration, 1, is_first=True)
        for _ in range(_MOST_REPEATS):  # until passes are replayed, where they will be
            if not isinstance(warm, OomEvent) and not self._step.replays.is_settled:
                warm = self._seconds_of(configuration, 1)
        now = time.perf_counter()
        self._ends = self._ends or now + _most_seconds(self._plan, self._step.backend.kind)
        ends = now + (self._ends - now) / num_left
        one = warm if isinstance(warm, OomEvent) else self._seconds_of(configuration, 1)
        if isinstance(one, OomEvent):
            return one
        num_in_time = (ends - time.perf_counter()) / one  # of one micro-batch with its update, which take the longest
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
        """Install its techniques, and see before the first pass that all it changes can be put back."""
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
        """Do a step of the first micro-batches; the state to go back to is that before the first of these steps."""
        step, backend = self._step, self._step.backend
        num_samples = min(num_micro_batches * configuration.micro_batch, self._batch_size)
        batch = pick_samples(self._batch, range(num_samples))  # copies, so that a model may write them
        shape = step._shape_of(batch)
        size = Size(min(configuration.micro_batch, num_samples), 0)
        step.position.micro_batch = size.samples
        backend.synchronize()
        began = time.perf_counter()
        try:
            outcome = step._run(batch, size, shape, shape) if is_first else self._again(batch, size.samples, shape)
        except NonFiniteLossError:  # of the batch again after an update, which the training does not do
            if is_first:
                raise
            step._put_back_own()
            self._put_back_copies()
            began = time.perf_counter()
            outcome = self._again(batch, size.samples, shape)
        backend.synchronize()
        return outcome if isinstance(outcome, OomEvent) else time.perf_counter() - began

    def _again(self, batch: Any, micro_batch: int, shape: Shape) -> Outcome | OomEvent:
        """Do a step after another one, as if that had been taken, but that nothing is remembered to go back to."""
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
        elif in_order[0] != plan.fallbacks[0]:  # of which this was not predicted
            changed |= {"prediction": None, "time_factor": 1.0, "off_device": None}
        return plan.model_copy(update=changed)

    def _go_on_with(self, in_order: list[Configuration] | tuple[Configuration, ...]) -> None:
        step = self._step
        step._fallbacks.exchange(in_order)
        step.fallback_schedule = None
        step._evaluator.begin_at(step._fallbacks.sizes[0].samples)


def _of_all_chunks(num_micro_batches: int, most: int, seconds: float, one_seconds: float) -> float:
    """Seconds of a step, from those of its first micro-batches and of a single one, each with an update."""
    if most == num_micro_batches:
        return seconds
    chunk_seconds = (seconds - one_seconds) / (most - 1)
    if chunk_seconds <= 0:  # something else had the processor: as if each had an update of its own
        return seconds * num_micro_batches / most
    return seconds + (num_micro_batches - most) * chunk_seconds


def _fastest(found: Sequence[_Found]) -> _Found | None:
    """The first of those that fit, unless another was faster by more than repeated passes differ."""
    best: tuple[_Found, float] | None = None
    for one in found:
        seconds = one.measured_seconds
        if seconds is not None and one.fits:
            noise_seconds = max(one.noise_seconds, best[0].noise_seconds) if best else 0.0
            best = (one, seconds) if best is None or seconds + noise_seconds < best[1] else best
    return best[0] if best else None


def _needed_bytes(configuration: Configuration) -> int:
    return configuration.peak.likely_bytes if configuration.peak is not None else 0
