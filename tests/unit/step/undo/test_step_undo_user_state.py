"""User state is searched for once, copied if it may change, and released when its owner releases it."""

import gc
import weakref

import numpy
import torch

from plimsoll.step.undo.user_state import Kept


class Owner:
    """An object with state."""

    def __init__(self):
        self.items, self.count = [1], 0


def do(kept, work):
    """Run the work and report all of its changes."""
    work()
    changed = ((known, known.change()) for known in kept.copied)
    kept.passed([(known, now) for known, now in changed if now is not None])


def works(kept, work, num_works):
    for _ in range(num_works):
        kept.begin()
        [*kept.arrays()]
        do(kept, work)


def test_what_was_exchanged_by_work_is_found_before_the_next_and_not_kept_alive():
    owner, old = Owner(), []

    def work():
        owner.value = torch.ones(2)
        old.append(weakref.ref(owner.value))

    kept = Kept(lambda: [[("owner", owner)]])
    for number in range(4):
        kept.begin()
        if number:
            assert [name for name, _ in kept.parts[0].tensors.values()] == ["owner.value"]
        do(kept, work)
    gc.collect()
    assert [one() is None for one in old] == [True] * 3 + [False]


def test_what_is_left_out_and_what_is_too_large_to_look_into_is_nothing_new():
    owner, apart = Owner(), [[]]
    owner.apart, owner.many = apart[0], [[number] for number in range(10_001)]
    kept = Kept(lambda: [[("owner", owner)]], lambda: apart)
    works(kept, lambda: None, 2)
    lasting = kept._lasting
    kept.begin()
    assert kept._lasting is lasting
    assert not any(one.name == "owner.apart" for one in kept.copied + kept.others)


def test_a_new_root_is_looked_into():
    roots = [("owner", Owner())]
    kept = Kept(lambda: [roots])
    works(kept, lambda: None, 3)
    roots.append(("hook", [numpy.zeros(2)]))
    kept.begin()
    assert [name for name, _ in kept.parts[0].arrays] == ["hook[0]"]


def test_arrays_of_all_layouts_and_kinds_are_seen_to_be_written():
    owner = Owner()
    owner.first = numpy.zeros(1 << 17)  # takes the MiB
    owner.arrays = [numpy.zeros((4, 4)).T, numpy.zeros(4)[::2], numpy.array([None, 2]), numpy.zeros(2, "datetime64[s]")]
    kept = Kept(lambda: [[("owner", owner)]])
    works(kept, lambda: None, 8)
    kept.begin()
    copied = {name: (array, copy is not None) for name, array, copy in kept.arrays()}
    assert [is_copied for _, is_copied in copied.values()] == [True] + [False] * 4
    assert not any(kept.is_written(name, array) for name, (array, _) in copied.items())
    for array in owner.arrays:
        array[0] = 3
    assert [kept.is_written(name, array) for name, (array, _) in copied.items()] == [False] + [True] * 4
