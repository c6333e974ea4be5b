"""The cursor moves only when told to, and a loader resumed anywhere goes on as one that was never stopped."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from plimsoll.data.loader import Batch, Loader, iterate_once
from plimsoll.errors import CheckpointError, DataError


class Numbers:
    """A dataset whose samples are their numbers."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(ids)[:, None]}


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
    assert loader.batches_per_epoch == 3
    batches = take(loader, 6)
    assert [(batch.epoch, batch.first_sample, len(batch.sample_ids)) for batch in batches] == [
        (0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 4), (1, 4, 4), (1, 8, 2),
    ]  # fmt: skip
    epochs = [np.concatenate([batch.sample_ids for batch in batches[start : start + 3]]).tolist() for start in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_an_epoch_that_batches_divide_has_no_empty_batch():
    assert [batch.first_sample for batch in take(Loader(Numbers(8), 4, seed=0), 4)] == [0, 4, 0, 4]
    assert Loader(Numbers(8), 4, seed=0).batches_per_epoch == 2


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
    loader.peek()  # a step that was begun, but did not happen
    resumed = Loader(Numbers(10), 4, seed=5)
    resumed.load_state_dict(loader.state_dict())
    assert facts(take(resumed, 10 - num_done)) == facts(uninterrupted[num_done:])


def test_the_state_is_a_place_in_an_epoch():
    loader = Loader(Numbers(10), 4, seed=5)
    assert loader.state_dict() == {"epoch": 0, "position": 0}
    take(loader, 4)
    assert loader.state_dict() == {"epoch": 1, "position": 4}


@pytest.mark.parametrize(
    "state", [{"epoch": 0, "position": 10}, {"epoch": 0, "position": -1}, {"epoch": -1, "position": 0}]
)
def test_a_state_outside_the_data_is_refused(state: dict[str, int]):
    loader = Loader(Numbers(10), 4, seed=0)
    with pytest.raises(CheckpointError, match=f"at sample {state['position']} of epoch .* the data has 10 samples"):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"epoch": 0, "position": 0}


def test_data_smaller_than_a_batch_is_refused_in_numbers():
    Loader(Numbers(4), 4, seed=0)
    with pytest.raises(DataError, match=r"has 3 samples, but one step takes batch_size = 4: .*--set batch_size=3"):
        Loader(Numbers(3), 4, seed=0)


def test_an_evaluation_sees_every_sample_once_in_order():
    batches = facts(list(iterate_once(Numbers(5), 2)))
    assert batches == [(0, 0, [0, 1]), (0, 2, [2, 3]), (0, 4, [4])]
    assert facts(list(iterate_once(Numbers(1), 2))) == [(0, 0, [0])]
