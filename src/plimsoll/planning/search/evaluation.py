"""What a trace says of a combination of techniques: its peak, its time, and what of each phase's peak grows with the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plimsoll.memory.predict import Counted
from plimsoll.records.plan import Choice, Configuration, Duration, Rejected
from plimsoll.records.prediction import Estimate
from plimsoll.records.trace import Category, Phase
from plimsoll.techniques import UNTRACED, Choices, in_order

_GROWS = ("activations", "temporaries", "inputs")
_PASSES: tuple[Phase, ...] = ("copy", "forward", "loss", "backward", "evaluation")


@dataclass(frozen=True)
class PhasePeak:
    """The most that is alive in a phase: what does not depend on the micro-batch, and what grows with it."""

    fixed_bytes: int
    growing_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """A combination of techniques with a micro-batch, traced."""

    choices: Choices
    micro_batch: int
    peak: Estimate
    fits: bool
    step_time: Duration
    phases: dict[Phase, PhasePeak]
    parts: dict[Category, int]

    @property
    def combination(self) -> Choices:
        """The choices but for the micro-batch."""
        return without_micro_batch(self.choices)

    @property
    def need_bytes(self) -> int:
        """The budget it is safe in."""
        return self.peak.high_bytes

    @property
    def seconds(self) -> float:
        """The likely time of a step."""
        return self.step_time.likely_seconds

    @property
    def largest_phase(self) -> PhasePeak:
        """The peak of the phase that sets the peak of all."""
        return max(self.phases.values(), key=lambda peak: peak.fixed_bytes + peak.growing_bytes)

    def configuration(self) -> Configuration:
        """As a configuration of a plan."""
        return Configuration(choices=self.choices, peak=self.peak, step_time=self.step_time)


Evaluate = Callable[[Choices], Evaluation]
"""Traces a combination; the same combination is traced once."""


def without_micro_batch(choices: tuple[Choice, ...]) -> Choices:
    """The choices but for the micro-batch."""
    return tuple(choice for choice in choices if choice.technique != "micro_batch")


def heap_of(choices: Choices) -> Choice | None:
    """Which of them sets up how memory is handed out; ``None`` for what a budget sets by itself."""
    return next((choice for choice in choices if choice.technique in UNTRACED), None)


def in_heap(choices: Choices, heap: Choice | None) -> Choices:
    """The same choices in another heap; ``None`` is the one that a budget sets by itself."""
    rest = tuple(choice for choice in choices if choice.technique not in UNTRACED)
    return rest if heap is None else in_order((*rest, heap))


def phase_peaks(counted: Counted) -> dict[Phase, PhasePeak]:
    """Split what is alive at each phase's peak, from the first step on."""
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
    """The combination in force and its fallbacks; ``fits`` is False if ``chosen`` is only what needs least.

    ``candidates`` are others that are about as fast by the model, for a trial.
    """

    chosen: Evaluation
    fallbacks: tuple[Evaluation, ...]
    plain: Evaluation
    fits: bool
    rejected: tuple[Rejected, ...]
    lossy_alternatives: tuple[Evaluation, ...]
    candidates: tuple[Evaluation, ...] = ()
