"""What all do or none: here one process, and a stand-in for a rank whose peer failed; real ranks in tests/numerics."""

from __future__ import annotations

import pytest

from plimsoll.device.base import backend_for
from plimsoll.ranks import PeerOutOfMemory, Ranks
from plimsoll.records.run import OomEvent
from plimsoll.run.boundary import Position
from plimsoll.run.failpoints import exhaust_memory
from plimsoll.run.together import agreed, attempt_together, told_by_all


class WithPeer(Ranks):
    """One of two, whose peer's memory has run out or not."""

    def __init__(self, peer_event: OomEvent | None) -> None:
        super().__init__()
        self.world_size = 2
        self.peer_event = peer_event
        self.num_asked = 0

    def agree(self, flag: bool) -> bool:
        self.num_asked += 1
        return flag or self.peer_event is not None

    def gather(self, value):
        return [value, self.peer_event]


OOM = OomEvent(family="cpu", phase="backward", raw_text="of the peer")
BACKEND = backend_for("cpu")


def test_alone_it_is_the_attempt():
    assert attempt_together(lambda: 3, BACKEND, Position(), Ranks()) == 3
    event = attempt_together(exhaust_memory, BACKEND, Position(phase="loss"), Ranks())
    assert isinstance(event, OomEvent)
    assert told_by_all(event, Ranks()) is event


def test_what_a_peer_ran_out_of_memory_in_is_not_done_here_either():
    ranks = WithPeer(OOM)
    event = attempt_together(lambda: 3, BACKEND, Position(step=4, phase="clip"), ranks)
    assert isinstance(event, OomEvent)
    assert (event.family, event.step, event.phase) == ("another rank", 5, "clip")
    told = told_by_all(event, ranks)
    assert (told.rank, told.num_other_ranks, told.phase, told.raw_text) == (1, 0, "backward", "of the peer")


def test_the_first_rank_speaks_for_all_that_failed():
    ranks = WithPeer(OOM)
    event = attempt_together(exhaust_memory, BACKEND, Position(phase="loss"), ranks)
    assert isinstance(event, OomEvent)
    told = told_by_all(event, ranks)
    assert (told.rank, told.num_other_ranks, told.phase) == (0, 1, "loss")


def test_who_heard_of_it_inside_of_the_work_does_not_ask_again():
    def hear() -> None:
        raise PeerOutOfMemory

    ranks = WithPeer(OOM)
    event = attempt_together(hear, BACKEND, Position(), ranks)
    assert isinstance(event, OomEvent)
    assert (event.family, ranks.num_asked) == ("another rank", 0)


@pytest.mark.parametrize("outcome", [None, 3])
def test_what_all_have_done_is_done(outcome):
    assert agreed(outcome, Position(), WithPeer(None)) == outcome
