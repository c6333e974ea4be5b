"""Evaluations: the predicted peak and step time of a combination, and the bytes per phase that grow with the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plimsoll.memory.predict import Counted
from plimsoll.records.plan import Choice, Configuration, Duration, Rejected, without_micro_batch
from plimsoll.records.prediction import Estimate
from plimsoll.records.trace import Category, Phase
from plimsoll.techniques import Choices, in_order, technique_of

_GROWS = ("activations", "temporaries", "inputs")
_PASSES: tuple[Phase, ...] = ("copy", "forward", "loss", "backward", "evaluation")


@dataclass(frozen=True)
class PhasePeak:
    """The peak of a phase: the bytes independent of the micro-batch, and the bytes that grow with it."""

    fixed_bytes: int
    growing_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """The result of tracing one combination of techniques at one micro-batch size.

    ``phases`` has the peak of each phase of a step. ``parts`` has the bytes of each category at the peak.
    """

    choices: Choices
    micro_batch: int
    peak: Estimate
    fits: bool
    step_time: Duration
    phases: dict[Phase, PhasePeak]
    parts: dict[Category, int]

    @property
    def combination(self) -> Choices:
        """The choices without the micro-batch."""
        return without_micro_batch(self.choices)

    @property
    def need_bytes(self) -> int:
        """The budget in bytes that the combination needs: the upper end of the predicted range of the peak."""
        return self.peak.high_bytes

    @property
    def seconds(self) -> float:
        """The likely step time in seconds."""
        return self.step_time.likely_seconds

    @property
    def largest_phase(self) -> PhasePeak:
        """The peak of the largest phase."""
        return max(self.phases.values(), key=lambda peak: peak.fixed_bytes + peak.growing_bytes)

    def configuration(self) -> Configuration:
        """Return the configuration for a plan."""
        return Configuration(choices=self.choices, peak=self.peak, step_time=self.step_time)


Evaluate = Callable[[Choices], Evaluation]
"""A function that traces and evaluates a combination. Each combination is traced once."""


def heap_of(choices: Choices) -> Choice | None:
    """Return the choice that configures the heap or the allocator; ``None`` for the default."""
    return next((choice for choice in choices if not technique_of(choice.technique).is_traced), None)


def in_heap(choices: Choices, heap: Choice | None) -> Choices:
    """Return choices in which ``heap`` replaces the choice of the heap; with ``None``, they use the default heap."""
    rest = tuple(choice for choice in choices if technique_of(choice.technique).is_traced)
    return rest if heap is None else in_order((*rest, heap))


def phase_peaks(counted: Counted) -> dict[Phase, PhasePeak]:
    """Return the peak of each phase after setup, split into fixed bytes and bytes that grow with the micro-batch."""
    ops, live = counted.trace.ops, counted.live
    op_of = np.asarray(counted.trace.event_op, dtype=np.int64)[live.event]
    steps = np.asarray(ops.step, dtype=np.int64)[op_of]
    names = sorted(set(ops.phase))
    number_of = {phase: number for number, phase in enumerate(names)}
    phases = np.asarray([number_of[phase] for phase in ops.phase], dtype=np.int64)[op_of]
    growing = sum((live.by_category[name] for name in _GROWS if name in live.by_category), np.zeros_like(live.total))
    found: dict[Phase, PhasePeak] = {}
    for phase in names:
        rows = np.flatnonzero((phases == number_of[phase]) & (steps > 0))
        if len(rows):
            row = rows[live.total[rows].argmax()]
            growing_bytes = int(growing[row]) if phase in _PASSES else 0
            found[phase] = PhasePeak(int(live.total[row]) - growing_bytes, growing_bytes)
    return found


@dataclass(frozen=True)
class Found:
    """The result of a search. If no combination fits, ``fits`` is False and ``chosen`` is the leanest combination.

    ``plain`` is the whole batch with only the choices without which the training cannot run. ``candidates`` are other
    combinations of about the same predicted speed, for a trial.
    """

    chosen: Evaluation
    fallbacks: tuple[Evaluation, ...]
    plain: Evaluation
    fits: bool
    rejected: tuple[Rejected, ...]
    lossy_alternatives: tuple[Evaluation, ...]
    candidates: tuple[Evaluation, ...] = ()
