"""A batch in pieces: the shares add up, and a piece without a target is left out."""

from dataclasses import replace

import pytest
import torch

from plimsoll.ranks import Ranks
from plimsoll.records.run import OomEvent
from plimsoll.run.pieces import Piece, Shape, Spare, no_way_out, weighted_pieces
from plimsoll.techniques._whole import Reason
from plimsoll.workload import Workload, model_loss

LABELS = torch.tensor([[1, 1], [-100, -100], [1, -100]])  # 2, 0 and 1 tokens
MODEL = torch.nn.Linear(1, 1)
WORKLOAD = Workload(MODEL, torch.optim.SGD(MODEL.parameters()), model_loss, "tokens")
SHAPE = Shape(num_samples=3, num_units=3, elements_per_sample=2.0)


@pytest.mark.parametrize(("micro_batch", "shares"), [(1, [2 / 3, 1 / 3]), (2, [2 / 3, 1 / 3]), (3, [1.0]), (9, [1.0])])
def test_a_piece_weighs_what_it_has_of_the_units(micro_batch, shares):
    pieces = list(weighted_pieces({"labels": LABELS}, micro_batch, SHAPE, WORKLOAD))
    assert [piece.share for piece in pieces] == shares
    assert torch.cat([piece.batch["labels"] for piece in pieces]).ne(-100).sum() == 3


class Lending(Ranks):
    """One of two, of which the other has this sample."""

    def __init__(self, other: object) -> None:
        super().__init__()
        self.world_size, self.other = 2, other

    def gather_agreed(self, value):
        return [value, self.other]

    def each(self, numbers):
        return [numbers, [3.0]]


def labels_of(spare: Spare, pieces: list[Piece]) -> list[tuple[list[list[int]], float]]:
    return [(one.batch["labels"].tolist(), one.share) for one in spare.filled(iter(pieces), 2)]


def test_what_is_left_to_do_is_done_with_a_sample_that_has_a_target_and_counts_for_nothing():
    whole = Piece({"labels": LABELS[1:]}, 1.0, range(2))
    own = Spare(WORKLOAD, is_lent=False)
    assert labels_of(own, [whole]) == [([[-100, -100], [1, -100]], 1.0), ([[1, -100]], 0.0)]
    assert len(labels_of(own, [whole, whole])) == 2
    lent = {"labels": LABELS[:1]}
    assert labels_of(Spare(replace(WORKLOAD, ranks=Lending(lent)), is_lent=True), []) == [([[1, 1]], 0.0)] * 2
    lender = Spare(replace(WORKLOAD, ranks=Lending(None)), is_lent=True)
    assert labels_of(lender, [whole])[1] == ([[1, -100]], 0.0)


def test_where_lengths_decide_the_rank_with_most_pieces_says_how_many():
    own = Spare(replace(WORKLOAD, cuts_by_length=True, ranks=Lending(None)), is_lent=False)
    assert [one.share for one in own.filled(iter([Piece({"labels": LABELS}, 1.0, range(3))]), 9)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("phase", "whole", "remedy"),
    [
        ("forward", None, "micro-batch 1 is the smallest there is: give a larger budget, shorter sequences"),
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
