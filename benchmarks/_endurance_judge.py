"""Verdicts of `endurance.py` on two runs, the memory readings and the replay: figures and faults.

- **Memory is flat**: for each second there are the minimum, median and maximum private memory of the training process.
  Their medians over the first and the last third are compared, for each process that lived long and without the first
  tenth of its life. The whole run is compared as well, if it has at least `_FEWEST_READINGS` readings. Growth up to
  ``GROWTH_SHARE`` of the budget is tolerated. Some pages are touched late, and after the last worker is killed the
  training process holds a tokenizer with its word cache (10 MiB).
- **The ledger is exact**: each step appears once, the samples of the steps tile the epochs, and they equal the samples
  of the undisturbed run.
- **Losses and weights** are bitwise identical until a step uses other micro-batches than in the undisturbed run. After
  that, rounding differs, which training amplifies: the tolerance is ``CLOSE`` for ``CLOSE_STEPS`` steps, then ``NEAR``.
- **The replay** repeats every step with the micro-batches of the disturbed run, without a limit and without
  disturbances. It is bitwise identical or differs by less than ``CLOSE``. If a library cannot allocate scratch memory
  in the middle of a step, it computes without it in another order. With an LSTM, the last bit of 0.2 % of the weights
  differed. The numbers of different losses and tensors are reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from plimsoll.records.run import RunRecord, StepLine
from plimsoll.records.units import format_bytes

GROWTH_SHARE = 0.03
CLOSE, CLOSE_STEPS, NEAR = 1e-5, 1000, 1e-3  # relative to the loss
LONG_LIFE_SHARE = 1 / 20  # of the run's duration, but at least ...
_SHORTEST_LIFE_SECONDS = 30
_WARM_SHARE = 0.1
_MOST_GROWTH = {"num_files": 3, "num_threads": 1}  # per process; over the whole run, the number of workers varies
_FEWEST_READINGS = 300  # of the whole run: fewer readings cover few processes, mostly their first steps

Figures = dict[str, Any]


class Reading(NamedTuple):
    """One second of a training process, observed from outside.

    ``seconds`` is the time since the disturbed run began. ``has_stepped`` is True after loading and the first step,
    when memory should stay constant.
    """

    seconds: float
    pid: int
    least_bytes: int
    median_bytes: int
    most_bytes: int
    num_files: int
    num_threads: int
    has_stepped: bool


@dataclass
class Verdict:
    """Figures for the table and the JSON output, and the faults found."""

    figures: Figures
    faults: list[str]


def growth(readings: Sequence[Reading], name: str) -> int:
    """Return the increase of one number of the readings: the medians of the last minus the first third."""
    values = [getattr(reading, name) for reading in readings]
    third = max(len(values) // 3, 1)
    return round(median(values[-third:]) - median(values[:third]))


def lives(readings: Sequence[Reading], total_seconds: float) -> Iterator[list[Reading]]:
    """Yield the readings of each process that lived long, without the first tenth of its life."""
    shortest = max(total_seconds * LONG_LIFE_SHARE, _SHORTEST_LIFE_SECONDS)
    for _, group in groupby(readings, key=lambda reading: reading.pid):
        life = list(group)
        if len(life) >= 3 and life[-1].seconds - life[0].seconds >= shortest:
            yield life[int(len(life) * _WARM_SHARE) :]


def memory(readings: Sequence[Reading], record: RunRecord, budget_bytes: int, total_seconds: float) -> Verdict:
    """Check that memory stayed under the budget and did not grow."""
    faults: list[str] = []
    seen, told = max((r.most_bytes for r in readings), default=0), max(s.peak_bytes or 0 for s in record.steps)
    for what, peak_bytes in {"seen from outside": seen, "counted by the kernel": told}.items():
        if peak_bytes > budget_bytes:
            faults.append(f"{format_bytes(peak_bytes)} of private memory {what}, in a budget of {budget_bytes}")
    steady = [reading for reading in readings if reading.has_stepped]
    long_lives = list(lives(steady, total_seconds))
    grown: Figures = {}
    for name in ("least_bytes", "median_bytes", "most_bytes", "num_files", "num_threads"):
        in_a_life = max((growth(life, name) for life in long_lives), default=0)
        over_the_run = growth(steady, name) if len(steady) >= _FEWEST_READINGS else 0
        grown[name] = {"in_a_life": in_a_life, "over_the_run": over_the_run}
        most = _MOST_GROWTH.get(name, budget_bytes * GROWTH_SHARE)
        if in_a_life > most:
            faults.append(f"{name} grew by {in_a_life:,} over the life of a process: at most {most:,.0f} is tolerated")
        if over_the_run > most and name not in _MOST_GROWTH:
            faults.append(f"{name} grew by {over_the_run:,} over the run: at most {most:,.0f} is tolerated")
    figures = {
        "budget_bytes": budget_bytes, "seen_peak_bytes": seen, "kernel_peak_bytes": told, "growth": grown,
        "long_lives": len(long_lives), "readings": len(readings),
        "longest_life_seconds": round(max((life[-1].seconds - life[0].seconds for life in long_lives), default=0)),
    }  # fmt: skip
    return Verdict(figures, faults)


def ledger(disturbed: Sequence[StepLine], undisturbed: Sequence[StepLine], repeated: Sequence[list]) -> Verdict:
    """Check that every sample of every step was trained once, in the same order as in the undisturbed run."""
    faults: list[str] = []
    if [line.step for line in disturbed] != list(range(1, len(disturbed) + 1)):
        times = Counter(line.step for line in disturbed)
        faults.append(f"steps that are there other than once: {[step for step, n in times.items() if n != 1][:5]}")
    epoch, position, sizes = 0, 0, Counter[int]()
    for line in disturbed:
        if (line.epoch, line.first_sample) != (epoch, position):
            if (line.epoch, line.first_sample) != (epoch + 1, 0):
                faults.append(f"step {line.step} begins at {line.epoch}:{line.first_sample}, not {epoch}:{position}")
            epoch, position = line.epoch, 0
        position += line.num_samples
        sizes[line.epoch] += line.num_samples
    if len({number for place, number in sizes.items() if place < epoch}) > 1:
        faults.append(f"epochs of different numbers of samples: {dict(sizes)}")
    mine, theirs = (
        [(s.step, s.epoch, s.first_sample, s.num_samples, s.num_units) for s in steps]
        for steps in (disturbed, undisturbed)
    )
    if mine != theirs:
        faults.append(f"{sum(a != b for a, b in zip(mine, theirs, strict=False))} steps had other samples or tokens")
    again = {line.step: (line.micro_batch, line.loss) for line in disturbed}
    num_repeated = num_same_cut = 0
    for steps in repeated:
        for step, micro_batch, loss in steps:
            num_repeated += 1
            if again[step][0] != micro_batch:
                break
            num_same_cut += 1
            if again[step][1] != loss:
                faults.append(f"step {step} was done twice and lost {loss!r}, then {again[step][1]!r}")
    figures = {
        "steps": len(disturbed), "samples": sum(s.num_samples for s in disturbed), "epochs": epoch + 1,
        "steps_done_twice": num_repeated, "of_them_with_the_same_cut": num_same_cut,
    }  # fmt: skip
    return Verdict(figures, faults)


def losses(disturbed: Sequence[StepLine], undisturbed: Sequence[StepLine]) -> Verdict:
    """Check that losses are bitwise identical until the micro-batches differ, and close from then on."""
    pairs = list(zip(disturbed, undisturbed, strict=True))
    cuts = [(one.micro_batch, one.fallback) == (other.micro_batch, other.fallback) for one, other in pairs]
    num_alike = next((number for number, is_same in enumerate(cuts) if not is_same), len(pairs))
    differences = [abs(one.loss - other.loss) / abs(other.loss) for one, other in pairs]
    soon = num_alike + CLOSE_STEPS
    faults: list[str] = []
    for first, last, tolerance in ((0, num_alike, 0.0), (num_alike, soon, CLOSE), (soon, len(pairs), NEAR)):
        largest = max(differences[first:last], default=0.0)
        if largest > tolerance:
            where = f"of steps {first + 1} to {min(last, len(pairs))}"
            faults.append(f"losses {where} differ by {largest:.1e} of their size: at most {tolerance:.0e} is tolerated")
    figures = {
        "same_bits_until_step": num_alike, "steps_cut_otherwise": len(cuts) - sum(cuts),
        "largest_loss_difference": max(differences), "largest_soon": max(differences[num_alike:soon], default=0.0),
        "last_loss": disturbed[-1].loss, "last_loss_undisturbed": undisturbed[-1].loss,
    }  # fmt: skip
    return Verdict(figures, faults)


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Load the final parameters of a run."""
    return load_file(run / "model" / "model.safetensors")


