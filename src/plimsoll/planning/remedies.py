"""Remedies: changes that would reduce the memory of a training run, each with its saving, its cost and whether it fits.

    found = find_remedies(job, limit_bytes=2 << 30)

Each technique that is possible for the job is added alone to the choices in force, and the whole training is traced
again. The traces and the plan are shared with the planner (`plimsoll.planning.plan`). The weakest option that fits is
reported, or else the strongest. The planner's plan is the combined remedy.

If the training fits as it is, nothing is tried. Not tried: changes of the batch, of the sequence length or of the
model, and pairs of techniques except the plan's. The cost of a lossy technique in quality is not predicted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from plimsoll.data.quick_facts import TextSketch, sketch_texts
from plimsoll.errors import InputError
from plimsoll.planning.constraints import with_pins_of
from plimsoll.planning.plan import Planner, Progress, planner_of
from plimsoll.planning.search.choices import available_choices
from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.records.comparison import Calibration
from plimsoll.records.diagnosis import Remedy
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Plan, micro_batch_choice, without_micro_batch
from plimsoll.records.prediction import Estimate, Prediction
from plimsoll.records.units import format_bytes
from plimsoll.step.fallbacks import samples_of
from plimsoll.techniques import TECHNIQUES, Choices, Setting, Technique, conflict_among, in_order, technique_of

_MOST_SECONDS = 180.0  # time limit for trying single techniques; the plan is always made
_MIB = 1 << 20
_WORTH_SAYING = 0.01  # share of the peak
_LEAST_PART = 0.02  # share of a peak: techniques that reach less are not tried, as in the planner's search


class Remedies(NamedTuple):
    """The prediction for a job, and its remedies. ``notes`` are sentences for the user about the search.

    ``vocab_size`` is the model's number of token embeddings, which can be larger than the tokenizer's vocabulary.
    """

    prediction: Prediction
    vocab_size: int
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()


def find_remedies(
    job: Job,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    in_force: Choices | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    most_seconds: float = _MOST_SECONDS,
    texts: TextSketch | None = None,
) -> Remedies:
    """Predict a job and, if it does not fit, the effect of each possible change.

    Args:
        job: the training.
        device: see `plimsoll.planning.plan.plan_job`, also for ``limit_bytes``.
        limit_bytes: see `device`.
        in_force: the choices that the run uses now; by default the job's pins, without micro-batches.
        calibration: correction factors learned from measured runs.
        progress: called with a message for each stage of the work.
        most_seconds: time limit after which no further technique is tried.
        texts: see `plimsoll.planning.plan.plan_job`.

    Returns:
        the remedies, sorted: remedies that fit come first, then remedies that keep the training unchanged, then faster
        ones.

    Raises:
        JobError: see `plan_job`.
        DeviceError: see `plan_job`.
        BudgetError: see `plan_job`.
        InputError: see `plan_job`.
    """
    constraints = (with_pins_of(job, (), ()), ())
    with planner_of(job, device, limit_bytes, constraints, calibration, progress, texts=texts) as planner:
        base = planner.plain_choices if in_force is None else in_force
        before, prediction = planner.evaluate_at_length(base), planner.prediction(base)
        if before.fits and before.need_bytes <= planner.limit_bytes:
            return Remedies(prediction, _vocab_size(planner, job, texts))
        plan, search = planner.plan(), _Search(planner, job, limit_bytes, before)
        found = [*search.of_plan(plan), *search.of_techniques(time.monotonic() + most_seconds)]
        notes = (*search.notes, *([] if plan.fits else [_least(plan)]))
        return Remedies(prediction, _vocab_size(planner, job, texts), tuple(sorted(_distinct(found), key=_rank)), notes)


def _vocab_size(planner: Planner, job: Job, texts: TextSketch | None) -> int:
    config = getattr(planner.planning_input.workload.model, "config", None)
    return int(getattr(config, "vocab_size", None) or (texts or sketch_texts(job)).vocab_size)


def _least(plan: Plan) -> str:
    least_bytes = -(-(plan.smallest_budget_bytes or 0) >> 20) << 20
    return (
        "No combination that keeps the training unchanged fits: the smallest budget for which a plan was found is "
        f"{format_bytes(least_bytes)} (`--budget {least_bytes >> 20}MiB`)."
    )


def _rank(remedy: Remedy) -> tuple[bool, bool, float, int]:
    slower = float("inf") if remedy.step_time_factor is None else remedy.step_time_factor
    return not remedy.fits, remedy.changes_training, slower, -(remedy.saving_bytes or 0)


def _distinct(remedies: Sequence[Remedy]) -> Iterator[Remedy]:
    """Yield the remedies. Of several remedies with the same choices, yield only the first."""
    seen: set[frozenset[Choice]] = set()
    for remedy in remedies:
        if (choices := frozenset(remedy.choices)) not in seen:
            seen.add(choices)
            yield remedy


@dataclass
class _Search:
    """The search for remedies, which evaluates one change after another."""

    planner: Planner
    job: Job
    limit_bytes: int | None
    before: Evaluation
    notes: list[str] = field(default_factory=list)

    def of_plan(self, plan: Plan) -> Iterator[Remedy]:
        """Yield the planner's combination and, if nothing fits, the lossy alternatives that the job does not allow."""
        budget = self._budget()
        evaluation = self.planner.evaluate_at_length(plan.choices)
        if plan.fits:
            text = (
                "the fastest combination that the planner found; `plimsoll train` finds it by itself inside this budget"
            )
            yield from self._remedy(evaluation, plan.choices, text, budget)
            return
        yield from self._remedy(
            evaluation, plan.choices, "the evaluated combination that needs the least memory", budget
        )
        for alternative in plan.lossy_alternatives:
            evaluation = self.planner.evaluate_at_length(alternative.choices)
            yield from self._remedy(
                evaluation,
                alternative.choices,
                "a combination that changes the training",
                self._settings(evaluation.choices),
            )

    def of_techniques(self, deadline_seconds: float) -> Iterator[Remedy]:
        """Yield the remedy of each single technique on top of the choices in force."""
        left_out = []
        for options in self._offered():
            if time.monotonic() > deadline_seconds:
                left_out.append(options[0].technique)
                continue
            found = self._weakest_that_fits(options)
            if found is not None:
                evaluation, choice = found
                text = TECHNIQUES[choice.technique].summary
                yield from self._remedy(evaluation, (choice,), text, self._settings((choice,)))
        if left_out:
            self.notes.append(f"There was no time left to try {', '.join(left_out)}.")

    def _offered(self) -> Iterator[Choices]:
        """Yield the options, weakest first, of each technique that can reduce a relevant part of the peak."""
        problem = self.planner.problem(self.planner.limit_bytes)
        available, setting = available_choices(problem), self._open_setting(problem.setting)
        in_force = {choice.technique for choice in self.before.choices}
        sizes = [size for size in available.sizes if size < self.before.micro_batch]
        if sizes:
            yield tuple(map(micro_batch_choice, sizes))
        options = dict(available.options)
        for technique in filter(_sets_precision, TECHNIQUES.values()):  # even if the job sets another precision
            offered = technique.choices(problem.workload, setting)
            options |= {} if isinstance(offered, str) else {technique.name: offered}
        for choices in (*options.values(), *((choice,) for choice in available.closed)):
            technique = technique_of(choices[0].technique)
            reached_bytes = sum(self.before.parts.get(part, 0) for part in technique.reaches)
            if technique.name not in in_force and reached_bytes >= _LEAST_PART * self.before.need_bytes:
                yield choices

    def _open_setting(self, setting: Setting) -> Setting:
        """Return a setting that allows every remedy: all techniques, and precision ``auto`` in place of ``fp32``."""
        precision = "auto" if self.job.precision == "fp32" else setting.precision
        return replace(setting, precision=precision, allow=frozenset(TECHNIQUES))

    def _weakest_that_fits(self, options: Choices) -> tuple[Evaluation, Choice] | None:
        """Return the weakest option that fits, by bisection, or else the strongest; ``None`` if it cannot be used."""
        tried = self._evaluate_with(options[-1])
        if tried is None or not self._fits(tried):
            return None if tried is None else (tried, options[-1])
        low, high, best = 0, len(options) - 1, tried
        while low < high:
            middle = (low + high) // 2
            evaluation = self._evaluate_with(options[middle])
            if evaluation is not None and self._fits(evaluation):
                high, best = middle, evaluation
            else:
                low = middle + 1
        return best, options[high]

    def _evaluate_with(self, choice: Choice) -> Evaluation | None:
        """Evaluate the choices in force with one choice added or replaced; ``None`` if they cannot be used."""
        rest = tuple(one for one in self.before.choices if one.technique != choice.technique)
        choices = in_order((*rest, choice))
        planner = self.planner
        if conflict_among(choices, planner.planning_input.workload, self._open_setting(planner.setting)) is not None:
            return None
        try:
            return planner.evaluate_at_length(choices)
        except InputError as error:
            self.notes.append(f"{choice} could not be tried: {error}")
            return None

    def _fits(self, evaluation: Evaluation) -> bool:
        return evaluation.fits and evaluation.need_bytes <= self.planner.limit_bytes

    def _budget(self) -> dict[str, Any]:
        """Return the job fields that set the requested budget; empty if the job's own budget is used."""
        num_bytes = self.limit_bytes
        if num_bytes is None:
            return {}
        return {"budget.device": num_bytes if num_bytes % _MIB else f"{num_bytes // _MIB}MiB"}

    def _settings(self, choices: Choices) -> dict[str, Any]:
        """Return the job fields that make a plan use these choices: pins, and allowed techniques."""
        lossy = [one.technique for one in choices if TECHNIQUES[one.technique].numerics == "lossy"]
        closed = [name for name in lossy if name not in self.job.allow]
        settings = self._budget()
        if closed:
            settings["allow"] = [*self.job.allow, *closed]
        if any(_sets_precision(TECHNIQUES[one.technique]) for one in choices) and self.job.precision != "auto":
            settings["precision"] = "auto"
        names = {choice.technique for choice in choices}
        kept = [text for text in self.job.pin if text.partition("=")[0].partition("(")[0].strip() not in names]
        settings["pin"] = [*kept, *map(str, choices)]
        return settings

    def _remedy(
        self, evaluation: Evaluation, choices: Choices, text: str, settings: dict[str, Any]
    ) -> Iterator[Remedy]:
        """Yield the remedy for a change, if it saves a relevant share of the peak."""
        before, after = self.before.peak, evaluation.peak
        saving = _differences(before, after)
        if saving[0] < _WORTH_SAYING * before.likely_bytes:
            return
        seconds = self.before.step_time.likely_seconds
        yield Remedy(
            choices=choices,
            text=text,
            settings=settings,
            saving_bytes=saving[0],
            saving_low_bytes=min(saving),
            saving_high_bytes=max(saving),
            step_time_factor=evaluation.seconds / seconds if seconds else None,
            known="predicted",
            fits=self._fits(evaluation),
        )


def _sets_precision(technique: Technique) -> bool:
    return "precision" in technique.modifies


def _differences(before: Estimate, after: Estimate) -> tuple[int, int, int]:
    """Return the bytes saved in the likely, low and high peak. The errors of both peaks are correlated."""
    return (
        before.likely_bytes - after.likely_bytes,
        before.low_bytes - after.low_bytes,
        before.high_bytes - after.high_bytes,
    )


def choices_in_force(plan: Plan, fallback: int | None, micro_batch: int | None) -> Choices:
    """Return the choices in force when a run ended.

    ``fallback`` is the index of the fallback that the run used last, and ``None`` the first configuration of the plan.
    ``micro_batch`` is the smallest micro-batch (samples) that the run reached, and ``None`` the size in the
    configuration.
    """
    choices = plan.fallbacks[min(fallback or 0, len(plan.fallbacks) - 1)].choices
    if micro_batch is None or micro_batch >= samples_of(choices):
        return choices
    return in_order((*without_micro_batch(choices), micro_batch_choice(micro_batch)))
