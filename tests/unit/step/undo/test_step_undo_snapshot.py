"""Work of code outside this package is undone, and changes that only a failure makes are separated from state."""

import numpy
import pytest
import torch

from plimsoll.step.undo.snapshot import Snapshot
from plimsoll.step.undo.user_state import Kept


class Keeper:
    """An object that the work changes."""

    def __init__(self):
        self.count, self.items, self.tensor, self.array = 0, [1, 2], torch.zeros(2), numpy.zeros(2)
        self.generator = torch.Generator().manual_seed(0)


def snapshot_of(owner, **arguments):
    kept = Kept(lambda: [[("owner", owner)]])
    kept.moving = arguments.pop("moving", kept.moving)
    kept.begin()
    return Snapshot(kept, **arguments)


def test_all_that_work_changed_is_as_before_and_may_be_put_back_twice():
    keeper = Keeper()

    def work():
        keeper.count += 1
        keeper.items.append(3)
        keeper.tensor.data.add_(1)
        keeper.array += 1
        keeper.new = torch.rand(1, generator=keeper.generator)

    snapshot = snapshot_of(keeper)
    snapshot.run(work)
    drawn = keeper.new
    for _ in range(2):
        snapshot.put_back()
        assert (keeper.count, keeper.items) == (0, [1, 2])
        assert (keeper.tensor.tolist(), keeper.array.tolist()) == ([0, 0], [0, 0])
        assert not hasattr(keeper, "new")
    work()
    assert torch.equal(keeper.new, drawn)


def test_what_is_not_observed_is_not_copied_and_what_others_have_copied_neither():
    keeper = Keeper()
    for arguments in ({"is_observed": False}, {"copied": [keeper.tensor.untyped_storage()._cdata]}):
        snapshot = snapshot_of(keeper, **arguments)
        snapshot.run(lambda: keeper.tensor.add_(1))
        assert not (snapshot.writes.written if snapshot.writes else ())


class Failing:
    """Work that counts its calls, and fails while there are tokens left."""

    def __init__(self, num_failures, has_flag=False):
        self.tokens, self.calls, self.has_flag = [True] * num_failures, 0, has_flag
        self.is_ready, self.values = False, 0

    def __call__(self):
        self.calls += 1
        if self.has_flag:
            self.is_ready, self.values = True, torch.ones(1)
        if self.tokens and self.tokens.pop():
            raise MemoryError


def failed(work, moving=(), left=(), **arguments):
    """Run work that fails, restore the state, and return the changes of the failure."""
    snapshot = snapshot_of(work, moving=set(moving), **arguments)
    with pytest.raises(MemoryError):
        snapshot.run(work, left)
    snapshot.put_back()
    return snapshot.changes


def test_what_failing_changes_can_be_left_so_and_what_moves_then_is_put_back():
    work = Failing(1)
    changes = failed(work)
    assert {(change.name, change.value if change.name == "owner" else tuple(change.value)) for change in changes} == {
        ("owner", 1), ("owner.tokens", ())
    }  # fmt: skip
    moving = set()
    snapshot_of(work, moving=moving).run(work, changes)
    assert (work.calls, work.tokens) == (1, [])  # it was called twice: the first time it had counted from one
    assert ("owner", "calls") in moving


def test_what_has_moved_in_work_that_went_through_is_no_change_of_failing():
    work = Failing(0)
    moving = set()
    snapshot_of(work, moving=moving).run(work)
    work.tokens.append(True)
    assert [change.name for change in failed(work, moving)] == ["owner.tokens"]


def test_state_and_flags_that_go_with_an_object_are_never_left():
    """The flag `is_ready` may mean that the tensor next to it exists."""
    assert [change.name for change in failed(Failing(1, has_flag=True))] == ["owner.tokens"]
    assert not failed(Failing(1), is_state=lambda name: True)


def test_changes_that_go_further_differ():
    work = Failing(2)
    first = failed(work)
    assert failed(work) == first
    assert failed(work, left=first) != first
