"""A batch in micro-batches: the shares add up, and a micro-batch without a target is left out."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError
from plimsoll.models.hooks import StepHooks
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.run import OomEvent
from plimsoll.step.micro_batches import (
    Filler,
    MicroBatch,
    Parts,
    Shape,
    autocast,
    no_way_out,
    parts_of_all,
    shape_of,
    weighted_micro_batches,
)
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques.mechanisms.lengths import CutByLength
from plimsoll.techniques.mechanisms.uncuttable import Reason

LABELS = torch.tensor([[1, 1], [-100, -100], [1, -100]])  # 2, 0 and 1 tokens
MODEL = torch.nn.Linear(1, 1)
WORKLOAD = Workload(MODEL, torch.optim.SGD(MODEL.parameters()), model_loss, "tokens")
BY_LENGTH = StepHooks(cut=CutByLength())
SHAPE = Shape(num_samples=3, num_units=3, elements_per_sample=2.0)


@pytest.mark.parametrize(
    ("micro_batch", "shares", "numbers"),
    [
        (1, [2 / 3, 1 / 3], [[0], [2]]),
        (2, [2 / 3, 1 / 3], [[0, 1], [2]]),
        (3, [1.0], [[0, 1, 2]]),
        (9, [1.0], [[0, 1, 2]]),
    ],
)
def test_a_micro_batch_weighs_what_it_has_of_the_units(micro_batch, shares, numbers):
    micro_batches = list(weighted_micro_batches({"labels": LABELS}, micro_batch, SHAPE, WORKLOAD))
    assert [micro_batch.share for micro_batch in micro_batches] == shares
    assert [list(micro_batch.numbers) for micro_batch in micro_batches] == numbers
    assert torch.cat([micro_batch.batch["labels"] for micro_batch in micro_batches]).ne(-100).sum() == 3
    of_all_ranks = weighted_micro_batches({"labels": LABELS}, micro_batch, SHAPE, WORKLOAD, total_units=12)
    assert [micro_batch.share for micro_batch in of_all_ranks] == [share / 4 for share in shares]


@pytest.mark.parametrize("micro_batch", [1, 9])
def test_a_part_without_a_target_has_no_micro_batches(micro_batch):
    batch = {"labels": torch.full((3, 2), -100)}
    assert not list(weighted_micro_batches(batch, micro_batch, SHAPE._replace(num_units=0), WORKLOAD, total_units=5))


def texts_of(*lengths):
    """Return texts of the given lengths in tokens, in 16 columns. The third text, if any, has no target."""
    mask = torch.arange(16).expand(len(lengths), 16) < torch.tensor(lengths)[:, None]
    labels = torch.where(mask, 1, -100)
    labels[2:3] = -100
    return {"input_ids": mask.long(), "attention_mask": mask.long(), "labels": labels}


@pytest.mark.parametrize(
    ("lengths", "micro_batch", "shares", "numbers", "columns"),
    [
        ((16, 8, 16, 8), 1, [1 / 4, 1 / 4], [[0], [1, 3]], [16, 8]),
        ((16, 8, 16, 8), 4, [1 / 2], [[0, 1, 2, 3]], [16]),
        ((12, 12), 2, [3 / 8], [[0, 1]], [12]),
    ],
)
def test_texts_of_alike_length_are_a_micro_batch_without_the_padding_of_longer_ones(
    lengths, micro_batch, shares, numbers, columns
):
    """All ranks together have 64 tokens."""
    workload, batch = replace(WORKLOAD, hooks=BY_LENGTH), texts_of(*lengths)
    micro_batches = list(
        weighted_micro_batches(batch, micro_batch, shape_of(batch, workload), workload, total_units=64)
    )
    assert [micro_batch.share for micro_batch in micro_batches] == shares
    assert [list(micro_batch.numbers) for micro_batch in micro_batches] == numbers
    assert [micro_batch.batch["labels"].shape[1] for micro_batch in micro_batches] == columns


@pytest.mark.parametrize(
    ("changes", "elements_per_sample"),
    [
        ({}, 3 * 16),
        ({"hooks": BY_LENGTH}, 3 * 16),
        ({"full_length": 40}, 3 * 16),
        ({"hooks": StepHooks(cut=CutByLength(40))}, 3 * 40),
    ],
)
def test_where_more_short_texts_make_a_pass_each_counts_as_a_full_one(changes, elements_per_sample):
    workload = replace(WORKLOAD, **changes)
    assert shape_of(texts_of(16, 8, 16), workload) == Shape(3, 24, elements_per_sample)
    assert shape_of({"labels": LABELS}, workload) == Shape(3, 3, 2)  # the lengths of these are unknown


class Of(Ranks):
    """One of two ranks; the other one has the given shape."""

    def __init__(self, other):
        super().__init__()
        self.world_size, self.other = 2, other

    def each(self, numbers):
        return [list(map(float, numbers)), list(map(float, self.other))]


def test_the_parts_of_all_ranks_are_cut_by_the_largest_and_weighted_by_all():
    assert parts_of_all(SHAPE, Ranks()) == Parts(SHAPE, 3, some_have_none=False)
    assert parts_of_all(SHAPE, Of((4, 5, 1.5))) == Parts(Shape(4, 8, 2.0), 7, some_have_none=False)
    assert parts_of_all(SHAPE, Of((1, 0, 6.0))) == Parts(Shape(3, 3, 6.0), 4, some_have_none=True)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_pass_computes_in_the_precision_of_the_workload(precision, dtype):
    with autocast(replace(WORKLOAD, precision=precision)):
        assert MODEL(torch.ones(1, 1)).dtype == dtype


class Lending(Ranks):
    """One of two ranks; the other one has the given sample."""

    def __init__(self, other: object) -> None:
        super().__init__()
        self.world_size, self.other = 2, other

    def gather_agreed(self, value):
        return [value, self.other]

    def each(self, numbers):
        return [numbers, [3.0]]


def labels_of(filler: Filler, micro_batches: list[MicroBatch]) -> list[tuple[list[list[int]], float]]:
    return [(one.batch["labels"].tolist(), one.share) for one in filler.filled(iter(micro_batches), 2)]


def test_what_is_left_to_do_is_done_with_a_sample_that_has_a_target_and_counts_for_nothing():
    whole = MicroBatch({"labels": LABELS[1:]}, 1.0, range(2))
    own = Filler(WORKLOAD, is_lent=False)
    assert labels_of(own, [whole]) == [([[-100, -100], [1, -100]], 1.0), ([[1, -100]], 0.0)]
    assert len(labels_of(own, [whole, whole])) == 2
    lent = {"labels": LABELS[:1]}
    assert labels_of(Filler(replace(WORKLOAD, ranks=Lending(lent)), is_lent=True), []) == [([[1, 1]], 0.0)] * 2
    lender = Filler(replace(WORKLOAD, ranks=Lending(None)), is_lent=True)
    assert labels_of(lender, [whole])[1] == ([[1, -100]], 0.0)


def test_where_lengths_decide_the_rank_with_most_micro_batches_says_how_many():
    own = Filler(replace(WORKLOAD, hooks=BY_LENGTH, ranks=Lending(None)), is_lent=False)
    assert [one.share for one in own.filled(iter([MicroBatch({"labels": LABELS}, 1.0, range(3))]), 9)] == [
        1.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("phase", "whole", "remedy"),
    [
        ("forward", None, "micro-batch 1 is the smallest possible: give a larger budget, shorter sequences"),
        (
            "backward",
            Reason("its cells touch", "part them"),
            "the batch of 3 samples was not cut, because its cells touch: part them, or give a larger budget",
        ),
        ("optimizer", None, "no micro-batch changes what the update needs: give a larger budget"),
    ],
)
def test_where_nothing_helps_the_remedy_fits_the_phase(phase, whole, remedy):
    event = OomEvent(family="cpu", step=7, phase=phase, live_bytes=1024)
    text = no_way_out(event, 1, SHAPE, whole)
    assert text.startswith(f"memory ran out in the {phase} phase of step 7 (1.0 KiB in use); the step was undone.")
    assert remedy in text


def test_a_single_sample_has_no_statistics_for_batch_norm():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch["x"]).sum(),
        units="samples", micro_batch=1, recut_batch_norm=True, recut_loss=True,
    )  # fmt: skip
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(InputError, match=r"BatchNorm has no statistics .*\[1, 3\].*at least 2 samples"):
        step({"x": torch.randn(4, 2)})
    assert all(map(torch.equal, before, model.state_dict().values()))
