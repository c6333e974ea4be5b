"""The identity of a rank among several, and the answers of a single rank; tests/numerics has several ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.ranks_started import free_port
from torch._C._distributed_c10d import HashStore, Store

from plimsoll.distributed.ranks import PeerOutOfMemory, Ranks, _met, joined
from plimsoll.errors import InputError, RankLostError


def test_alone_is_one_of_one_and_agrees_with_itself():
    ranks = Ranks()
    assert (ranks.rank, ranks.world_size, ranks.is_alone) == (0, 1, True)
    assert [ranks.agree(False), ranks.agree(True)] == [False, True]
    assert ranks.each([3, 4.5]) == [[3, 4.5]]
    assert ranks.gather("here") == ["here"]
    assert ranks.on_first("work", lambda: 7) == 7
    numbers = torch.tensor([1.0, 2.0])
    assert ranks.add_up(numbers).tolist() == [1, 2]
    ranks.broadcast([numbers])
    ranks.require_all()


class AtOtherPlace:
    """An all-reduce in which the other rank is at a given place, or has set its flag."""

    def __init__(self, place: int, is_set: bool = False) -> None:
        self.numbers = torch.tensor([is_set, place, -place])

    def __call__(self, told: torch.Tensor, *_: object, **__: object) -> None:
        torch.maximum(told, self.numbers, out=told)


def test_ranks_at_different_places_are_told_so_unless_memory_has_run_out(monkeypatch: pytest.MonkeyPatch):
    ranks = Ranks()
    ranks.world_size, ranks._told = 2, torch.zeros(3, dtype=torch.int64)
    monkeypatch.setattr("torch.distributed.all_reduce", AtOtherPlace(7))
    ranks.require_all(7)
    for place in (0, 6, 8):
        with pytest.raises(InputError, match="the 2 ranks are in different blocks of the sharded model"):
            ranks.require_all(place)
    assert ranks.agree(True, place=0)
    monkeypatch.setattr("torch.distributed.all_reduce", AtOtherPlace(0, is_set=True))
    with pytest.raises(PeerOutOfMemory):
        ranks.require_all(8)


def test_who_is_not_started_as_one_of_several_is_alone(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined() as ranks:
        assert ranks.is_alone
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined() as ranks:
        assert ranks.is_alone


@pytest.mark.parametrize("text", ["soon", "0", "-1", "1e9", "nan"])
def test_a_timeout_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PLIMSOLL_RANKS_TIMEOUT", text)
    with pytest.raises(InputError, match="must be a number of seconds: set it to 600"), joined():
        pass


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"WORLD_SIZE": "abc", "RANK": "0"},
            "WORLD_SIZE='abc' in the environment must be an integer from 1: start the ranks",
        ),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE='0' in the environment must be an integer from 1"),
        (
            {"WORLD_SIZE": "2", "RANK": "2"},
            "RANK='2' in the environment must be an integer from 0 to 1, for WORLD_SIZE=2",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "-1"},
            "LOCAL_RANK='-1' in the environment must be an integer from 0",
        ),
    ],
)
def test_an_environment_that_no_rank_has_is_refused(monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words), joined():
        pass


def test_a_meeting_without_an_address_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(InputError, match="could not connect to the others at nowhere:.*MASTER_ADDR expected"), joined():
        pass


def test_a_failed_exchange_is_a_lost_rank_and_no_lack_of_memory():
    def fail() -> None:
        raise RuntimeError("[/somewhere/pair.cc:537] Read error [1.2.3.4]:5: Connection reset by peer. Check it. And")

    with pytest.raises(
        RankLostError, match=r"rank 0 of 1 lost another rank.*\(Read error .* reset by peer\)"
    ) as caught:
        Ranks().exchange(fail)
    assert caught.value.exit_code == 77


def test_another_ranks_lack_of_memory_is_named_as_such():
    assert PeerOutOfMemory.family == "another rank"


def met(monkeypatch: pytest.MonkeyPatch, store: HashStore, world_size: int, ranks: range) -> list[Store]:
    """Connect ranks through a store, each in a separate thread."""
    monkeypatch.setattr("plimsoll.distributed.ranks.rendezvous", lambda *_, **__: iter([(store, 0, world_size)]))
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda rank: _met(rank, world_size, 2.0), ranks)]


def test_ranks_that_are_started_again_meet_where_those_before_them_did(monkeypatch: pytest.MonkeyPatch):
    """Restarted ranks meet at the store of the ended ranks.

    Entries of ended ranks in torchrun's store are ignored, also the last entry of a rank that never met the others.
    """
    meeting = HashStore()
    meeting.set("hello/2", "of a rank that ended before it was answered")
    for number in range(3):
        stores = met(monkeypatch, meeting, 3, range(3))
        assert not stores[2].check(["told"])  # no entry of the previous start
        stores[0].set("told", str(number))
        assert [store.get("told") for store in stores] == [str(number).encode()] * 3


def test_ranks_that_nothing_was_heard_of_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError, match="nothing was heard of ranks 1, 2"):
        met(monkeypatch, HashStore(), 3, range(1))
