"""Plans small enough to check by hand; 1 MiB is 2**20 bytes."""

from __future__ import annotations

from plimsoll.records.device import Budget
from plimsoll.records.plan import (
    Candidate,
    Choice,
    Configuration,
    Duration,
    Plan,
    Rejected,
    Trial,
    Tried,
    micro_batch_choice,
)
from prediction_records import MIB, estimate, fitting, too_large

CHECKPOINTS = Choice(technique="checkpointing", options={"blocks": "all"})
HALF_CHECKPOINTS = Choice(technique="checkpointing", options={"blocks": 6})
OFFLOAD = Choice(technique="offload")
ADAFACTOR = Choice(technique="adafactor")
DISK = Choice(technique="optimizer_streaming", options={"to": "disk", "bucket_mib": 64})


def duration(likely_seconds: float, spread_seconds: float = 0.0) -> Duration:
    """Return a duration with a symmetric range."""
    return Duration(
        likely_seconds=likely_seconds,
        low_seconds=likely_seconds - spread_seconds,
        high_seconds=likely_seconds + spread_seconds,
    )


def configuration(
    *choices: Choice, mib: int, seconds: float, spread_mib: int = 0, spread_seconds: float = 0.0
) -> Configuration:
    """Return one way to run a step, with its predictions."""
    return Configuration(choices=choices, peak=estimate(mib, spread_mib), step_time=duration(seconds, spread_seconds))


def rejected(*choices: Choice, reason: str, mib: int | None = None, seconds: float | None = None) -> Rejected:
    """Return a rejected combination; without numbers, an impossible one."""
    return Rejected(
        choices=choices,
        reason=reason,
        peak=None if mib is None else estimate(mib),
        step_time=None if seconds is None else duration(seconds),
    )


def fitting_plan(**changes: object) -> Plan:
    """Return half the blocks recomputed and micro-batches of 16: 1000 of 2048 MiB; the plain loop needs 5120.

    Without checkpoints it is 2560 MiB, 512 too much; without micro-batches 3072, 1024 too much.
    """
    fields: dict[str, object] = {
        "budget": Budget(device_bytes=2048 * MIB),
        "limit_bytes": 2048 * MIB,
        "fallbacks": (
            configuration(
                HALF_CHECKPOINTS, micro_batch_choice(16), mib=1000, seconds=1.9, spread_mib=40, spread_seconds=0.4
            ),
            configuration(CHECKPOINTS, micro_batch_choice(8), mib=700, seconds=2.25),
            configuration(CHECKPOINTS, OFFLOAD, micro_batch_choice(1), mib=400, seconds=4.0),
        ),
        "plain": configuration(micro_batch_choice(64), mib=5120, seconds=1.5),
        "rejected": (
            rejected(OFFLOAD, micro_batch_choice(16), reason="31 % slower than the plan", mib=900, seconds=2.5),
            rejected(micro_batch_choice(16), reason="512.0 MiB too much", mib=2560, seconds=1.6),
            rejected(HALF_CHECKPOINTS, micro_batch_choice(64), reason="1.0 GiB too much", mib=3072, seconds=1.75),
            rejected(CHECKPOINTS, micro_batch_choice(16), reason="11 % slower than the plan", mib=800, seconds=2.1),
            rejected(DISK, reason="the optimizer keeps no states: SGD without momentum"),
        ),
        "prediction": fitting(micro_batch=16),
        "about": {
            "checkpointing": "activations of these blocks are computed again in backward, not kept",
            "micro_batch": "the batch in micro-batches, whose gradients are summed",
            "offload": "activations wait in the host's memory for backward",
            "adafactor": "a row and a column in place of Adam's second moment",
        },
        "numerics": {
            "checkpointing": "bitwise",
            "micro_batch": "reordered",
            "offload": "bitwise",
            "adafactor": "lossy",
        },
        "made_for": {"torch": "2.13.0", "sequence length": "1024"},
        "num_traces": 31,
        "plan_seconds": 12.34,
    }
    return Plan.model_validate(fields | changes)


def untried_plan() -> Plan:
    """Return a plan with a candidate that is about as fast: half the micro-batch and all blocks recomputed."""
    return fitting_plan(
        candidates=(Candidate(configuration=configuration(CHECKPOINTS, micro_batch_choice(8), mib=700, seconds=2.25)),)
    )


def tried_plan() -> Plan:
    """Return a plan after trials of three: the second was the fastest, and the third ran out of memory."""
    first, second, _ = fitting_plan().fallbacks
    whole = (HALF_CHECKPOINTS, micro_batch_choice(64))
    shortage = "memory ran out in the forward phase (asked for 1.0 GiB with 1.5 GiB in use of 2.0 GiB)"
    tried = (
        Tried(choices=first.choices, outcome="slower", predicted_seconds=1.9, measured_seconds=2.5),
        Tried(choices=second.choices, outcome="fastest", predicted_seconds=2.25, measured_seconds=2.125),
        Tried(choices=whole, outcome="ran out", predicted_seconds=1.75, why=shortage),
    )
    offloaded, uncheckpointed, _, checkpointed, on_disk = fitting_plan().rejected
    not_taken = (
        offloaded.model_copy(update={"reason": "not tried: 2.5 s a step predicted"}),
        uncheckpointed,
        checkpointed.model_copy(update={"reason": "not tried: 2.1 s a step predicted"}),
        on_disk,
    )
    return fitting_plan(
        fallbacks=fitting_plan().fallbacks[1:], rejected=not_taken, trial=Trial(seconds=6.5, tried=tried)
    )


def constrained_plan(**changes: object) -> Plan:
    """Return the same plan with a constraint of each kind, one fallback without numbers, and the planner's reasons."""
    fields: dict[str, object] = {
        "pinned": (HALF_CHECKPOINTS,),
        "forbidden": ("offload",),
        "fallbacks": (*fitting_plan().fallbacks[:1], Configuration(choices=(CHECKPOINTS, micro_batch_choice(1)))),
        "why": {"micro_batch": "7 micro-batches are not faster"},
    }
    return fitting_plan(**(fields | changes))


def impossible_plan(**changes: object) -> Plan:
    """Return a plan whose exact combinations need 2500 MiB of 2048; Adafactor needs 1900 MiB, with bf16 1700."""
    fields: dict[str, object] = {
        "fallbacks": (configuration(CHECKPOINTS, micro_batch_choice(1), mib=2450, seconds=9.0),),
        "rejected": fitting_plan().rejected[1:3],
        "lossy_alternatives": (
            rejected(ADAFACTOR, CHECKPOINTS, micro_batch_choice(1), reason="fits", mib=1900, seconds=9.5),
            rejected(ADAFACTOR, reason="1.0 GiB too much", mib=3072, seconds=1.5),
        ),
        "smallest_budget_bytes": 2500 * MIB,
        "prediction": too_large(micro_batch=1, answers=()),
    }
    return fitting_plan(**(fields | changes))


def bare_plan(**changes: object) -> Plan:
    """Return a plan without predictions, in which all optional fields are empty."""
    return Plan.model_validate({"budget": Budget(), "fallbacks": ()} | changes)
