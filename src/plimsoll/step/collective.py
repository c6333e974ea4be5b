"""Work that either all ranks complete or none: if one rank runs out of memory, no rank uses the result.

Each rank tries its part (`plimsoll.step.oom_boundary`), then all ranks exchange the outcome before any continues. Work
that itself communicates, such as passes of a sharded model, calls `Ranks.require_all` before each exchange. A rank that
learns of another rank's failure in this call stops, and does not exchange the outcome again.

With one process, this equals `attempt`. The caller undoes the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from plimsoll.device.base import Backend
from plimsoll.distributed.ranks import PeerOutOfMemory, Ranks
from plimsoll.records.run import PHASES_OF_A_STEP, OomEvent
from plimsoll.step.oom_boundary import Position, attempt

T = TypeVar("T")

_PEER = PeerOutOfMemory.family


def attempt_collectively(work: Callable[[], T], backend: Backend, position: Position, ranks: Ranks) -> T | OomEvent:
    """Run ``work`` on all ranks, and return its result, or an event if memory ran out on one of them."""
    return agreed(attempt(work, backend, position), position, ranks)


def agreed(outcome: T | OomEvent, position: Position, ranks: Ranks) -> T | OomEvent:
    """Exchange this rank's outcome with all ranks. Return it, or an event if memory ran out on another rank."""
    if ranks.is_alone or (
        isinstance(outcome, OomEvent) and outcome.family == _PEER
    ):  # the ranks have already exchanged the outcome
        return outcome
    rank = ranks.first_of(isinstance(outcome, OomEvent))
    if isinstance(outcome, OomEvent):
        return outcome.model_copy(update={"rank": ranks.rank})
    if rank is None:
        return outcome
    return OomEvent(
        step=position.step + (position.phase in PHASES_OF_A_STEP),
        phase=position.phase,
        family=_PEER,
        micro_batch=position.micro_batch,
        rank=rank,
        raw_text=str(PeerOutOfMemory(rank)),
    )


def survived_elsewhere(own: Sequence[OomEvent], ranks: Ranks) -> list[OomEvent]:
    """Return the events that other ranks recovered from alone, with their rank numbers. All ranks must call it."""
    every = enumerate(ranks.gather(list(own)))
    return [one.model_copy(update={"rank": rank}) for rank, events in every if rank != ranks.rank for one in events]


def told_by_all(event: OomEvent, ranks: Ranks) -> OomEvent:
    """Return, on all ranks, the event of the lowest rank that ran out of memory.

    Call this after the failed step has been undone. The next action depends only on this event, so all ranks take the
    same action.
    """
    if ranks.is_alone:
        return event
    events = ranks.gather(None if event.family == _PEER else event)
    rank, first = next((rank, one) for rank, one in enumerate(events) if one is not None)
    num_others = sum(one is not None for one in events) - 1
    return first.model_copy(update={"rank": rank, "num_other_ranks": num_others})
