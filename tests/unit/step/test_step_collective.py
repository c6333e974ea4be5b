"""Work that all ranks complete, or none.

Here a stand-in plays a rank whose peer failed; tests/numerics has real ranks.
"""

from __future__ import annotations

from typing import TypeVar, cast

import pytest

from plimsoll.device.base import backend_for
from plimsoll.distributed.ranks import PeerOutOfMemory, Ranks
from plimsoll.records.run import OomEvent
from plimsoll.step.collective import agreed, attempt_collectively, told_by_all
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.step.oom_boundary import Position


class WithPeer(Ranks):
    """The first of several ranks, whose peers ran out of memory or did not."""

    def __init__(self, *peer_events: OomEvent | None) -> None:
        super().__init__()
        self.world_size = 1 + len(peer_events)
        self.peer_events = peer_events
        self.num_asked = 0

    def first_of(self, flag: bool, place: int = 0) -> int | None:
        self.num_asked += 1
        failed = [flag, *(event is not None for event in self.peer_events)]
        return failed.index(True) if any(failed) else None

    def gather(self, value: T) -> list[T]:
        return cast(list[T], [value, *self.peer_events])


T = TypeVar("T")
OOM = OomEvent(family="cpu", phase="backward", raw_text="of the peer")
BACKEND = backend_for("cpu")


def test_alone_it_is_the_attempt() -> None:
    assert attempt_collectively(lambda: 3, BACKEND, Position(), Ranks()) == 3
    event = attempt_collectively(exhaust_memory, BACKEND, Position(phase="loss"), Ranks())
    assert isinstance(event, OomEvent)
    assert told_by_all(event, Ranks()) is event


def test_what_a_peer_ran_out_of_memory_in_is_not_done_here_either() -> None:
    ranks = WithPeer(OOM)
    event = attempt_collectively(lambda: 3, BACKEND, Position(step=5, phase="clip", micro_batch=3), ranks)
    assert isinstance(event, OomEvent)
    assert (event.family, event.step, event.phase, event.micro_batch) == ("another rank", 6, "clip", 3)
    assert (event.rank, event.raw_text, event.shortage) == (1, "memory ran out on rank 1", "on rank 1")
    told = told_by_all(event, ranks)
    assert (told.rank, told.num_other_ranks, told.phase, told.raw_text) == (1, 0, "backward", "of the peer")


def test_the_first_rank_speaks_for_all_that_failed() -> None:
    ranks = WithPeer(OOM)
    event = attempt_collectively(exhaust_memory, BACKEND, Position(phase="loss"), ranks)
    assert isinstance(event, OomEvent)
    told = told_by_all(event, ranks)
    assert (told.rank, told.num_other_ranks, told.phase) == (0, 1, "loss")
    told = told_by_all(event, WithPeer(None, OOM, OOM, OOM))
    assert (told.rank, told.num_other_ranks, told.phase) == (0, 3, "loss")


def test_of_others_that_failed_the_first_speaks_and_the_rest_are_counted() -> None:
    last = OOM.model_copy(update={"phase": "clip"})
    heard = attempt_collectively(lambda: 3, BACKEND, Position(phase="loss"), WithPeer(None, OOM, last, last))
    assert isinstance(heard, OomEvent)
    told = told_by_all(heard, WithPeer(None, OOM, last, last))
    assert (told.rank, told.num_other_ranks, told.phase) == (2, 2, "backward")


def test_who_heard_of_it_inside_of_the_work_does_not_ask_again() -> None:
    def hear() -> None:
        raise PeerOutOfMemory

    ranks = WithPeer(OOM)
    event = attempt_collectively(hear, BACKEND, Position(), ranks)
    assert isinstance(event, OomEvent)
    assert (event.family, ranks.num_asked) == ("another rank", 0)


@pytest.mark.parametrize("outcome", [None, 3])
def test_what_all_have_done_is_done(outcome: int | None) -> None:
    assert agreed(outcome, Position(), WithPeer(None)) == outcome
