"""Buffers that ranks exchange. `tests/end_to_end/test_rank_jobs.py` tests that streams continue with them."""

import torch
from torch import nn

from plimsoll.distributed.ranks import Ranks
from plimsoll.models.recurrent.carried_state import CarriedState
from plimsoll.step.rank_buffers import own_slots, share_slots, share_statistics


class OfThree(Ranks):
    """One of three ranks; the first one broadcasts 7, and the others together add 100."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.world_size = rank, 3
        self.num_asked = 0

    def broadcast(self, tensors):
        for tensor in tensors:
            tensor.fill_(7)

    def require_all(self, place=0):
        self.num_asked += 1

    def add_up(self, numbers):
        assert self.num_asked == 1  # whether all got here: who did not would be waited for
        return numbers.add_(100)


def test_each_stream_slot_is_given_by_the_rank_that_has_it():
    """There are two windows of five stream slots, and every rank has old values in all slots."""
    states = torch.arange(1.0, 11.0).reshape(2, 5, 1)
    parts = [own_slots(states * (rank + 1), OfThree(rank)) for rank in range(3)]
    assert parts[1][0, :, 0].tolist() == [0, 4, 0, 0, 10]
    assert sum(parts)[0, :, 0].tolist() == [1, 4, 9, 4, 10]


def model_with_buffers():
    """Return a model with all buffers filled with 3."""
    model = nn.Sequential(nn.BatchNorm1d(2), CarriedState(nn.GRU(1, 1), 4))
    model.register_buffer("ramp", torch.ones(2))
    model[0].after = nn.Module()  # somebody's own, below BatchNorm's
    model[0].after.register_buffer("ramp", torch.ones(2))
    for buffer in model.buffers():
        buffer.fill_(3)
    return model


def test_alone_nothing_changes():
    model = model_with_buffers()
    share_statistics(model, Ranks())
    share_slots(model, Ranks())
    assert all((buffer == 3).all() for buffer in model.buffers())


def test_running_statistics_become_those_of_the_first_rank_and_no_other_buffer_does():
    model = model_with_buffers()
    share_statistics(model, OfThree(1))
    assert all((buffer == 7).all() for buffer in model[0].buffers(recurse=False))
    assert all((buffer == 3).all() for buffer in [model.ramp, model[0].after.ramp, *model[1].buffers()])


def test_the_state_of_one_stream_is_spread_to_all_slots():
    """The second of three ranks owns the second of four stream slots."""
    model = model_with_buffers()
    share_slots(model, OfThree(1))
    assert model[1].training_state[:, :, 0, 0, 0].tolist() == [[100, 103, 100, 100]] * 2
    assert all((buffer == 3).all() for buffer in [model.ramp, model[1].evaluation_state, *model[0].buffers()])
