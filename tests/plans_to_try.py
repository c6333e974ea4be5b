"""Plans with candidates, whose numbers are made up; in a module of its own for programs that run in a process."""

from __future__ import annotations

from plimsoll.records.device import Budget
from plimsoll.records.plan import Candidate, Choice, Duration, Plan, Rung, micro_batch_choice
from plimsoll.records.prediction import Estimate

MIB = 1 << 20


def rung(samples: int, *others: Choice, mib: int = 100, seconds: float = 1.0) -> Rung:
    """One way to run a step; ``mib`` and ``seconds`` are what is predicted."""
    peak = Estimate(likely_bytes=mib * MIB, low_bytes=mib * MIB, high_bytes=mib * MIB)
    step_time = Duration(likely_seconds=seconds, low_seconds=seconds / 2, high_seconds=2 * seconds)
    return Rung(choices=(micro_batch_choice(samples), *others), peak=peak, step_time=step_time)


def plan_of(first: Rung, *candidates: Rung, fallbacks: tuple[Rung, ...] = ()) -> Plan:
    return Plan(
        budget=Budget(), rungs=(first, *fallbacks), candidates=tuple(Candidate(rung=one) for one in candidates),
        made_for={"target": "cpu"},
    )  # fmt: skip