def weights(disturbed: Path, undisturbed: Path, has_same_cuts: bool) -> Verdict:
    """Measure the relative distance of the final weights from the undisturbed ones: the norm over the whole model."""
    mine, theirs = saved(disturbed), saved(undisturbed)
    if mine.keys() != theirs.keys():
        return Verdict({}, [f"the models have other parameters: {sorted(mine.keys() ^ theirs.keys())[:3]}"])
    difference = sum(float((mine[name] - theirs[name]).double().square().sum()) for name in mine) ** 0.5
    size = sum(float(theirs[name].double().square().sum()) for name in theirs) ** 0.5
    faults = [f"the final weights differ by {difference:.1e}"] if has_same_cuts and difference else []
    return Verdict({"weights_relative_difference": difference / size}, faults)


def replay_verdict(replayed: Figures) -> Verdict:
    """Check that the replay, with the same micro-batches, has the same losses and weights."""
    faults = [f"the replay cut {replayed['other_cuts']} steps otherwise"] if replayed["other_cuts"] else []
    for name in ("loss_difference", "weights_difference"):
        if replayed[name] > CLOSE:
            faults.append(f"the replay has a {name} of {replayed[name]:.1e}: at most {CLOSE:.0e} is tolerated")
    return Verdict(replayed, faults)


def left_behind(run: Path, processes: Sequence[str]) -> Verdict:
    """Check that a finished run left no processes, partial checkpoints or surplus checkpoints."""
    halves = [path.name for path in run.glob("checkpoints/.step-*")]
    faults = [f"left behind: {what}" for what in (*processes, *halves)]
    return Verdict({"left_behind": len(faults)}, faults)
