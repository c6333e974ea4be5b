"""Calibration: correction factors for later plans, learned from planned runs and their trials.

The factors are the ratios of measured to predicted peaks and step times. A finished run adds to one file in the cache
folder (`plimsoll.records.base.cache_folder`), which the next plan reads. Only steps with the plan's first configuration
count, from the third on, because the first steps import, allocate and create states. A ratio above 3 or below a third
is ignored, because another program was active or the plan is for another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from plimsoll.errors import OutputError, RecordError
from plimsoll.records.base import cache_folder
from plimsoll.records.comparison import Calibration
from plimsoll.records.plan import Plan
from plimsoll.records.run import StepLine

_FIRST_STEP = 3
_MOST_RATIO = 3.0


def calibration_file() -> Path:
    """Return the path of the calibration file."""
    return cache_folder() / "calibration.json"


def known_calibration() -> Calibration:
    """Read the calibration. If the file is missing or damaged, return an empty calibration."""
    try:
        return Calibration.load(calibration_file())
    except RecordError:
        return Calibration()


def learned_from(calibration: Calibration, plan: Plan, steps: Sequence[StepLine], begun_at: int = 0) -> Calibration:
    """Return the calibration after one more run.

    Args:
        calibration: the previous calibration.
        plan: the plan of the run.
        steps: the steps of the run.
        begun_at: number of steps before the last process of the run began. These steps may have had another plan, and
            have been counted already.
    """
    from plimsoll.planning.search.time_model import learn_peak, learn_time

    configuration, target = plan.fallbacks[0], plan.made_for.get("target")
    counted = [step for step in steps if step.fallback == 0 and step.step >= begun_at + _FIRST_STEP]
    if not counted or target is None or configuration.peak is None or configuration.step_time is None:
        return calibration
    names = [choice.technique for choice in configuration.choices]
    seconds = median(step.step_seconds for step in counted)
    predicted_seconds = configuration.step_time.likely_seconds / plan.time_factor
    if 1 / _MOST_RATIO < seconds / predicted_seconds < _MOST_RATIO:
        calibration = learn_time(calibration, target, names, predicted_seconds, seconds)
    peaks = [step.peak_bytes for step in counted if step.peak_bytes is not None]
    if peaks and 1 / _MOST_RATIO < max(peaks) / configuration.peak.likely_bytes < _MOST_RATIO:
        calibration = learn_peak(calibration, target, names, configuration.peak.likely_bytes, max(peaks))
    return calibration


def learned_from_trial(calibration: Calibration, plan: Plan) -> Calibration:
    """Return the calibration updated with a trial, that is, with the step time of each measured candidate."""
    from plimsoll.planning.search.time_model import learn_time

    target = plan.made_for.get("target")
    for one in plan.trial.tried if plan.trial is not None and target is not None else ():
        if one.measured_seconds is None or one.predicted_seconds is None or target is None:
            continue
        if 1 / _MOST_RATIO < one.measured_seconds / one.predicted_seconds < _MOST_RATIO:
            names = [choice.technique for choice in one.choices]
            calibration = learn_time(calibration, target, names, one.predicted_seconds, one.measured_seconds)
    return calibration


def learn_from_trial(plan: Plan) -> None:
    """Add a trial to the calibration file, if it is writable."""
    before = known_calibration()
    _save(before, learned_from_trial(before, plan))


def learn(plan: Plan, steps: Sequence[StepLine], begun_at: int = 0) -> None:
    """Add a run to the calibration file, if it is writable; see `learned_from`."""
    before = known_calibration()
    _save(before, learned_from(before, plan, steps, begun_at))


def _save(before: Calibration, after: Calibration) -> None:
    if after == before:
        return
    file = calibration_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        after.save(file)
    except (OSError, OutputError):
        pass
