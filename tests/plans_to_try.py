"""Made-up plans with candidates, in a separate module for programs that run in a process."""

from __future__ import annotations

from plimsoll.records.device import Budget
from plimsoll.records.plan import Candidate, Choice, Configuration, Duration, Plan, micro_batch_choice
from plimsoll.records.prediction import Estimate

MIB = 1 << 20


def configuration(samples: int, *others: Choice, mib: int = 100, seconds: float = 1.0) -> Configuration:
    """Return one way to run a step, with predicted ``mib`` and ``seconds``."""
    peak = Estimate(likely_bytes=mib * MIB, low_bytes=mib * MIB, high_bytes=mib * MIB)
    step_time = Duration(likely_seconds=seconds, low_seconds=seconds / 2, high_seconds=2 * seconds)
    return Configuration(choices=(micro_batch_choice(samples), *others), peak=peak, step_time=step_time)


def plan_of(first: Configuration, *candidates: Configuration, fallbacks: tuple[Configuration, ...] = ()) -> Plan:
    return Plan(
        budget=Budget(), fallbacks=(first, *fallbacks),
        candidates=tuple(Candidate(configuration=one) for one in candidates),
        made_for={"target": "cpu"},
    )  # fmt: skip
