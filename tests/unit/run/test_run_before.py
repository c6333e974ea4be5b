"""What others change between two batches is taken for the state of before; what passes changed, too, is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.run.before import Before, Watched
from plimsoll.run.reachable import reached_from


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.number = [0], 0
        self.register_buffer("mean", torch.zeros(2))


def before_of(model):
    reached = reached_from([("model", model)])
    watched = Watched([place.copier() for _, place in reached.places])
    watched.counted = [("model.mean", model.mean)]
    return Before(reached, watched, [copier() for copier in watched.copiers], versions=watched.versions())


def left_by(before):
    return [copier() for copier in before.watched.copiers], before.watched.versions()


@pytest.mark.parametrize(
    ("passes", "others", "entangled"),
    [
        (lambda model: None, lambda model: model.items.append(1), set()),
        (lambda model: setattr(model, "number", 1), lambda model: setattr(model, "name", "a"), set()),
        (lambda model: model.items.append(1), lambda model: model.items.append(2), {"model.items"}),
        (lambda model: model.mean.add_(1), lambda model: model.mean.add_(1), {"model.mean"}),
        (lambda model: model.mean.add_(1), lambda model: None, set()),
    ],
    ids=["a list of theirs", "an attribute each", "a list of both", "a tensor of both", "a tensor of the passes"],
)
def test_what_others_change_stays(passes, others, entangled):
    model = Kept()
    before = before_of(model)
    passes(model)
    left = left_by(before)
    others(model)
    assert set(before.rebase(*left)) == entangled


def test_only_what_is_changed_is_named():
    model = Kept()
    before = before_of(model)
    assert not list(before.changed())
    model.items.append(1)
    assert [(name, content, now) for name, _, content, now in before.changed()] == [("model.items", [0], [0, 1])]
