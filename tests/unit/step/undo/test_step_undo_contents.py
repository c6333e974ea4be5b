"""Contents of many places: the saved contents are the original ones, and every difference is found."""

import random
from array import array
from collections import OrderedDict, deque

import pytest

from plimsoll.step.undo.contents import Places
from plimsoll.step.undo.find_state import Attributes, Items, Numbers, is_same


class Thing:
    pass


class OwnDict(dict):
    """A dict that iterates over nothing, as a class may that stores its items elsewhere."""

    def __iter__(self):
        return iter(())

    def values(self):
        return ()


def containers_of(rng):
    thing = Thing()
    thing.a = object()
    made = [[], {}, [1.5], {"a": object()}, deque([object()], maxlen=3), OrderedDict(a=1, b=2), {1, 2}, OwnDict(a=1)]
    return [Items(rng.choice(made).copy()) for _ in range(20)] + [Attributes(thing), Numbers(array("d", [1.5]))]


def change(place, rng):
    if isinstance(place, Attributes):
        place.owner.a = object()
    elif isinstance(place, Numbers):
        place.numbers[0] += 1
    elif isinstance(place.items, dict):
        changes = [
            lambda one: one.update(a=object()),
            lambda one: one.update(b=one.pop("b", 0.5)),
            lambda one: one.clear(),
        ]
        rng.choice(changes)(place.items)
    elif isinstance(place.items, set):
        place.items ^= {rng.random()}
    else:
        place.items.append(object())


@pytest.mark.parametrize("seed", range(30))
def test_what_is_taken_is_what_was_there_and_all_that_differs_is_found(seed):
    rng = random.Random(seed)
    places = containers_of(rng)
    taken = Places(places)
    before, contents = taken.contents(), [place.content() for place in places]
    assert [before[number] for number in range(len(before))] == contents
    assert before.differing(taken.contents()) == []
    for place in rng.sample(places, rng.randrange(len(places))):
        change(place, rng)
    now = [place.content() for place in places]
    expected = [number for number in range(len(places)) if not is_same(contents[number], now[number])]
    assert sorted(before.differing(taken.contents())) == expected
    for number in expected:
        places[number].fill(before[number])
    assert before.differing(taken.contents()) == []


def test_what_was_replaced_is_what_was_held():
    places = [Items([1]), Items([2])]
    taken = Places(places)
    before = taken.contents()
    before.replace(1, [3])
    assert (before[1], before.differing(taken.contents())) == ([3], [1])
    places[1].items[0] = 3
    assert before.differing(taken.contents()) == []


def test_no_places_do_not_differ():
    assert Places([]).contents().differing(Places([]).contents()) == []
