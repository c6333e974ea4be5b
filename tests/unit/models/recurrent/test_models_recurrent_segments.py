"""Our recurrent models run in time segments, except a bidirectional one, which reports that it cannot."""

import pytest
import torch

from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.recurrent.segments import Passed, as_hidden, as_state, runs_in_segments, sums_its_loss

FIELDS = {"architecture": "gru", "vocab_size": 9, "embedding_size": 4, "hidden_size": 4}


def by_hand(run, sequences, state=(), dim=1):
    """Run two consecutive segments."""
    total = None
    for part in zip(*(sequence.split([3, sequence.shape[dim] - 3], dim) for sequence in sequences), strict=True):
        passed = run(state, *part)
        state = passed.state
        total = passed.sums if total is None else tuple(a + b for a, b in zip(total, passed.sums, strict=True))
    return Passed(sums=total, state=state)


@pytest.mark.parametrize("num_labels", [None, 3])
def test_the_loss_is_that_of_forward(num_labels):
    torch.manual_seed(0)
    model = build_recurrent(FIELDS | {"num_labels": num_labels}).double()
    ids = torch.randint(0, 9, (4, 8))
    mask = torch.arange(8)[None, :] < torch.tensor([8, 2, 0, 5])[:, None]
    labels = torch.tensor([0, 2, 1, 1]) if num_labels else torch.where(mask, ids, -100)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    torch.testing.assert_close(model.in_segments(by_hand, **batch).loss, model(**batch).loss)


def test_what_says_it_sums_its_loss():
    assert sums_its_loss(build_recurrent(FIELDS))
    classifier = build_recurrent(FIELDS | {"num_labels": 2})
    assert runs_in_segments(classifier)
    assert not sums_its_loss(classifier)
    assert not sums_its_loss(torch.nn.GRU(2, 2))


def test_in_reverse_it_cannot():
    assert build_recurrent(FIELDS | {"num_labels": 2, "bidirectional": True}).in_segments is None


def test_a_state_goes_to_a_tuple_and_back():
    one, two = torch.zeros(1), torch.ones(1)
    assert (as_state(None), as_hidden(())) == ((), None)
    assert as_hidden(as_state(one)) is one
    assert as_hidden(as_state((one, two))) == (one, two)
