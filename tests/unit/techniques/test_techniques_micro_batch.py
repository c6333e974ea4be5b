"""The sizes of micro-batches, and the conditions that rule them out."""

import pytest
from torch import nn

from plimsoll.records.plan import micro_batch_choice
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.micro_batch import MicroBatch, sizes_of
from technique_models import workload_of

PLAIN, WITH_BATCH_NORM = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, (1,)), (5, (5, 3, 2, 1)), (12, (12, 6, 4, 3, 2, 1)), (40, (40, 20, 14, 10, 8, 7, 6, 5, 4, 3, 2, 1))],
)
def test_every_size_gives_another_number_of_micro_batches(batch_size, sizes):
    assert sizes_of(batch_size) == sizes
    assert len({-(-batch_size // size) for size in sizes}) == len(sizes)


def test_the_choices_begin_with_the_whole_batch():
    available = MicroBatch().choices(workload_of(PLAIN), Setting("cpu", batch_size=4))
    assert available == (micro_batch_choice(4), micro_batch_choice(2), micro_batch_choice(1))


def test_one_sample_and_batch_norm_are_not_cut_unless_it_is_allowed():
    technique = MicroBatch()
    assert technique.choices(workload_of(PLAIN), Setting("cpu", batch_size=1)) == "a batch of one sample cannot be cut"
    workload = workload_of(WITH_BATCH_NORM)
    assert "allow: [recut_batch_norm]" in technique.choices(workload, Setting("cpu", batch_size=4))
    allowing = Setting("cpu", batch_size=4, allow=frozenset({"recut_batch_norm"}))
    assert len(technique.choices(workload, allowing)) == 3


@pytest.mark.parametrize(
    ("model", "size", "reason"),
    [
        (PLAIN, 4, None),
        (PLAIN, 1, None),
        (PLAIN, 5, "a micro-batch of 5 is not a part of a batch of 4: give 1 to that many"),
        (PLAIN, 0, "a micro-batch of 0 is not a part of a batch of 4: give 1 to that many"),
        (WITH_BATCH_NORM, 4, None),
        (WITH_BATCH_NORM, 2, "BatchNorm's statistics depend on the cut"),
    ],
)
def test_what_a_size_conflicts_with(model, size, reason):
    setting = Setting("cpu", batch_size=4)
    assert MicroBatch().conflicts(micro_batch_choice(size), (), workload_of(model), setting) == reason


def test_installing_it_changes_nothing():
    workload = workload_of(PLAIN)
    before = vars(PLAIN).copy()
    with installed(workload, [micro_batch_choice(2)]):
        assert vars(PLAIN) == before
