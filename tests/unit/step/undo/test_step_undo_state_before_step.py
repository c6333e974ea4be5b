"""State that is reachable and differs from before a step is found. Changes by others in between do not count."""

from __future__ import annotations

import torch
from torch import nn

from plimsoll.step.undo.contents import Places
from plimsoll.step.undo.find_state import reached_from
from plimsoll.step.undo.state_before_step import Before, Watched


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = [0]
        self.register_buffer("mean", torch.zeros(2))


def before_of(model):
    reached = reached_from([("model", model)])
    watched = Watched(Places([place for _, place in reached.places]))
    watched.counted = watched.stored = [("model.mean", model.mean)]
    contents, versions, addresses = watched.places.contents(), watched.versions(), watched.addresses()
    return Before(reached, watched, contents, versions=versions, addresses=addresses)


def test_only_what_is_changed_is_named():
    model = Kept()
    before = before_of(model)
    assert not list(before.changed())
    model.items.append(1)
    assert [(name, content, now) for name, _, content, now in before.changed()] == [("model.items", [0], [0, 1])]


def test_what_others_write_or_move_is_not_counted_and_what_passes_wrote_before_is():
    model = Kept()
    before, moved = before_of(model), before_of(model)
    model.mean += 1  # passes
    moment = before.watched.versions(), before.watched.addresses()
    model.mean += 1
    before.skip(*moment)
    assert before.watched.versions() == [before.versions[0] + 1]
    moment = moved.watched.versions(), moved.watched.addresses()
    model.mean.data = torch.ones(2)
    moved.skip(*moment)
    assert moved.watched.addresses() == moved.addresses
