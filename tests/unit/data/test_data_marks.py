"""What tells data sets of one length apart, where reading them has no other effect."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from plimsoll.data.marks import mark_of


class Named:
    fingerprint = "abc"

    def __len__(self) -> int:
        return 3


class Drawn(Named):
    fingerprint = None

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        raise AssertionError("it may draw what it gives, and is not to be read")


class Batched(Drawn):
    def __init__(self, first: int) -> None:
        self.first = first

    def batch(self, ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(ids + self.first), "half": torch.zeros(len(ids), dtype=torch.bfloat16)}


@pytest.mark.parametrize("make", [Batched, lambda first: TensorDataset(torch.arange(first, first + 9))])
def test_content_is_told_by_some_samples(make):
    assert mark_of(make(1), 0) == mark_of(make(1), 0) != mark_of(make(2), 0)


def test_a_name_of_its_own_is_taken_and_what_may_not_be_read_is_not():
    assert mark_of(Named(), 2) is not None
    assert mark_of(Drawn(), 0) is None
    assert mark_of(Batched(1), 2) is None
