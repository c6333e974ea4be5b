"""What ranks tell each other of their buffers; that streams go on so is in `tests/end_to_end/test_rank_jobs.py`."""

import torch
from torch import nn

from plimsoll.models.carried import CarriedState
from plimsoll.ranks import Ranks
from plimsoll.run.shared_buffers import own_lanes, share_lanes, share_statistics


class OfThree(Ranks):
    """One of three."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.world_size = rank, 3


def test_every_lane_is_told_by_the_rank_that_has_it():
    """Two windows of five lanes; every rank has something in every lane, also in those that it had before."""
    states = torch.arange(1.0, 11.0).reshape(2, 5, 1)
    parts = [own_lanes(states * (rank + 1), OfThree(rank)) for rank in range(3)]
    assert parts[1][0, :, 0].tolist() == [0, 4, 0, 0, 10]
    assert sum(parts)[0, :, 0].tolist() == [1, 4, 9, 4, 10]


def test_alone_nothing_changes():
    model = nn.Sequential(nn.BatchNorm1d(2), CarriedState(nn.GRU(1, 1), 2))
    for buffer in model.buffers():
        buffer.fill_(3)
    share_statistics(model, Ranks())
    share_lanes(model, Ranks())
    assert all((buffer == 3).all() for buffer in model.buffers())
