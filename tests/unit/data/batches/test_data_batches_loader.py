"""The loader: its cursor moves only on request, and resuming yields the same batches as an uninterrupted run."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plimsoll.data.batches.batching import Buckets
from plimsoll.data.batches.loader import Batch, Loader, iterate_once
from plimsoll.data.batches.order import BlockShuffle
from plimsoll.errors import CheckpointError, DataError


class Numbers:
    """A dataset whose samples are their numbers."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(ids)[:, None], "epoch": torch.tensor(epoch)}

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids % 40 + 1


def take(loader: Loader, num_batches: int) -> list[Batch]:
    batches = []
    for _ in range(num_batches):
        batches.append(loader.peek())
        loader.advance()
    return batches


def facts(batches: list[Batch]) -> list[tuple[int, int, list[int]]]:
    return [(batch.epoch, batch.first_sample, batch.sample_ids.tolist()) for batch in batches]


def test_peeking_moves_nothing():
    loader = Loader(Numbers(10), 4, seed=0)
    assert facts([loader.peek()]) == facts([loader.peek()])
    first = loader.peek()
    loader.advance()
    assert loader.peek().first_sample == 4
    assert torch.equal(first.fields["input_ids"][:, 0], torch.from_numpy(first.sample_ids))


def test_an_epoch_is_every_sample_once_and_ends_with_a_smaller_batch():
    loader = Loader(Numbers(10), 4, seed=0)
    assert len(loader) == 3
    batches = take(loader, 6)
    assert [(batch.epoch, batch.first_sample, len(batch.sample_ids)) for batch in batches] == [
        (0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 4), (1, 4, 4), (1, 8, 2),
    ]  # fmt: skip
    epochs = [np.concatenate([batch.sample_ids for batch in batches[start : start + 3]]).tolist() for start in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_an_epoch_that_batches_divide_has_no_empty_batch():
    assert [batch.first_sample for batch in take(Loader(Numbers(8), 4, seed=0), 4)] == [0, 4, 0, 4]
    assert len(Loader(Numbers(8), 4, seed=0)) == 2


def test_the_seed_draws_the_order_and_without_shuffling_it_is_the_datasets():
    assert facts(take(Loader(Numbers(50), 10, seed=1), 5)) == facts(take(Loader(Numbers(50), 10, seed=1), 5))
    assert facts(take(Loader(Numbers(50), 10, seed=1), 5)) != facts(take(Loader(Numbers(50), 10, seed=2), 5))
    plain = take(Loader(Numbers(5), 3, seed=1, shuffle=False), 3)
    assert facts(plain) == [(0, 0, [0, 1, 2]), (0, 3, [3, 4]), (1, 0, [0, 1, 2])]


@pytest.mark.parametrize("num_done", range(8))
def test_a_resumed_loader_goes_on_as_if_never_stopped(num_done: int):
    uninterrupted = take(Loader(Numbers(10), 4, seed=5), 10)
    loader = Loader(Numbers(10), 4, seed=5)
    take(loader, num_done)
    loader.peek()  # simulates a step that began but did not happen
    resumed = Loader(Numbers(10), 4, seed=5)
    resumed.load_state_dict(loader.state_dict())
    assert facts(take(resumed, 10 - num_done)) == facts(uninterrupted[num_done:])


def place(loader: Loader) -> dict[str, int]:
    return {name: loader.state_dict()[name] for name in ("epoch", "position")}


def test_the_state_is_a_place_in_an_epoch():
    loader = Loader(Numbers(10), 4, seed=5)
    assert place(loader) == {"epoch": 0, "position": 0}
    take(loader, 4)
    assert place(loader) == {"epoch": 1, "position": 4}


@pytest.mark.parametrize(
    "state", [{"epoch": 0, "position": 10}, {"epoch": 0, "position": -1}, {"epoch": -1, "position": 0}]
)
def test_a_state_outside_the_data_is_refused(state: dict[str, int]):
    loader = Loader(Numbers(10), 4, seed=0)
    with pytest.raises(CheckpointError, match=f"at sample {state['position']} of epoch .* the data has 10 samples"):
        loader.load_state_dict(loader.state_dict() | state)
    assert place(loader) == {"epoch": 0, "position": 0}


def test_data_smaller_than_a_batch_is_refused_in_numbers():
    Loader(Numbers(4), 4, seed=0)
    with pytest.raises(DataError, match=r"has 3 samples, but one step takes batch_size = 4: .*--set batch_size=3"):
        Loader(Numbers(3), 4, seed=0)


def test_iterating_gives_the_rest_of_the_epoch_and_counts_what_is_handed_out():
    loader = Loader(Numbers(10), 4, seed=3)
    whole = facts(take(Loader(Numbers(10), 4, seed=3), 6))
    loader.advance()
    got = []
    for fields in loader:
        got.append(fields["input_ids"][:, 0].tolist())
        assert loader.state_dict()["position"] in (8, 0)
    assert got == [ids for _, _, ids in whole[1:3]]
    assert place(loader) == {"epoch": 1, "position": 0}
    assert [fields["epoch"].item() for fields in loader] == [1, 1, 1]


batches = st.one_of(
    st.integers(1, 9),
    st.builds(Buckets, batch_size=st.integers(1, 9), pool_samples=st.integers(1, 50)),
    st.builds(Buckets, max_tokens=st.integers(40, 300), pool_samples=st.integers(1, 50)),
)
shuffles = st.one_of(st.booleans(), st.builds(BlockShuffle, st.integers(1, 9), st.integers(1, 5)))


@pytest.mark.long
@given(
    num_samples=st.integers(9, 80), batches=batches, shuffle=shuffles, kills=st.lists(st.integers(0, 12), max_size=6)
)
@settings(max_examples=30, deadline=None)
def test_an_epoch_is_the_corpus_whatever_the_ranks_are_and_wherever_it_is_stopped(
    num_samples: int, batches: int | Buckets, shuffle: bool | BlockShuffle, kills: list[int]
):
    whole = Loader(Numbers(num_samples), batches, 7, shuffle)
    expected = take(whole, len(whole))
    expected += take(whole, len(whole))
    state, got = Loader(Numbers(num_samples), batches, 7, shuffle).state_dict(), []
    for number, num_steps in enumerate([*kills, 10_000]):
        world_size = number % 4 + 1  # the number of ranks changes at each stop
        ranks = [
            Loader(Numbers(num_samples), batches, 7, shuffle, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        for _ in range(min(num_steps, len(expected) - len(got))):
            parts = [rank.peek() for rank in ranks]
            ids = np.empty(sum(len(part.sample_ids) for part in parts), np.int64)
            for rank, part in enumerate(parts):
                ids[rank::world_size] = part.sample_ids
                assert ("input_ids" in part.fields) == bool(len(part.sample_ids))
            got.append((parts[0].epoch, parts[0].first_sample, ids.tolist()))
            for rank in ranks:
                rank.advance()
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
        for rank in ranks:
            rank.peek()  # simulates batches read ahead that are lost with the process
    assert got == facts(expected)
    for epoch in range(2):
        ids = [one for batch_epoch, _, some in got if batch_epoch == epoch for one in some]
        assert sorted(ids) == list(range(num_samples))


class MapStyle(torch.utils.data.Dataset):
    """A map-style data set that returns one sample at a time."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"number": number, "square": number**2}


def test_an_ordinary_data_set_is_collated_as_torch_or_the_caller_does():
    (batch,) = take(Loader(MapStyle(), 10, seed=1), 1)
    assert batch.fields["square"].tolist() == [number**2 for number in batch.sample_ids]
    (batch,) = take(Loader(MapStyle(), 10, collate=lambda samples: {"sum": sum(one["number"] for one in samples)}), 1)
    assert batch.fields == {"sum": 45}

    class InLists(MapStyle):
        def __getitems__(self, numbers: list[int]) -> list[int]:
            return [-number for number in numbers]

        def collate(self, samples: list[int]) -> dict[str, torch.Tensor]:
            return {"negative": torch.tensor(samples)}

    (batch,) = take(Loader(InLists(), 10, shuffle=False), 1)
    assert batch.fields["negative"].tolist() == [-number for number in range(10)]


def test_ranks_and_workers_that_cannot_be_are_refused():
    with pytest.raises(DataError, match="rank 2 is not among 2 ranks: give a rank from 0 to 1"):
        Loader(Numbers(4), 4, rank=2, world_size=2)
    with pytest.raises(DataError, match="there cannot be -1 workers: give 0"):
        Loader(Numbers(4), 4, workers=-1)


def test_an_evaluation_sees_every_sample_once_in_order():
    batches = facts(list(iterate_once(Numbers(5), 2)))
    assert batches == [(0, 0, [0, 1]), (0, 2, [2, 3]), (0, 4, [4])]
    assert facts(list(iterate_once(Numbers(1), 2))) == [(0, 0, [0])]
    of_two_ranks = [[batch.sample_ids.tolist() for batch in iterate_once(Numbers(5), 2, rank, 2)] for rank in (0, 1)]
    assert of_two_ranks == [[[0], [2], [4]], [[1], [3], []]]


class Other(Numbers):
    """The same number of samples with other values."""

    def batch(self, ids, epoch=0):
        fields = super().batch(ids, epoch)
        return fields | {"input_ids": fields["input_ids"] + 1}


KINDS = {
    "fixed": 10,
    "buckets": Buckets(batch_size=10, pool_samples=40),
    "tokens": Buckets(max_tokens=80, pool_samples=40),
}
ORDERS = {"whole": True, "blocks": BlockShuffle(4, 3), "none": False}


@pytest.mark.parametrize("num_done", [3, 60])  # in the first epoch and in a later one
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_seed_order_data_or_length_is_refused(kind: str, order: str, num_done: int):
    batches, shuffle = KINDS[kind], ORDERS[order]
    loader = Loader(Numbers(100), batches, seed=1, shuffle=shuffle)
    take(loader, num_done)
    state = loader.state_dict()
    same = Loader(Numbers(100), batches, seed=1, shuffle=shuffle)
    same.load_state_dict(state)
    assert facts(take(same, 3)) == facts(take(loader, 3))
    others = [
        Loader(Numbers(120), batches, seed=1, shuffle=shuffle),
        Loader(Other(100), batches, seed=1, shuffle=shuffle),
        *(Loader(Numbers(100), batches, seed=1, shuffle=other) for name, other in ORDERS.items() if name != order),
        *([Loader(Numbers(100), batches, seed=2, shuffle=shuffle)] if shuffle else []),
    ]
    for other in others:
        with pytest.raises(CheckpointError, match="resume with"):
            other.load_state_dict(state)
        assert place(other) == {"epoch": 0, "position": 0}


FAULTS: list[tuple[Any, str]] = [
    (None, "a dict of whole numbers, but this is NoneType"),
    ("x", "this is str"),
    ([("epoch", 0)], "this is list"),
    ({}, "has no epoch, position, num_samples, order .it has nothing"),
    ({"epoch": "one"}, "epoch = 'one' .* is not a whole number"),
    ({"epoch": 10**9}, "epoch = 1,000,000,000 .* more than any training reaches"),
    ({"position": 3.5}, "position = 3.5 .* is not a whole number"),
    ({"position": True}, "position = True .* is not a whole number"),
    ({"order": None}, "order = None .* is not a whole number"),
    ({"data": None}, "data = None .* is not a whole number"),
    ({"num_samples": None}, "num_samples = None .* is not a whole number"),
    ({"batch": "1"}, "batch = '1' .* is not a whole number"),
    ({"batch": 10**6}, "no batch begins at position 40, batch 1,000,000 of epoch 0"),
    ({"seed": 1}, "'seed', which is not one of its names"),
]


@pytest.mark.parametrize(("fault", "why"), FAULTS, ids=[str(fault) for fault, _ in FAULTS])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_state_is_refused_and_changes_nothing(kind: str, fault: Any, why: str):
    loader = Loader(Numbers(100), KINDS[kind], seed=1)
    while loader.state_dict()["position"] < 40:
        take(loader, 1)
    before = loader.state_dict()
    with pytest.raises(CheckpointError, match=f"{why}.*state_dict"):
        loader.load_state_dict(before | fault if isinstance(fault, dict) and fault else fault)
    assert loader.state_dict() == before
    for name in ("epoch", "position", "num_samples", "order"):
        with pytest.raises(CheckpointError, match=f"the state of a loader has no {name} "):
            loader.load_state_dict({key: value for key, value in before.items() if key != name})


def test_a_position_inside_a_pool_is_no_place_in_buckets():
    loader = Loader(Numbers(100), KINDS["buckets"], seed=1)
    take(loader, 1)
    with pytest.raises(CheckpointError, match="no batch begins at position 7"):
        loader.load_state_dict(loader.state_dict() | {"position": 7})


def test_a_state_before_the_first_batch_fits_any_loader():
    Loader(Numbers(120), 7, seed=3).load_state_dict(Loader(Numbers(100), 10, seed=1).state_dict())
